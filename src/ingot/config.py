"""Frozen dataclasses as configuration: strict reading from TOML and `--set a.b=c`, and writing as TOML.

Reading reports all problems at once, each with file and line, and suggests the key that was probably meant.
A dataclass may check its own rules in `problems() -> list[tuple[field, message]]`.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ingot.errors import ConfigError
from ingot.ranges import Range
from ingot.toml import (
    MOST_BYTES,
    MOST_NESTED,
    Word,
    key_lines,
    parse_override,
    parse_toml,
    toml_key,
    toml_value,
    too_large,
    too_nested,
)
from ingot.units import parse_bytes, parse_count, parse_seconds
from ingot.value_names import bare, close, cut, not_text, number_meant, shown, type_name, value_name

T = typing.TypeVar("T")
# Rules that are not in the dataclass of a configuration. They yield (dotted key, description) for each problem.
Rules = Callable[[T], Iterable[tuple[str, str]]]


@functools.cache  # a manifest has 10,000 entries of the same dataclass
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return, for each field of a dataclass, (its type, True if the field has no default)."""
    hints, missing = typing.get_type_hints(kind, include_extras=True), dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(kind)
        if f.init
    }


# For the metadata of a field whose section is written only if it differs from the default: most runs have no plug-ins.
LEFT_OUT_AT_DEFAULT = {"left_out_at_default": True}
_MOST_PROBLEMS = 50  # that an error lists


class _Reader:
    """Builds a dataclass from nested dicts and collects all problems instead of stopping at the first."""

    def __init__(self, where, root: type, rules: Rules | None = None):
        self.where = where  # dotted key -> "run.toml:14" or "--set"
        self.rules = rules  # rules of the whole configuration, checked after those of its dataclass
        self.root = root  # the dataclass of the whole configuration, to find a key that is in the wrong section
        self.problems: list[str] = []
        # meant: key -> nearest keys or values
        # ranges: key -> range that its value is not in
        self.facts: dict[str, Any] = {"problems": self.problems, "keys": [], "meant": {}, "ranges": {}}
        self.wrong = 0  # problems other than unknown keys, which do not prevent checks of the known keys
        self.left_out = 0  # problems after the first _MOST_PROBLEMS
        self.sections: dict[str, Any] = {}  # name -> built dataclass or table, for top-level sections without a problem

    def problem(self, key: str, message: str, *, unknown: bool = False) -> None:
        self.wrong += not unknown
        if len(self.problems) >= _MOST_PROBLEMS:
            self.left_out += 1
            return
        if (place := self.where(key)) == f"--set {key}":  # which names the key
            message = message.removeprefix(f"{key}: ").replace(f"unknown key {cut(repr(key))}", "unknown key", 1)
        self.problems.append(f"{place}: {message}")
        self.facts["keys"].append(key)

    def dataclass(self, kind: type, values: dict, prefix: str) -> Any:
        fields = _fields(kind)
        for name in (n for n in values if n not in fields):
            suggestion = ""
            if len(self.problems) < _MOST_PROBLEMS:
                suggestion, self.facts["meant"][prefix + name] = _suggest(name, fields, prefix, self.root)
            self.problem(prefix + name, f"unknown key {cut(repr(prefix + name))}{suggestion}", unknown=True)
        before, arguments, broken = self.wrong, {}, set()
        for name in (n for n in values if n in fields):
            so_far = self.wrong
            value = self.value(fields[name][0], values[name], prefix + name)
            if self.wrong > so_far:
                broken.add(name)
            else:
                arguments[name] = value
        for name, (hint, required) in fields.items():
            if required and name not in values:
                if dataclasses.is_dataclass(hint):
                    self.problem(prefix + name, f"missing section [{prefix}{name}]")
                else:
                    self.problem(prefix + name, f"missing key {prefix + name!r} ({type_name(hint)})")
        if any(required and name not in arguments for name, (_, required) in fields.items()):
            return None
        built = kind(**arguments)  # defaults replace broken values, so that rules between other fields are checked
        own = built.problems() if hasattr(built, "problems") else ()
        further = self.rules(built) if self.rules and not prefix else ()
        for name, message in chain(own, further):
            if name not in broken:
                named = message.startswith((f"{prefix}{name} ", "unknown key "))  # by the settings of a part
                self.problem(prefix + name, message if named else f"{prefix}{name}: {message}")
        return built if self.wrong == before else None

    def value(self, hint, value, key: str, limits: Range | None = None) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            self.problem(key, f"{key} = {value} is not a finite number")
            return None
        if isinstance(value, Word):
            value = _read_word(hint, value, key)
        if isinstance(value, str) and (wrong := not_text(value)):
            self.problem(key, f"{key} contains {wrong}")
            return None
        if type(value) is hint:
            return value
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self.within(hint, value, key)
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
            near = self.facts["meant"][key] = close(str(value), [str(a) for a in args])
            hint_text = f"; did you mean {near[0]!r}?" if near else ""
            self.problem(key, f"{key} = {shown(value)} is not one of {options}{hint_text}")
            return None
        elif origin in (Union, types.UnionType):
            if value is None and type(None) in args:
                return None
            for option in args:
                attempt = _Reader(self.where, self.root)
                built = attempt.value(option, value, key)
                if option is not type(None) and not attempt.wrong:
                    return built
                if attempt.facts["ranges"]:  # the right type, and a number that is too large or too small
                    return self.value(option, value, key)
        elif origin is tuple and len(args) == 2 and args[1] is Ellipsis:
            if isinstance(value, list | tuple):
                return tuple(self.value(args[0], v, f"{key}[{i}]") for i, v in enumerate(value))
        elif origin is tuple:
            if isinstance(value, list | tuple) and len(value) == len(args):
                return tuple(self.value(a, v, f"{key}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
        elif origin is dict:
            if isinstance(value, dict):
                before = self.wrong
                table = {k: self.value(args[1], v, f"{key}.{k}") for k, v in value.items()}
                if "." not in key and self.wrong == before:
                    self.sections[key] = table
                return table
        elif hint is Any:
            return value
        elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
            return self.fraction(value, key)
        elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
            return value
        meant = number_meant(hint, value, limits)
        self.problem(key, f"{key} = {shown(value)} is {value_name(value)}, must be {type_name(hint)}{meant}")
        return None

    def fraction(self, value: int | float, key: str) -> float | None:
        try:
            return float(value)
        except OverflowError:
            self.problem(key, f"{key} has more than 300 digits")
            return None

    def within(self, hint, value, key: str) -> Any:
        """Return a number of the type and in the range that `hint` (typing.Annotated) gives."""
        (kind, limits), before = get_args(hint), self.wrong
        number = self.value(kind, value, key, limits)
        if self.wrong == before and number not in limits:
            self.problem(key, f"{key} is {shown(value)}, must be {limits}")
            self.facts["ranges"][key] = [limits.low, limits.high]
        return number


def _read_word(hint, word: str, key: str) -> Any:
    """Return the number that a value of --set without quotes spells, if `hint` is a type of numbers: 10k, 64MiB, 20min.

    The last part of the key names the unit, as everywhere in ingot: _bytes, _seconds, else a count.
    """
    kind = bare(hint)
    parse = parse_bytes if key.endswith("_bytes") else parse_seconds if key.endswith("_seconds") else parse_count
    if kind is not int and not (kind is float and parse is parse_seconds):
        return str(word)
    try:
        return parse(word)
    except ConfigError:
        return str(word)


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
    near = close(name, known, 0.5)
    elsewhere = _sections_with(root, name)
    meant = [prefix + key for key in near] + elsewhere[:1]
    if near and elsewhere:
        return f"; did you mean {prefix + near[0]!r}, or {elsewhere[0]!r} in another section?", meant
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}, in another section? known keys here: {', '.join(known)}", meant
    return (f"; did you mean {prefix + near[0]!r}?" if near else f"; known keys: {', '.join(known)}"), meant


def from_dict(kind: type[T], values: dict, *, where=lambda key: key, rules: Rules[T] | None = None) -> T:
    """Build the dataclass `kind` from nested dicts. Raises a ConfigError that lists all problems.

    where: function from a dotted key to its place, for messages. rules: further rules, checked after those of `kind`.
    """
    reader = _Reader(where, kind, rules)
    built = reader.dataclass(kind, values, "")
    if reader.problems:
        raise _listed(reader.problems, reader.facts, reader.left_out)
    return built


def problems_of(kind: type, values: typing.Mapping[str, Any], prefix: str) -> typing.Iterator[tuple[str, str]]:
    """Yield (dotted key, problem) for each problem of the values of a table `prefix`, read as the dataclass `kind`."""
    reader = _Reader(lambda key: "", kind)
    reader.dataclass(kind, dict(values), f"{prefix}.")
    for key, problem in zip(reader.facts["keys"], reader.problems, strict=True):
        yield key, problem.removeprefix(": ").removeprefix(f"{key}: ")


def _listed(problems: list[str], facts: dict[str, Any], left_out: int) -> ConfigError:
    more = [f"and {left_out:,} more problems"] if left_out else []
    return ConfigError(
        "E-CONFIG-SETTINGS",
        "\n".join([*problems, *more]),
        rule="every key is known and has a value of the right type and range; nothing was started",
        fix=f"correct the {'setting' if len(problems) == 1 else f'{len(problems)} settings'} above",
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
    text = _text(path) if path else ""
    values = parse_toml(text, str(path))
    from_command_line = set()
    for override in overrides:
        key, sign, raw = override.partition("=")
        if not sign:
            found, rule = f"--set {override!r} has no '='", "write --set section.key=value"
            raise ConfigError("E-SET-FORM", found, rule=rule, fix=f"write --set {override}=VALUE", override=override)
        path_of_key = key.strip().split(".")
        if len(path_of_key) > MOST_NESTED:
            raise too_nested("--set")
        _put(values, path_of_key, parse_override(key.strip(), raw.strip(), f"--set {cut(key.strip())}"))
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


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:  # not all of it: it may be larger than the memory
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise too_large(str(path), f"more than {MOST_BYTES:,} bytes")
        return data.decode("utf-8")
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


def to_toml(config, comments: dict[str, str] | None = None, *, whole: bool = False) -> str:
    """Return `config` as TOML, with its sections in the order of its fields.

    comments: dotted key -> comment at the end of its line. whole: also write subsections that are at their defaults;
    they are left out otherwise (most models have no experts).
    """
    comments, idle = comments or {}, set() if whole else _default_sections(config)
    out: list[str] = []
    tables = {f.name for f in dataclasses.fields(config) if isinstance(getattr(config, f.name), dict)}

    def section(values: dict, prefix: str) -> None:
        for name, value in values.items():
            if not isinstance(value, dict):
                remark = comments.get(prefix + name)
                out.append(f"{toml_key(name)} = {toml_value(value)}" + (f"  # {remark}" if remark else ""))
        for name, value in values.items():
            if isinstance(value, dict) and (value or prefix.rstrip(".") in tables) and prefix + name not in idle:
                out.append("")
                out.append(f"[{prefix}{toml_key(name)}]")
                section(value, f"{prefix}{toml_key(name)}.")

    section(to_dict(config), "")
    return "\n".join(out).strip() + "\n"


def _default_sections(config) -> set[str]:
    """Return the dotted keys of the subsections, and of the sections LEFT_OUT_AT_DEFAULT, that have their defaults."""
    found = set()
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if section.metadata == LEFT_OUT_AT_DEFAULT and value == section.default_factory():  # pyright: ignore[reportCallIssue]
            found.add(section.name)
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            if dataclasses.is_dataclass(default) and getattr(value, field.name) == default:
                found.add(f"{section.name}.{field.name}")
    return found
