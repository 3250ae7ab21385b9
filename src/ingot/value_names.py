"""Values and types of settings in the words of a user, for messages."""

import difflib
import math
import re
import types
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Annotated, Literal, Union, get_args, get_origin

from ingot.errors import ConfigError
from ingot.ranges import Range
from ingot.units import parse_count

_LONGEST_SHOWN = 200
_ADDRESS = re.compile(r"(https?://)[^\s'\"]+")
# Control characters except tab and line feed, characters that change the text direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return crawled text in which U+FFFD replaces all characters that could move the cursor, change colors or reverse
    the line.
    """
    return _UNSAFE.sub("\ufffd", text)


def metric_part(name: str) -> str:
    """Return the name of a source as a part of a metric's name (schema/metric_files.py)."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) or "_"


def shown(value) -> str:
    """Return a value as an error shows it: its start, if it is long, and of a web address only that it is one: those
    of webhooks are secrets."""
    try:
        return cut(_ADDRESS.sub(r"\1...", repr(value)))
    except ValueError:
        return "a number with thousands of digits"


def cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def not_text(text: str) -> str:
    """Return the name of a character in `text` that no file name or no file can hold, or ""."""
    if "\0" in text:
        return "the character NUL, which no file name has"
    if re.search("[\ud800-\udfff]", text):
        return "bytes or escapes that are not UTF-8, which no file of ingot can hold"
    return ""


def close(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the known word that is most like `word`, in a list; [] for long words, which take long to compare."""
    return difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff) if len(word) < _LONGEST_SHOWN else []


_NAMES = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false", type(None): "absent"}
_EXAMPLES = {int: "30", float: "0.5", str: '"text"', bool: "true"}


def bare(hint):
    """Return a type without its range."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def type_name(hint) -> str:
    """Describe how a user writes a value of type `hint`; lists and sections of values come with an example."""
    origin, args = get_origin(hint), tuple(map(bare, get_args(hint)))
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list like [{_EXAMPLES.get(args[0], '...')}, ...]"
    if origin is tuple:
        return f"a list of {len(args)} values like [{', '.join(_EXAMPLES.get(a, '...') for a in args)}]"
    if origin is dict:
        return "a section of keys and values, { name = " + _EXAMPLES.get(args[1], "...") + " }"
    if is_dataclass(hint):
        return "a section of keys and values"
    return _NAMES.get(hint, str(hint))


def value_name(value) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a decimal number", str: "text", list: "a list"}
    return kinds.get(type(value), "a section" if isinstance(value, dict) else type(value).__name__)


def number_meant(hint, value, limits: Range | None = None) -> str:
    """Return '; write 2000' for "2k", 2000.0 or "2_000" if `hint` is a number type, or ' from 1 to 9' if this number
    would be refused as well; '' if no number is recognized. limits: the range, None if there is none."""
    if hint not in (int, float) or isinstance(value, bool) or not isinstance(value, str | float):
        return ""
    try:
        number = parse_count(value) if hint is int else float(value)
    except (ConfigError, ValueError, OverflowError):
        return ""
    if not math.isfinite(number):
        return ""
    return f"; write {number}" if limits is None or number in limits else f" {limits}"
