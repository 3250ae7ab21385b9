"""TOML: text to values within limits, and values to text.

A text can be small and still keep the standard library's parser busy for a minute, exhaust the stack, or give numbers
that Python cannot print. Such texts are refused.
"""

import re
import tomllib
from collections.abc import Iterator
from datetime import date, time
from typing import Any

from ingot.errors import ConfigError

MOST_BYTES = 4 << 20
MOST_NESTED = 32  # sections, tables and lists inside each other
_MANY_PARTS = 256  # parts of a dotted key: the parser's time grows with their square
_KEY_PART = r"""(?:[\w-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')"""
# A key begins neither within a word, nor at an escaped quote, where a search would read the rest of the line each time.
_LONG_KEY = re.compile(rf"(?<![\w\"'.\\-])(?>{_KEY_PART}[ \t]*+\.[ \t]*+){{{_MANY_PARTS}}}")
_LONG_NUMBER = re.compile(r"[0-9][0-9_]{4300}")  # the digits that Python reads as a number
_LONGEST_WORD = 10_000  # characters of a value of --set without quotes
_LARGEST = 2**63  # numbers of TOML have 64 bits


def parse_toml(text: str, place: str) -> dict[str, Any]:
    """Return the values of a TOML text. Raises ConfigError.

    place: the file or the option with the text, for the message.
    """
    if len(text) > MOST_BYTES:
        raise too_large(place, f"{len(text):,} characters")
    if long := _LONG_KEY.search(text):
        raise too_nested(place, _line(text, long.start()))
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise too_nested(place) from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise _bad_syntax(text, place, str(error), int(line[1]) if line else len(text.splitlines())) from None
    except ValueError:  # tomllib lets int() refuse numbers with thousands of digits
        long = _LONG_NUMBER.search(text)
        number = _line(text, long.start()) if long else 1
        raise _bad_syntax(text, place, "a number has thousands of digits", number) from None
    for key, value, depth in _walk(values):
        if depth > MOST_NESTED:
            raise too_nested(place)
        if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise ConfigError(
                "E-CONFIG-NUMBER",
                f"{place}: {key} is a whole number of more than 64 bits",
                rule=f"whole numbers are from -2^63 to 2^63 - 1 ({_LARGEST - 1:,})",
                fix=f"write a smaller number for {key}",
                place=place,
                key=key,
            )
    return values


def _walk(values: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield (name of the nearest key, value, depth) of every value, without recursion."""
    waiting: list[tuple[str, Any, int]] = [("", values, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        yield key, value, depth
        if isinstance(value, dict):
            waiting += [(name, inner, depth + 1) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner, depth + 1) for inner in value]


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def too_large(place: str, size: str) -> ConfigError:
    return ConfigError(
        "E-CONFIG-SIZE",
        f"{place} has {size}",
        rule=f"a file of settings has at most {MOST_BYTES:,} bytes",
        fix="give the path of the right file",
        place=place,
        most=MOST_BYTES,
    )


def too_nested(place: str, line: int = 0) -> ConfigError:
    return ConfigError(
        "E-CONFIG-NESTING",
        f"{place}{f':{line}' if line else ''}: tables or lists are nested more than {MOST_NESTED} levels deep",
        rule=f"settings have at most {MOST_NESTED} levels",
        fix="remove brackets, or parts of the dotted key",
        place=place,
        most=MOST_NESTED,
    )


def _bad_syntax(text: str, place: str, problem: str, number: int) -> ConfigError:
    row = "".join(text.splitlines()[number - 1 : number]).strip()
    row = row if len(row) <= 200 else f"{row[:200]} ..."
    return ConfigError(
        "E-CONFIG-SYNTAX",
        f"{place}:{number}: {problem}: {row}",
        rule="the file is TOML: key = value, text in quotes, every key once, numbers of at most 64 bits",
        fix="correct that line, or the line before it",
        path=place,
        line=number,
    )


def key_lines(text: str) -> dict[str, int]:
    """Return dotted key or section -> line number (from 1). Only for messages: multi-line values may confuse it."""
    lines, section = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = match[1].replace('"', "").replace(" ", "") + "."
            lines.setdefault(section[:-1], number)
        elif match := re.match(r"\s*([A-Za-z0-9_.\"-]+)\s*=", line):
            lines.setdefault(section + match[1].replace('"', ""), number)
    return lines


def toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_string(name)


def _toml_string(text: str) -> str:
    escaped = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    )
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'


def toml_value(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml_key(name)} = {toml_value(v)}" for name, v in value.items()) + " }"
    return repr(value)


class Word(str):
    """A value of --set without quotes: text, or a number with a unit (10k, 64MiB, 20min) where a number is needed."""


def parse_override(key: str, raw: str, place: str):
    """Parse the value `raw` of `--set KEY=RAW`: a value of TOML, else a Word. place: as in `parse_toml`. Raises
    ConfigError."""
    try:
        value = parse_toml(f"{toml_key(key)} = {raw}", place)[key]
        # No setting is a date or a time of the day: a duration like 04:00:00 is a word.
        return Word(raw) if isinstance(value, date | time) else value
    except ConfigError as error:
        if error.code != "E-CONFIG-SYNTAX" or len(raw) > _LONGEST_WORD:
            raise
        return Word(raw)  # a word without quotes is a string: --set schedule.kind=wsd
