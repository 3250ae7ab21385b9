"""Numbers in the environment by which a launcher describes a job to its processes. No torch."""

import os

from ingot.errors import ConfigError


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
