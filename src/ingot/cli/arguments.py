"""The types of options: counts with units, fractions and paths, each within its range."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

MOST = 10**15  # of a count without a smaller limit
MOST_STEPS = 10**9
LARGEST_SEED = 2**63 - 1


def count(option: str, least: int = 0, most: int = MOST) -> Callable[[str], int]:
    """Return the type of an option that takes a count with or without a unit: 300, 8k, 8Ki, 1.5T.

    option: its name, for the UsageError that the type raises if the count is not within `least` and `most`.
    """

    def read(text: str) -> int:
        from ingot.errors import ConfigError
        from ingot.units import parse_count

        sign = -1 if text.strip().startswith("-") else 1
        try:
            value = sign * parse_count(text.strip().removeprefix("-"))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{shown(error.found)}; {error.rule}") from None
        return _within(option, value, least, most)

    return read


def add_run_and_step(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the arguments of a command that explains a step of a run. default: which step, without the option."""
    parser.add_argument(
        "run", type=path, metavar="RUN", help="run folder, which is only read; it may still be training"
    )
    parser.add_argument(
        "--step", type=count("step", 1, MOST_STEPS), metavar="N", help=f"the step to explain (default: {default})"
    )


def add_run_to_copy(parser: argparse.ArgumentParser) -> None:
    """Add the argument of a command that starts a copy of a run."""
    parser.add_argument(
        "run",
        nargs="?",
        type=path,
        default="run.toml",
        metavar="RUN",
        help="run file, or run folder (default: run.toml); it is only read",
    )


def fraction(option: str, least: float, most: float) -> Callable[[str], float]:
    """Return the type of an option that takes a number from `least` to `most`. option: as in `count`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(repr(text))} is not a number") from None
        return _within(option, value, least, most)

    return read


def _within(option: str, value, least, most):
    from ingot.errors import UsageError

    if math.isnan(value) or not least <= value <= most:
        limits = f"{least:,} to {most:,}" if isinstance(value, int) else f"{least:g} to {most:g}"
        raise UsageError(
            "E-OPTION-RANGE",
            f"--{option} {value:g} is out of range"
            if isinstance(value, float)
            else f"--{option} {value} is out of range",
            rule=f"--{option} is a number from {limits}",
            fix=f"give such a number, or leave --{option} out",
            option=option,
            value=value,
            range=[least, most],
        )
    return value


def path(text: str) -> Path:
    """Read the path of a file or folder."""
    return Path(place(text))


def place(text: str) -> str:
    """Read a path, a URL or a name, which must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty: a variable of the shell may not be set")
    return text


def shown(text: str) -> str:
    """Return the start of a long text."""
    return text if len(text) <= 200 else f"{text[:200]}..."
