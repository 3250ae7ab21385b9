"""Amounts that a plan is asked with, as people write them: budgets, prices, shares, tokens, batches.

Each parser takes one spelling for what it means and refuses the spellings of something else, with the right one: bytes
where tokens are counted, a percentage as a share above 1, a budget without a unit.
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
    """One of them is above 0. device_hours: of all devices together."""

    flops: float = 0.0
    usd: float = 0.0
    seconds: float = 0.0
    device_hours: float = 0.0


def parse_budget(text: str | float) -> Budget:
    """'6e23flop', '1.2 ZFLOP', '$2M', '2MUSD', '24h', '1M gpu-hours'. Raises UsageError; a bare number is none."""
    plain = str(text).strip().lower().replace(" ", "")
    for pattern, make in _FORMS:
        if match := re.fullmatch(pattern, plain):
            budget = make(*match.groups())
            if not 0 < max(budget.flops, budget.usd, budget.seconds, budget.device_hours) < math.inf:
                raise UsageError(f"--budget {text}", rule="a budget is above 0")
            return budget
    raise UsageError(f"--budget {text}", rule=_BUDGETS, fix=_meant(plain))


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


def _meant(plain: str) -> str:
    """What may have been meant by a budget that has no unit, or another one."""
    if re.fullmatch("[kmb]?", plain):
        return "quote it: '$2M', or write 2MUSD; the shell takes $2 for a variable"
    if plain.startswith("-"):
        return "leave the minus: a budget is above 0"
    if re.fullmatch(_NUMBER + "[kmbt]?", plain):
        count = f"{plain}flop or {plain} gpu-hours" if plain[-1].isalpha() else f"{plain}flop or {plain}h"
        return f"did you mean {plain}usd, {count}? tokens are given by --tokens"
    if re.fullmatch(_NUMBER + r"[kmgtpezy]?flops?/s", plain):
        return f"{plain} is a rate; a budget is an amount: {plain.removesuffix('/s')}"
    if re.fullmatch(_NUMBER + r"[kmbt]?tok(?:en)?s?", plain):
        return f"--tokens {re.sub('tok.*', '', plain)}"
    return "write it as 6e23flop, '$2M' or 24h"


def parse_tokens(text: str | float) -> int:
    """'1.5T' -> 1.5e12. Raises ConfigError when it is no count at all, UsageError when one that cannot be."""
    plain = str(text).strip()
    if _BYTES.fullmatch(plain):
        count = re.sub(r"i?b(?:ytes)?$", "", plain, flags=re.IGNORECASE)
        why = "a token is 2 bytes in shards (4 from 65,537 ids on), and about 4 bytes of English text"
        raise UsageError(
            f"--tokens {text}: these are bytes", rule=f"tokens are counted; {why}", fix=f"--tokens {count}"
        )
    plain = re.sub(r"[\s-]*tok(?:en)?s?$", "", plain, flags=re.IGNORECASE)
    return _at_least_one("--tokens", text, parse_count(plain), "token")


def parse_parameters(text: str | float) -> int:
    """'70b' -> 7e10: of the word, b is billions here and never bytes. Raises UsageError."""
    plain = str(text).strip()
    if re.fullmatch(_NUMBER + r"\s*[kmgt]i?b", plain, re.IGNORECASE):
        raise UsageError(f"--params {text}: these are bytes", rule="parameters are counted", fix="--params 70b")
    try:
        count = parse_count(plain)
    except ConfigError as error:
        raise UsageError(f"--params {text}", rule=error.rule, fix="--params 70b, or --model NAME") from None
    return _at_least_one("--params", text, count, "parameter")


def _at_least_one(option: str, text: object, count: int, what: str) -> int:
    if count < 1:
        raise UsageError(f"{option} {text}", rule=f"at least 1 {what}")
    return count


def parse_failures(option: str, text: str | float) -> float:
    """'0.38%' or 0.0038 -> 0.0038 failures per node and day; 0 is one, too. Raises UsageError: a bare 0.38 would be
    more than a third of all nodes each day, and means percent."""
    share = parse_share(option, text, none=True)
    if share > _MANY_FAILURES and not str(text).strip().endswith("%"):
        rule = f"a share of nodes that fail in a day; published are 0.23% to 1.6%, {text} would be {share:.0%}"
        raise UsageError(
            f"{option} {text}", rule=rule, fix=f"{option} {share:g}%, or {option} {share:.0%} if you mean it"
        )
    return share


def parse_share(option: str, text: str | float, *, none: bool = False) -> float:
    """'45%' or 0.45 -> 0.45, for what is between 0 and 1. none: 0 is a share, too. Raises UsageError."""
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
    raise UsageError(f"{option} {text}", rule=f"a share {least} up to 100%: 45% or 0.45", fix=fix)


def parse_price(text: str | float) -> float:
    """'4', '$4', '4/h', '4usd' -> US dollars per device and hour. Raises UsageError."""
    match = re.fullmatch(_NUMBER + r"(?:usd)?(?:/(?:gpu-?)?h(?:our)?)?", str(text).strip().lower().removeprefix("$"))
    price = _number(match[1]) if match else math.nan
    if not 0 < price < math.inf:
        raise UsageError(f"--price {text}", rule="above 0: US dollars per device and hour", fix="--price 4")
    return price


def parse_batch(text: str | int, seq_len: int) -> tuple[int, str]:
    """Sequences of a global batch, and why that many: '512' counts sequences, '4M' tokens. Raises UsageError.

    Batches are named in round numbers that are not meant to the token: 4M is 4,194,304 where that makes whole
    sequences and 4,000,000 does not.
    """
    plain = re.sub(r"[\s-]*tok(?:en)?s?$", "", str(text).strip(), flags=re.IGNORECASE)
    named = plain != str(text).strip()
    try:
        count = parse_count(plain)
    except ConfigError as error:
        rule = "a number of sequences (512), or of tokens with its unit (4M)"
        raise UsageError(f"--batch {text}", rule=rule, fix=error.rule) from None
    if count < 1:
        raise UsageError(f"--batch {text}", rule="at least 1 sequence")
    if plain.replace("_", "").replace(",", "").isdigit() and not named:
        return count, "as asked for"
    binary = {"k": 1024, "m": 1024**2, "b": 1024**3, "g": 1024**3}.get(plain[-1].lower(), 0)
    tokens = round(float(plain[:-1]) * binary) if binary and count % seq_len else count
    tokens = tokens if tokens % seq_len == 0 else count
    if tokens < seq_len:
        found = f"--batch {text}: {format_count(tokens)} tokens are less than one sequence of {seq_len:,}"
        raise UsageError(found, rule="with a unit, tokens are counted", fix=f"--batch {tokens} means sequences")
    sequences = round(tokens / seq_len)
    return sequences, f"asked for {plain} tokens: {sequences} x {seq_len} = {format_count(sequences * seq_len)}"


_RATE = re.compile(_NUMBER + r"\s*([kmgt]?)(i?)(b|B)(?:it|yte)?s?(?:/s|ps)", re.IGNORECASE)


def parse_bandwidth(text: str | float) -> float:
    """'50GB/s' and '400Gb/s' -> 50e9 bytes/s; a bare number is bytes/s. Raises UsageError."""
    if isinstance(text, int | float):
        return float(text)
    match = _RATE.fullmatch(text.strip())
    if not match:
        rule = "bytes or bits per second with the unit: 50GB/s, or 400Gb/s, which is the same"
        raise UsageError(f"{text!r} is no bandwidth", rule=rule)
    step = 1024 if match[3] else 1000
    power = ("", "k", "m", "g", "t").index(match[2].lower())
    bits = (match[4] == "b" and "byte" not in text.lower()) or "bit" in text.lower()
    return _number(match[1]) * step**power / (8 if bits else 1)
