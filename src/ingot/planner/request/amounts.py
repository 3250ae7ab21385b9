"""Parsers of the amounts in a plan request: budgets, prices, shares, tokens, batches, rates.

Each parser refuses a text that spells another quantity, and names the right spelling: for bytes instead of tokens, a
percentage written as a share above 1, a budget without a unit.
"""

import math
import re
from dataclasses import dataclass

from ingot.errors import ConfigError, UsageError
from ingot.units import format_count, parse_count, parse_seconds

_NUMBER = r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_FLOP_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18, "z": 1e21, "y": 1e24}
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_BYTES = re.compile(_NUMBER + r"\s*[kmgtp]i?b(?:ytes)?", re.IGNORECASE)
_MANY_FAILURES = 0.05
_BUDGETS = "a budget is operations (6e23flop), money ('$2M', 2MUSD), time (24h, 30d) or GPU-hours (1M gpu-hours)"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A budget, of which exactly one field is above 0. device_hours: hours summed over all devices."""

    flops: float = 0.0
    usd: float = 0.0
    seconds: float = 0.0
    device_hours: float = 0.0


def parse_budget(text: str | float) -> Budget:
    """Parse "6e23flop", "$2M", "2MUSD", "24h" or "1M gpu-hours". Raises UsageError, even for a bare number."""
    plain = str(text).strip().lower().replace(" ", "")
    for pattern, make in _FORMS:
        if match := re.fullmatch(pattern, plain):
            budget = make(*match.groups())
            if not 0 < max(budget.flops, budget.usd, budget.seconds, budget.device_hours) < math.inf:
                raise _out_of_range("--budget", text, "above 0")
            return budget
    if re.fullmatch(_NUMBER, plain) and _number(plain) == 0:
        raise _out_of_range("--budget", text, "above 0", "give a budget above 0: 6e23flop, '$2M' or 24h")
    raise UsageError(
        "E-BUDGET-FORMAT", f"--budget {text}", rule=_BUDGETS, fix=_suggested_budget(plain), budget=str(text)
    )


def _flops(number: str, prefix: str) -> Budget:
    return Budget(flops=_number(number) * _FLOP_PREFIXES[prefix])


def _usd(number: str, suffix: str) -> Budget:
    return Budget(usd=_number(number) * _THOUSANDS[suffix])


def _time(text: str, weeks: str) -> Budget:
    return Budget(seconds=_number(text) * 7 * 86400 if weeks else parse_seconds(text))


def _device_hours(number: str, suffix: str) -> Budget:
    return Budget(device_hours=_number(number) * _THOUSANDS[suffix])


_FORMS = (
    (_NUMBER + r"([kmgtpezy]?)flops?", _flops),
    (r"\$" + _NUMBER + r"([kmb]?)", _usd),
    (_NUMBER + r"([kmb]?)(?:\$|usd|dollars?)", _usd),
    (_NUMBER + r"([kmb]?)(?:gpu|device|chip|tpu)-?(?:h|hours?)", _device_hours),
    (_NUMBER + r"(w|weeks?)", _time),
    (r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:s|min|h|d))()", _time),
)


def _number(text: str) -> float:
    return float(text.replace("_", "").replace(",", ""))


def _suggested_budget(plain: str) -> str:
    """Return the fix for a budget without a unit or with a wrong unit: the spelling that was probably meant."""
    if re.fullmatch("[kmb]?", plain):
        return "quote it: '$2M', or write 2MUSD; the shell takes $2 for a variable"
    if plain.startswith("-"):
        return "remove the minus sign: a budget is above 0"
    if re.fullmatch(_NUMBER + "[kmbt]?", plain):
        count = f"{plain}flop or {plain} gpu-hours" if plain[-1].isalpha() else f"{plain}flop or {plain}h"
        return f"did you mean {plain}usd, {count}? tokens are given by --tokens"
    if re.fullmatch(_NUMBER + r"[kmgtpezy]?flops?/s", plain):
        return f"{plain} is a rate; a budget is an amount: {plain.removesuffix('/s')}"
    if re.fullmatch(_NUMBER + r"[kmbt]?tok(?:en)?s?", plain):
        return f"--tokens {re.sub('tok.*', '', plain)}"
    return "write it as 6e23flop, '$2M' or 24h"


def parse_tokens(text: str | float) -> int:
    """Parse '1.5T' to 1.5e12. Raises ConfigError if the text is not a count, UsageError for bytes or a count below
    1."""
    plain = str(text).strip()
    if _BYTES.fullmatch(plain):
        count = re.sub(r"i?b(?:ytes)?$", "", plain, flags=re.IGNORECASE)
        why = "a token takes 2 bytes in shards (4 if there are over 65,536 ids), and about 4 bytes of English text"
        raise _count_in_bytes("--tokens", text, f"tokens are counted; {why}", f"--tokens {count}")
    plain = re.sub(r"[\s-]*tok(?:en)?s?$", "", plain, flags=re.IGNORECASE)
    return _at_least_one("--tokens", text, parse_count(plain), "token")


def parse_parameters(text: str | float) -> int:
    """Parse '70b' to 70e9 parameters; b means billions, never bytes. Raises UsageError."""
    plain = str(text).strip()
    if re.fullmatch(_NUMBER + r"\s*[kmgt]i?b", plain, re.IGNORECASE):
        raise _count_in_bytes("--params", text, "parameters are counted", "--params 70b")
    try:
        count = parse_count(plain)
    except ConfigError as error:
        raise UsageError(
            "E-PARAMS-FORMAT",
            f"--params {text}",
            rule=error.rule,
            fix="--params 70b, or --model NAME",
            params=str(text),
        ) from None
    return _at_least_one("--params", text, count, "parameter")


def _at_least_one(option: str, text: object, count: int, what: str) -> int:
    if count < 1:
        raise _out_of_range(option, text, f"at least 1 {what}")
    return count


def _out_of_range(option: str, text: object, rule: str, fix: str = "") -> UsageError:
    fix = fix or f"give {option} a number that is {rule}"
    return UsageError(
        "E-OPTION-RANGE", f"{option} {text}", rule=f"{option} is {rule}", fix=fix, option=option, value=text
    )


def _count_in_bytes(option: str, text: object, rule: str, fix: str) -> UsageError:
    return UsageError("E-COUNT-BYTES", f"{option} {text}: these are bytes", rule=rule, fix=fix, option=option)


def parse_failures(option: str, text: str | float) -> float:
    """Parse '0.38%' or 0.0038 to 0.0038 failures per node per day; 0 is allowed. Raises UsageError.

    A bare 0.38 is refused, because 38% of all nodes failing each day is unlikely: the user probably means 0.38%.
    """
    share = parse_share(option, text, none=True)
    if share > _MANY_FAILURES and not str(text).strip().endswith("%"):
        rule = f"the share of nodes that fail in a day; published shares are 0.23% to 1.6%, {text} means {share:.0%}"
        raise UsageError(
            "E-FAILURES-PERCENT",
            f"{option} {text}",
            rule=rule,
            fix=f"{option} {share:g}%, or {option} {share:.0%} if you mean it",
            option=option,
            share=share,
        )
    return share


def parse_share(option: str, text: str | float, *, none: bool = False) -> float:
    """Parse '45%' or 0.45 to 0.45, a share above 0 and at most 1. none: allow 0 too. Raises UsageError."""
    plain = str(text).strip()
    percent = plain.endswith("%")
    try:
        value = float(plain.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if 0 < value <= 1 or (none and value == 0):
        return value
    fix = f"{option} {value:g}%, or {option} {value / 100:g}" if 1 < value <= 100 and not percent else ""
    least = "from 0%" if none else "above 0%"
    raise _out_of_range(option, text, f"a share {least} up to 100%: 45% or 0.45", fix)


def parse_price(text: str | float) -> float:
    """Parse '4', '$4', '4/h' or '4usd' to US dollars per device-hour. Raises UsageError."""
    match = re.fullmatch(_NUMBER + r"(?:usd)?(?:/(?:gpu-?)?h(?:our)?)?", str(text).strip().lower().removeprefix("$"))
    price = _number(match[1]) if match else math.nan
    if not 0 < price < math.inf:
        raise _out_of_range("--price", text, "above 0: US dollars per device-hour", "--price 4")
    return price


def parse_batch(text: str | int, seq_len: int) -> tuple[int, str]:
    """Return the number of sequences in a global batch, and the reason for it. Raises UsageError.

    text: '512' means 512 sequences, '4M' means tokens: 4,000,000, or 4,194,304 if only that is a whole number of
    sequences.
    """
    plain = re.sub(r"[\s-]*tok(?:en)?s?$", "", str(text).strip(), flags=re.IGNORECASE)
    named = plain != str(text).strip()
    try:
        count = parse_count(plain)
    except ConfigError as error:
        rule = "a number of sequences (512), or of tokens with its unit (4M)"
        raise UsageError("E-BATCH-FORMAT", f"--batch {text}", rule=rule, fix=error.rule, batch=str(text)) from None
    if count < 1:
        raise _out_of_range("--batch", text, "at least 1 sequence")
    if plain.replace("_", "").replace(",", "").isdigit() and not named:
        return count, "as asked for"
    binary = {"k": 1024, "m": 1024**2, "b": 1024**3, "g": 1024**3}.get(plain[-1].lower(), 0)
    tokens = round(float(plain[:-1].replace(",", "")) * binary) if binary and count % seq_len else count
    tokens = tokens if tokens % seq_len == 0 else count
    if tokens < seq_len:
        raise UsageError(
            "E-BATCH-SHORT",
            f"--batch {text}: {format_count(tokens)} tokens is less than one sequence of {seq_len:,}",
            rule="a --batch with a unit counts tokens, without one sequences",
            fix=f"write --batch {tokens} for {tokens} sequences",
            tokens=tokens,
            seq_len=seq_len,
        )
    sequences = round(tokens / seq_len)
    return sequences, f"asked for {plain} tokens: {sequences} x {seq_len} = {format_count(sequences * seq_len)}"


_RATE = re.compile(_NUMBER + r"\s*([kmgt]?)(i?)(b|B)(?:it|yte)?s?(?:/s|ps)", re.IGNORECASE)


def parse_bandwidth(text: str | float) -> float:
    """Parse '50GB/s' or '400Gb/s' to 50e9 bytes/s; a bare number is bytes/s. Raises UsageError."""
    if isinstance(text, int | float):
        return float(text)
    match = _RATE.fullmatch(text.strip())
    if not match:
        raise UsageError(
            "E-BANDWIDTH-FORMAT",
            f"{text!r} is not a bandwidth",
            rule="a bandwidth is a number with its unit, bytes or bits per second",
            fix="write 50GB/s, or 400Gb/s, which is the same",
            text=text,
        )
    step = 1024 if match[3] else 1000
    power = ("", "k", "m", "g", "t").index(match[2].lower())
    bits = (match[4] == "b" and "byte" not in text.lower()) or "bit" in text.lower()
    return _number(match[1]) * step**power / (8 if bits else 1)
