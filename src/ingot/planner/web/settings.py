"""The settings of the page and their form in a link. Links are parsed strictly, because they can come from anyone."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, get_args

from ingot.errors import ConfigError, IngotError, UsageError
from ingot.planner.request.amounts import parse_failures, parse_parameters, parse_share, parse_tokens
from ingot.schema.parallel import PipelineSchedule
from ingot.schema.software import Recipe
from ingot.units import parse_count

# The largest cluster and batch of a request, so that no request keeps the server busy for long.
MAX_DEVICES = 131_072
MAX_BATCH = 1_048_576
_MAX_TEXT = 64


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """A model on a cluster and its layout; dp_shard follows from the number of devices.

    params: number of parameters of a dense model, instead of a preset `model`. seq, batch (in sequences), tokens: the
    preset or the rules choose those that are 0. price (US dollars per device-hour), mfu and failures (per node per
    day): the planner predicts or looks up those that are 0.
    """

    model: str = "llama3-8b"
    params: int = 0
    cluster: str = "8xh100"
    seq: int = 0
    batch: int = 0
    tokens: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    micro_batch: int = 1
    zero: int = 3
    recompute: str = "none"
    schedule: str = "1f1b"
    stages_per_rank: int = 0
    context: str = "auto"
    offload: str = "none"
    recipe: str = ""
    price: float = 0.0
    mfu: float = 0.0
    failures: float = 0.0


FIELDS = {field.name: field for field in fields(PageSettings)}
LAYOUT = (
    "tp", "pp", "cp", "ep", "dp_replicate", "micro_batch", "zero", "recompute", "schedule", "stages_per_rank",
    "context", "offload", "recipe",
)  # fmt: skip
# Settings that a search can keep as the user set them.
KEEPABLE = ("tp", "pp", "cp", "ep", "dp_replicate", "micro_batch", "zero", "recompute", "schedule")
_UPPER = {
    "zero": 3,
    "batch": MAX_BATCH,
    "seq": 2**24,
    "tokens": 10**15,
    "params": 10**14,
    "price": 1e4,
    "mfu": 1.0,
    "failures": 1.0,
}
_PARSERS: dict[str, Callable[[str], int | float]] = {
    "seq": parse_count,
    "batch": parse_count,
    "tokens": parse_tokens,
    "params": parse_parameters,
    "mfu": lambda text: parse_share("mfu", text),
    "failures": lambda text: parse_failures("failures", text),
}
WORDS: dict[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "schedule": get_args(PipelineSchedule),
    "context": ("auto", "ring", "ulysses", "usp"),
    "offload": ("none", "cpu", "all"),
    "recipe": get_args(Recipe),
}


def read_settings(pairs: Iterable[tuple[str, str]]) -> PageSettings:
    """Return the settings that the (key, text) pairs of a query describe. Raises UsageError or ConfigError, which name
    the key."""
    values: dict[str, Any] = {}
    for key, text in pairs:
        if key not in FIELDS:
            raise UsageError(
                "E-PAGE-SETTING",
                f"there is no setting {key[:_MAX_TEXT]!r}",
                rule=f"settings are {', '.join(FIELDS)}",
                fix="remove it from the link",
                setting=key[:_MAX_TEXT],
            )
        if key in values:
            raise UsageError(
                "E-PAGE-REPEATED",
                f"{key} is given twice",
                rule="a link has each setting at most once",
                fix=f"remove one {key} from the link",
                setting=key,
            )
        values[key] = _value(key, text.strip())
    return PageSettings(**values)


def _value(key: str, text: str):
    if len(text) > _MAX_TEXT:
        raise _bad_value(UsageError, key, f"has {len(text)} characters", f"at most {_MAX_TEXT} characters")
    default = FIELDS[key].default
    if key in WORDS and text not in WORDS[key]:
        raise _bad_value(UsageError, key, f"is {text!r}", f"one of {', '.join(map(repr, WORDS[key]))}")
    if isinstance(default, str):
        return text
    if not text:
        return default
    parse = _PARSERS.get(key) or (lambda text: _number(key, text, float if isinstance(default, float) else int))
    value = parse(text)
    least, most = 0 if default == 0 else 1, _UPPER.get(key, MAX_DEVICES)
    if not least <= value <= most:
        raise _bad_value(ConfigError, key, f"is {text}", f"{least} to {most:,.15g}")
    return value


def _number(key: str, text: str, kind: type[int] | type[float]):
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        what = "whole number" if kind is int else "number"
        raise _bad_value(ConfigError, key, f"is {text!r}", f"a {what}, written with digits alone")
    return value


def _bad_value(kind: type[IngotError], key: str, found: str, rule: str) -> IngotError:
    return kind("E-PAGE-VALUE", f"{key} {found}", rule=f"{key} is {rule}", fix=f"change {key}", setting=key)


def link_pairs(settings: PageSettings) -> dict[str, str]:
    """Return the (key, text) pairs of the page's link: model (or params), cluster, and all settings that differ from
    their defaults."""
    always = ("params",) if settings.params else ("model",)
    kept = (*always, "cluster")
    return {
        key: f"{value:g}" if isinstance(value, float) else str(value)
        for key, field in FIELDS.items()
        if (value := getattr(settings, key)) != field.default or key in kept
        if not (key == "model" and settings.params)
    }
