"""Parsing and formatting of quantities as people write them: 1.5T tokens, 48 GiB, 3 min 20 s."""

import re
from fractions import Fraction

from ingot.errors import ConfigError

_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_COUNT |= {f"{p}i": 1024**i for i, p in enumerate("kmgt", 1)}
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{p}b": 1000**i for i, p in enumerate("kmgtp", 1)}
_BYTES |= {f"{p}ib": 1024**i for i, p in enumerate("kmgtp", 1)}
_YEAR_SECONDS = 365.25 * 86400
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}


# Commas only between groups of three digits, so that "1,5T" is not read as 15T; an exponent of at most three digits.
_NUMBER = re.compile(r"\s*((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?)\s*([a-z]*)\s*")


def _parse(text: str | int | float, units: dict[str, int], what: str, example: str) -> Fraction:
    """Return the exact value of a quantity: as a float, a seed or a count above 2**53 would become another one."""
    rule = f"write a number with a unit, like {example}"
    match = _NUMBER.fullmatch(text.lower()) if isinstance(text, str) else None
    if isinstance(text, str) and (not match or match[2] not in units):
        raise ConfigError("E-QUANTITY", f"{text!r} is not {what}", rule=rule, value=text)
    try:
        value = Fraction(match[1].replace("_", "").replace(",", "")) * units[match[2]] if match else Fraction(text)
        float(value)
    except OverflowError:
        raise ConfigError("E-QUANTITY", f"{text!r} is too large for {what}", rule=rule, value=text) from None
    except ValueError:
        raise ConfigError("E-QUANTITY", f"{text!r} is not {what}", rule=rule, value=text) from None
    return value


def parse_count(text: str | int | float) -> int:
    """Parse a count: '8b' -> 8_000_000_000, '1.5T' -> 1_500_000_000_000, '8k' -> 8_000, '8Ki' -> 8_192, 300 -> 300.

    Raises ConfigError, also for a number that is not whole, like 1.5.
    """
    value = _parse(text, _COUNT, "a count", "300, 8k, 8Ki, 125m, 8b or 1.5T")
    if value.denominator != 1:
        rule = "a count is a whole number, with or without a unit: 300, 8k, 8Ki, 1.5T"
        raise ConfigError("E-QUANTITY", f"{text!r} is not a whole number", rule=rule, value=text)
    return int(value)


def parse_bytes(text: str | int | float) -> int:
    """Parse a size in bytes: '64 MiB' -> 67_108_864, '1 GB' -> 10**9. Raises ConfigError."""
    return round(_parse(text, _BYTES, "a size", "512 MiB or 1 GB"))


def parse_seconds(text: str | int | float) -> float:
    """Parse a duration into seconds: '90', '90 s', '2 min', '24h'. Raises ConfigError."""
    return float(_parse(text, _SECONDS, "a duration", "90 s, 5 min or 24h"))


# Slurm's forms without "minutes" and "minutes:seconds", which other readers take for seconds and hours:minutes.
_CLOCK = re.compile(r"(?:([0-9]{1,5})-)?([0-9]{1,5})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_PARTS = re.compile(r"(?:([0-9]{1,5}) ?d)?(?: ?([0-9]{1,6}) ?h)?(?: ?([0-9]{1,7}) ?(?:m|min))?(?: ?([0-9]{1,9}) ?s)?")


def parse_duration(text: str) -> float:
    """Parse a duration that has a unit into seconds: '4h', '1d2h30m', and of Slurm's forms hours:minutes:seconds and
    those with days: '04:00:00', '1-12', '1-12:00:00'. Raises ConfigError.
    """
    clean = text.strip().lower()
    clock, parts = _CLOCK.fullmatch(clean), _PARTS.fullmatch(clean)
    if clock and (clock[1] or clock[4]):
        match = clock
    elif parts and clean:
        match = parts
    else:
        raise ConfigError(
            "E-QUANTITY",
            f"{text!r} is not a duration with a unit",
            rule="write days, hours, minutes and seconds as 4h, 90min, 1d2h30m, 04:00:00 or 1-12:00:00",
            value=text,
        )
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _scaled(n: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Format `n` with three digits, in the largest unit of `steps` that it reaches (else the smallest)."""
    limit, unit = next((step for step in steps if abs(n) >= step[0]), steps[-1])
    value = n / limit
    return f"{value:.3g}{unit}" if abs(value) < 999.5 else f"{value:,.0f}{unit}"


def plural(count: float, noun: str) -> str:
    """Return a noun with the ending for a count: "step" for 1, else "steps"."""
    return noun if count == 1 else noun + "s"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 step", "1,200 steps"."""
    return f"{count:,} {plural(count, noun)}"


def format_count(n: float) -> str:
    """Format a count: 1_234_567 -> '1.23M'."""
    return _scaled(n, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")))


def format_usd(dollars: float) -> str:
    """Format US dollars: 47_678_751 -> '$47.7M', 1234 -> '$1,234', 12.5 -> '$12.50', 0.004 -> 'under $0.01'."""
    if dollars < 0.01:
        return "under $0.01"
    if dollars < 100:
        return f"${dollars:.2f}"
    return f"${dollars:,.0f}" if dollars < 1e6 else f"${format_count(dollars)}"


def format_flops(n: float) -> str:
    """Format a number of floating-point operations, or of them per second: 989e12 -> '989 TFLOP'."""
    return _scaled(n, ((1e18, " EFLOP"), (1e15, " PFLOP"), (1e12, " TFLOP"), (1e9, " GFLOP"), (1e6, " MFLOP")))


def format_bytes(n: float) -> str:
    """Format bytes in binary units: 67_108_864 -> '64.0 MiB'."""
    for limit, unit in ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if abs(n) >= limit:
            return f"{n / limit:.1f} {unit}"
    return f"{n:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a duration: 0.0042 -> '4.2 ms', 75 -> '1 min 15 s', 90_000 -> '1 d 1 h', a century -> '100 years'."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.3g} s"
    whole = round(seconds)
    if whole >= 2 * _YEAR_SECONDS:
        return f"{whole / _YEAR_SECONDS:,.0f} years"
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"
