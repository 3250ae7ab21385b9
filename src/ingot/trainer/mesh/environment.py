"""Numbers in the environment by which a launcher describes a job to its processes. No torch."""

import json
import os
from collections.abc import Sequence

from ingot.errors import ConfigError

SUPERVISOR_VARIABLE = "INGOT_SUPERVISOR"  # process id of the supervisor, in the environment of its ranks
OVERRIDES_VARIABLE = "INGOT_OVERRIDES"  # the settings in which this attempt differs from the run file, as JSON


def order_overrides(overrides: Sequence[str]) -> None:
    """Let the ranks that this process starts from now on train with `overrides` of the run file (KEY=VALUE)."""
    os.environ[OVERRIDES_VARIABLE] = json.dumps(list(overrides))


def ordered_overrides() -> list[str]:
    """Return the overrides of the run file with which the launcher of this rank started it."""
    return json.loads(os.environ.get(OVERRIDES_VARIABLE, "[]"))


def environment_number(name: str, default: int, least: int = 0) -> int:
    """Return the whole number in the environment variable `name`. Raises ConfigError if it is none, or too small.

    Of a list, as OMP_NUM_THREADS may be ("4,2"), the first number counts.
    """
    text = os.environ.get(name, "").strip()
    first = text.partition(",")[0].strip()
    if not text:
        return default
    if not (first.isascii() and first.isdigit() and len(first) < 10 and int(first) >= least):
        raise ConfigError(
            "E-ENVIRONMENT-NUMBER",
            f"the environment variable {name} is {text[:100]!r}",
            rule=f"{name} is a whole number, at least {least}",
            fix=f"unset {name}, or set it to a number",
            variable=name,
            value=text[:100],
        )
    return int(first)
