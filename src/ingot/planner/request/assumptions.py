"""What a plan assumes, changed by name: facts of the cluster, of failures and prices, properties of the software."""

import re
from collections.abc import Iterable
from dataclasses import fields, replace

from ingot.config import from_dict, to_dict
from ingot.errors import ConfigError, UsageError
from ingot.planner.request.amounts import parse_bandwidth
from ingot.planner.run.outlook import Assumptions
from ingot.schema.cluster import Cluster
from ingot.schema.software import Software
from ingot.units import parse_bytes, parse_seconds


def assume(cluster: Cluster, assumptions: Assumptions, settings: Iterable[str]) -> tuple[Cluster, Assumptions]:
    """settings: "network_bandwidth=400Gb/s", "restart_seconds=20min": fields of either. Raises UsageError, and
    ConfigError where the values cannot be."""
    facts, outlook = {f.name for f in fields(Cluster)} - {"name", "device", "peak_flops"}, _names(Assumptions)
    changed: dict[str, object] = {}
    for setting in settings:
        key, value = _split("--assume", setting)
        if key not in facts | outlook:
            raise unknown_key("--assume", key, sorted(facts | outlook))
        changed[key] = _value(key, value)
    mine = {key: value for key, value in changed.items() if key in facts}
    others = {key: value for key, value in changed.items() if key in outlook}
    if mine:
        cluster = from_dict(Cluster, to_dict(cluster) | mine, where=_place)
    if others:
        assumptions = from_dict(Assumptions, to_dict(assumptions) | others, where=_place)
    return cluster, assumptions


def with_properties(software: Software, settings: Iterable[str], recipe: str = "") -> Software:
    """settings: "kernels=tuned". recipe: of low-precision products; "" keeps that of `software`."""
    changed = dict(_split("--software", setting) for setting in settings)
    if recipe:
        changed["recipe"] = recipe
    for key in changed:
        if key not in _names(Software):
            raise unknown_key("--software", key, sorted(_names(Software)))
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
        raise UsageError(f"{option} {setting}", rule="KEY=VALUE", fix=f"{option} {key or 'KEY'}=VALUE")
    return key.strip().replace("-", "_"), value.strip()


def unknown_key(option: str, key: str, known: list[str]) -> UsageError:
    import difflib

    close = difflib.get_close_matches(key, known, n=2, cutoff=0.5)
    fix = f"did you mean {' or '.join(close)}?" if close else ""
    return UsageError(f"{option}: there is no {key!r}", rule=f"known: {', '.join(known)}", fix=fix)


def _value(key: str, text: str) -> object:
    """By what the key's name says that it counts."""
    try:
        if key.endswith(("bandwidth", "bytes_per_second")):
            return parse_bandwidth(float(text) if _plain(text) else text)
        if key.endswith("_bytes"):
            return _bytes(key, text)
        if key.endswith("_seconds"):
            return parse_seconds(text)
    except ConfigError as error:
        raise UsageError(f"--assume {key}={text}", rule=error.rule or error.found, fix=error.fix) from None
    if text.endswith("%") and _plain(text[:-1]):
        return float(text[:-1]) / 100
    if not _plain(text):
        return {"true": True, "false": False}.get(text, text)
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _bytes(key: str, text: str) -> int:
    """GB and GiB differ by 7% and mean what they say; Gb are bits."""
    if re.fullmatch(r"[0-9.,_ ]+[KMGTkmgt]i?b(it)?s?", text):
        size = re.sub(r"b(it)?s?$", "B", text)
        fix = f"{key}={size} or {key}={size.replace('B', 'iB') if 'i' not in size else size}"
        raise UsageError(
            f"--assume {key}={text}: these are bits", rule="memory is counted in bytes: GB or GiB", fix=fix
        )
    return parse_bytes(text)


def _plain(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
