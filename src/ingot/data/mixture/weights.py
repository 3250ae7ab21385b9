"""Weights as people give them: source=share on a command line, a preset's name, or a file that has them."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.data.mixture.shares import PRESET_NAMES, preset_weights
from ingot.errors import ConfigError, UsageError

Weights = dict[str, float]


def parse_weights(pairs: Sequence[str]) -> Weights:
    """["web=.7", "code=0.3"] -> weights. Raises UsageError."""
    found: Weights = {}
    for pair in pairs:
        source, sign, value = pair.rpartition("=")
        try:
            found[source] = float(value)
        except ValueError:
            sign = ""
        if not sign or not source:
            raise UsageError(f"{pair!r} is no weight", rule="write SOURCE=SHARE, like web=0.7")
    return found


def read_weights(path: Path) -> Weights:
    """Of a run file ([data.weights]), of TOML with source = share, or of the JSON that DSIR and DoReMi write.

    Raises ConfigError when there are none.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no weights can be read from {path} ({error})", rule="TOML or JSON") from None
    for names in (("data", "weights"), ("weights",)):
        inner = values
        for name in names:
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            values = inner
            break
    numbers = isinstance(values, Mapping) and all(type(value) in (int, float) for value in values.values())
    if not numbers or not values:
        raise ConfigError(
            f"{path} holds no weights",
            rule="[data.weights] of a run file, a section [weights], or nothing but source = share",
            fix="write lines like web = 0.7",
        )
    return {str(source): float(value) for source, value in values.items()}


def named_weights(spec: str, available: Mapping[str, int]) -> tuple[str, Weights, tuple[str, ...]]:
    """(name, weights, notes) of what `spec` says: a preset's name, or the path of a file (whose stem is the name)."""
    if spec in PRESET_NAMES:
        return spec, *preset_weights(spec, available)
    path = Path(spec)
    if not path.exists():
        raise UsageError(f"{spec!r} is no mixture", rule=f"a file with weights, or one of {', '.join(PRESET_NAMES)}")
    return path.stem, read_weights(path), ()
