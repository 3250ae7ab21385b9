"""Changes to a plan's assumptions by name: facts about the cluster, failures and prices, properties of the software."""

import re
from collections.abc import Iterable
from dataclasses import fields, replace

from ingot.config import from_dict, to_dict
from ingot.errors import ConfigError, UsageError
from ingot.planner.request.amounts import parse_bandwidth
from ingot.planner.request.presets import unknown
from ingot.planner.run.outlook import Assumptions
from ingot.schema.cluster import Cluster
from ingot.schema.software import Software
from ingot.units import parse_bytes, parse_seconds


def assume(cluster: Cluster, assumptions: Assumptions, settings: Iterable[str]) -> tuple[Cluster, Assumptions]:
    """Return the cluster and the assumptions with the fields that `settings` change.

    settings: fields of Cluster or Assumptions with their values, like "network_bandwidth=400Gb/s" and
    "restart_seconds=20min". Raises UsageError for unknown fields or unreadable values, ConfigError for illegal values.
    """
    facts, outlook = {f.name for f in fields(Cluster)} - {"name", "device", "peak_flops"}, _names(Assumptions)
    outlook -= {"restart_source"}
    changed: dict[str, object] = {}
    for setting in settings:
        key, value = _split("--assume", setting)
        if key not in facts | outlook:
            raise unknown("E-ASSUME-UNKNOWN", "assumption", key, tuple(sorted(facts | outlook)))
        changed[key] = _value(key, value)
    mine = {key: value for key, value in changed.items() if key in facts}
    others = {key: value for key, value in changed.items() if key in outlook}
    if mine:
        cluster = from_dict(Cluster, to_dict(cluster) | mine, where=_place)
    if others:
        assumptions = from_dict(Assumptions, to_dict(assumptions) | others, where=_place)
    return cluster, assumptions


def with_properties(software: Software, settings: Iterable[str], recipe: str = "") -> Software:
    """Return `software` with changed properties.

    settings: properties with values, like "kernels=tuned". recipe: recipe of low-precision matrix products; "" keeps
    the one of `software`. Raises UsageError for unknown properties, ConfigError for illegal values.
    """
    changed = dict(_split("--software", setting) for setting in settings)
    if recipe:
        changed["recipe"] = recipe
    for key in changed:
        if key not in _names(Software):
            raise unknown("E-SOFTWARE-UNKNOWN", "property of software", key, tuple(sorted(_names(Software))))
    values = {key: {"true": True, "false": False}.get(value, value) for key, value in changed.items()}
    if not values:
        return software
    named = replace(software, name=", ".join(f"{key} {value}" for key, value in changed.items()))
    return from_dict(Software, to_dict(named) | values, where=lambda key: f"--software {key}")


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def _place(key: str) -> str:
    return f"--assume {key}"


def _split(option: str, setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not equals or not value.strip():
        raise UsageError(
            "E-OPTION-PAIR",
            f"{option} {setting}",
            rule=f"{option} takes KEY=VALUE",
            fix=f"{option} {key or 'KEY'}=VALUE",
            option=option,
            setting=setting,
        )
    return key.strip().replace("-", "_"), value.strip()


def _value(key: str, text: str) -> object:
    """Return the parsed value of an assumption; the suffix of its key (_bytes, _seconds, ...) decides the unit."""
    try:
        if key.endswith(("bandwidth", "bytes_per_second")):
            return parse_bandwidth(float(text) if _plain(text) else text)
        if key.endswith("_bytes"):
            return _bytes(key, text)
        if key.endswith("_seconds"):
            return parse_seconds(text)
    except ConfigError as error:
        raise UsageError(
            "E-ASSUME-VALUE", f"--assume {key}={text}", rule=error.rule or error.found, fix=error.fix, key=key
        ) from None
    if text.endswith("%") and _plain(text[:-1]):
        return float(text[:-1]) / 100
    if not _plain(text):
        return {"true": True, "false": False}.get(text, text)
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _bytes(key: str, text: str) -> int:
    """Return the number of bytes of a size in GB or GiB. Raises UsageError for Gb, which means bits."""
    if re.fullmatch(r"[0-9.,_ ]+[KMGTkmgt]i?b(it)?s?", text):
        size = re.sub(r"b(it)?s?$", "B", text)
        fix = f"{key}={size} or {key}={size.replace('B', 'iB') if 'i' not in size else size}"
        raise UsageError(
            "E-SIZE-BITS",
            f"--assume {key}={text}: these are bits",
            rule="memory is counted in bytes: GB or GiB",
            fix=fix,
            key=key,
        )
    return parse_bytes(text)


def _plain(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
