"""Frozen dataclasses as configuration: strict reading from TOML and `--set a.b=c`, and writing as TOML.

Reading reports all problems at once, each with file and line, and suggests the key that was probably meant.
A dataclass may check its own rules in `problems() -> list[tuple[field, message]]`.
"""

import dataclasses
import difflib
import functools
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ingot.errors import ConfigError
from ingot.units import parse_count

T = typing.TypeVar("T")
# Rules that are not in the dataclass of a configuration. They yield (dotted key, description) for each problem.
Rules = Callable[[T], Iterable[tuple[str, str]]]


@functools.cache  # a manifest has 10,000 entries of the same dataclass
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return, for each field of a dataclass, (its type, True if the field has no default)."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(kind)
        if f.init
    }


class _Reader:
    """Builds a dataclass from nested dicts and collects all problems instead of stopping at the first."""

    def __init__(self, where, root: type, rules: Rules | None = None):
        self.where = where  # dotted key -> "run.toml:14" or "--set"
        self.rules = rules  # rules of the whole configuration, checked after those of its dataclass
        self.root = root  # the dataclass of the whole configuration, to find a key that is in the wrong section
        self.problems: list[str] = []
        # meant: key -> nearest keys or values
        self.facts: dict[str, Any] = {"problems": self.problems, "keys": [], "meant": {}}
        self.unknown_keys = 0
        self.sections: dict[str, Any] = {}  # name -> built dataclass, for top-level sections without a problem

    def problem(self, key: str, message: str) -> None:
        self.problems.append(f"{self.where(key)}: {message}")
        self.facts["keys"].append(key)

    def broken(self) -> int:
        """Return the number of problems other than unknown keys; these do not prevent checks of the known keys."""
        return len(self.problems) - self.unknown_keys

    def dataclass(self, kind: type, values: dict, prefix: str) -> Any:
        fields = _fields(kind)
        for name in (n for n in values if n not in fields):
            suggestion, self.facts["meant"][prefix + name] = _suggest(name, fields, prefix, self.root)
            self.problem(prefix + name, f"unknown key {prefix + name!r}{suggestion}")
            self.unknown_keys += 1
        before, arguments, broken = self.broken(), {}, set()
        for name in (n for n in values if n in fields):
            so_far = self.broken()
            value = self.value(fields[name][0], values[name], prefix + name)
            if self.broken() > so_far:
                broken.add(name)
            else:
                arguments[name] = value
        for name, (hint, required) in fields.items():
            if required and name not in values:
                if dataclasses.is_dataclass(hint):
                    self.problem(prefix + name, f"missing section [{prefix}{name}]")
                else:
                    self.problem(prefix + name, f"missing key {prefix + name!r} ({_type_name(hint)})")
        if any(required and name not in arguments for name, (_, required) in fields.items()):
            return None
        built = kind(**arguments)  # defaults replace broken values, so that rules between other fields are checked
        own = built.problems() if hasattr(built, "problems") else ()
        further = self.rules(built) if self.rules and not prefix else ()
        for name, message in chain(own, further):
            if name not in broken:
                self.problem(prefix + name, f"{prefix}{name}: {message}")
        return built if self.broken() == before else None

    def value(self, hint, value, key: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            self.problem(key, f"{key} = {value} is not a finite number")
            return None
        if type(value) is hint:
            return value
        origin, args = get_origin(hint), get_args(hint)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if isinstance(value, dict):
                built = self.dataclass(hint, value, key + ".")
                if built is not None and "." not in key:
                    self.sections[key] = built
                return built
        elif origin is Literal:
            if value in args:
                return value
            options = ", ".join(repr(a) for a in args)
            close = self.facts["meant"][key] = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
            hint_text = f"; did you mean {close[0]!r}?" if close else ""
            self.problem(key, f"{key} = {value!r} is not one of {options}{hint_text}")
            return None
        elif origin in (Union, types.UnionType):
            if value is None and type(None) in args:
                return None
            for option in args:
                attempt = _Reader(self.where, self.root)
                built = attempt.value(option, value, key)
                if option is not type(None) and not attempt.problems:
                    return built
        elif origin is tuple and len(args) == 2 and args[1] is Ellipsis:
            if isinstance(value, list | tuple):
                return tuple(self.value(args[0], v, f"{key}[{i}]") for i, v in enumerate(value))
        elif origin is tuple:
            if isinstance(value, list | tuple) and len(value) == len(args):
                return tuple(self.value(a, v, f"{key}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
        elif origin is dict:
            if isinstance(value, dict):
                return {k: self.value(args[1], v, f"{key}.{k}") for k, v in value.items()}
        elif hint is Any:
            return value
        elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
            return value
        meant = _number_meant(hint, value)
        self.problem(key, f"{key} = {value!r} is {_value_name(value)}, must be {_type_name(hint)}{meant}")
        return None


_NAMES = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false", type(None): "absent"}
_EXAMPLES = {int: "30", float: "0.5", str: '"text"', bool: "true"}


def _type_name(hint) -> str:
    """Describe how a user writes a value of type `hint`; lists and sections of values come with an example."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(a) for a in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list like [{_EXAMPLES.get(args[0], '...')}, ...]"
    if origin is tuple:
        return f"a list of {len(args)} values like [{', '.join(_EXAMPLES.get(a, '...') for a in args)}]"
    if origin is dict:
        return "a section of keys and values, { name = " + _EXAMPLES.get(args[1], "...") + " }"
    if dataclasses.is_dataclass(hint):
        return "a section of keys and values"
    return _NAMES.get(hint, str(hint))


def _value_name(value) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a fraction", str: "text", list: "a list"}
    return kinds.get(type(value), "a section" if isinstance(value, dict) else type(value).__name__)


def _number_meant(hint, value) -> str:
    """Return '; write 2000' for "2k", 2000.0 or "2_000" if `hint` is a number type; '' if no number is recognized."""
    if hint not in (int, float) or isinstance(value, bool) or not isinstance(value, str | float):
        return ""
    try:
        number = parse_count(value) if hint is int else float(value)
    except (ConfigError, ValueError, OverflowError):
        return ""
    return f"; write {number}"


def _sections_with(kind: type, name: str, prefix: str = "") -> list[str]:
    """Return the dotted keys of the dataclass `kind` whose last part is `name`."""
    found = []
    for field, (hint, _) in _fields(kind).items():
        if field == name:
            found.append(prefix + field)
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found += _sections_with(hint, name, f"{prefix}{field}.")
    return found


def _suggest(name: str, known, prefix: str, root: type) -> tuple[str, list[str]]:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    elsewhere = _sections_with(root, name)
    meant = [prefix + key for key in close] + elsewhere[:1]
    if close and elsewhere:
        return f"; did you mean {prefix + close[0]!r}, or {elsewhere[0]!r} in another section?", meant
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}, in another section? known keys here: {', '.join(known)}", meant
    return (f"; did you mean {prefix + close[0]!r}?" if close else f"; known keys: {', '.join(known)}"), meant


def from_dict(kind: type[T], values: dict, *, where=lambda key: key, rules: Rules[T] | None = None) -> T:
    """Build the dataclass `kind` from nested dicts. Raises a ConfigError that lists all problems.

    where: function from a dotted key to its place, for messages. rules: further rules, checked after those of `kind`.
    """
    reader = _Reader(where, kind, rules)
    built = reader.dataclass(kind, values, "")
    if reader.problems:
        raise _listed(reader.problems, reader.facts)
    return built


def _listed(problems: list[str], facts: dict[str, Any]) -> ConfigError:
    return ConfigError(
        "E-CONFIG-SETTINGS",
        "\n".join(problems),
        rule="every key is known and has the right type and value; nothing was started",
        fix=f"correct the {'line' if len(problems) == 1 else f'{len(problems)} lines'} above",
        **facts,
    )


def to_dict(config) -> dict:
    """Return a dataclass as nested dicts and lists, ready for JSON. Fields that are None are left out."""
    return _plain(config)


def _plain(value) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _plain(v) for name, v in pairs if v is not None}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def load(kind: type[T], path: Path | None, overrides: typing.Sequence[str] = (), *, rules: Rules[T] | None = None) -> T:
    """Read TOML `path`, apply `--set` overrides ('train.steps=100'), build the dataclass `kind`. Raises ConfigError.

    If `path` is None, the values are the defaults of `kind` and the overrides. rules: see `from_dict`.
    """
    values, where = read(path, overrides)
    return from_dict(kind, values, where=where, rules=rules)


def load_sections(
    kind: type, path: Path, overrides: typing.Sequence[str] = (), *, rules: Rules | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Read as `load` does, but return ({name: section} of the sections without a problem, all problems).

    A section that is missing in the file has its defaults. Raises ConfigError if the file cannot be read at all.
    """
    values, where = read(path, overrides)
    reader = _Reader(where, kind, rules)
    reader.dataclass(kind, values, "")
    left_out = {f.name: f.default_factory for f in dataclasses.fields(kind) if f.name not in values}
    defaults = {name: make() for name, make in left_out.items() if make is not dataclasses.MISSING}
    return defaults | reader.sections, reader.problems


def read(path: Path | None, overrides: typing.Sequence[str]) -> tuple[dict, typing.Callable[[str], str]]:
    """Return the values of TOML `path` with the overrides, and a function from a dotted key to its place."""
    try:
        text = path.read_text(encoding="utf-8") if path else ""
        values = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            "E-CONFIG-MISSING",
            f"there is no file {path}",
            rule="a command reads its settings from an existing TOML file",
            fix="check the path; `ingot init DIR` and `ingot plan --out FILE` write run files",
            path=str(path),
        ) from None
    except UnicodeDecodeError as error:
        found = f"{path} is not UTF-8 text ({error.reason})"
        raise ConfigError("E-CONFIG-ENCODING", found, rule="TOML is UTF-8", fix="save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        number = int(line[1]) if line else len(text.splitlines())
        row = "".join(text.splitlines()[number - 1 : number]).strip()
        raise ConfigError(
            "E-CONFIG-SYNTAX",
            f"{path}:{number}: {error}: {row}",
            rule="the file is TOML: key = value, text in quotes, every key once",
            fix="correct that line, or the line before it",
            path=str(path),
            line=number,
        ) from None
    from_command_line = set()
    for override in overrides:
        key, sign, raw = override.partition("=")
        if not sign:
            found, rule = f"--set {override!r} has no '='", "write --set section.key=value"
            raise ConfigError("E-SET-FORM", found, rule=rule, fix=f"write --set {override}=VALUE", override=override)
        _put(values, key.strip().split("."), _parse_override(raw.strip()))
        from_command_line.add(key.strip())
    lines = key_lines(text)

    def where(key: str) -> str:
        base = key.split("[")[0]
        given = [name for name in from_command_line if base == name or base.startswith(name + ".")]
        if given:
            return f"--set {max(given, key=len)}"
        while base and base not in lines:
            base = base.rpartition(".")[0]
        return f"{path}:{lines[base]}" if base else f"{path or '--set'}"

    return values, where


def _put(values: dict, path: list[str], value) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ConfigError(
                "E-SET-SECTION",
                f"--set {'.'.join(path)}: {name!r} is a value, not a section",
                rule="every part of a key but the last is the name of a section",
                fix=f"write --set {name}=VALUE, or name a key of a section",
                key=".".join(path),
            )
    values[path[-1]] = value


def _parse_override(raw: str):
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw  # a word without quotes is a string: --set schedule.kind=wsd


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


def to_toml(config, comments: dict[str, str] | None = None, *, whole: bool = False) -> str:
    """Return `config` as TOML, with its sections in the order of its fields.

    comments: dotted key -> comment at the end of its line. whole: also write subsections that are at their defaults;
    they are left out otherwise (most models have no experts).
    """
    comments, idle = comments or {}, set() if whole else _default_sections(config)
    out: list[str] = []

    def section(values: dict, prefix: str) -> None:
        for name, value in values.items():
            if not isinstance(value, dict):
                remark = comments.get(prefix + name)
                out.append(f"{_toml_key(name)} = {_toml_value(value)}" + (f"  # {remark}" if remark else ""))
        for name, value in values.items():
            if isinstance(value, dict) and value and prefix + name not in idle:
                out.append("")
                out.append(f"[{prefix}{_toml_key(name)}]")
                section(value, f"{prefix}{_toml_key(name)}.")

    section(to_dict(config), "")
    return "\n".join(out).strip() + "\n"


def _default_sections(config) -> set[str]:
    """Return the dotted keys of the subsections that have their default values."""
    found = set()
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            if dataclasses.is_dataclass(default) and getattr(value, field.name) == default:
                found.add(f"{section.name}.{field.name}")
    return found


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_string(name)


def _toml_string(text: str) -> str:
    escaped = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    )
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'


def _toml_value(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(name)} = {_toml_value(v)}" for name, v in value.items()) + " }"
    return repr(value)
