"""The checks of parts when a plug-in is imported: functions that can be called as their kind calls them, and classes
with the methods of their contract."""

import collections.abc
import dataclasses
import functools
import inspect
import re
import typing
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, get_args, get_origin

from ingot.errors import ConfigError
from ingot.plugins.origin import Origin, calling_origin

# A function or class, or "module:name" of one, which is imported when it is first needed: a plug-in whose torch code
# is in a module of its own does not slow down commands that need no torch.
Reference = Callable[..., Any] | str


class Contract:
    """The base of a contract that plug-ins fulfil by a class. A subclass that lacks a method is refused where it is
    defined (E-PLUGIN-CONTRACT), unless abc.ABC is among its bases: then it only serves as the base of others.

    required: groups of methods; a subclass overrides one of each. A class with an own `required` is a contract itself.
    """

    required: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        contract = next(one for one in cls.__mro__ if "required" in vars(one))
        if contract is not cls and ABC not in cls.__bases__:
            _require_methods(cls, contract, cls.required)


def _require_methods(defined: type, contract: type, groups: Iterable[tuple[str, ...]]) -> None:
    missing = [names for names in groups if all(getattr(defined, name) is getattr(contract, name) for name in names)]
    if missing:
        words = " and ".join(" or ".join(f"`{name}`" for name in names) for names in missing)
        raise _broken(
            f"class {defined.__name__!r} does not define {words} of {contract.__name__}",
            calling_origin(),
            rule=f"a subclass of {contract.__name__} defines the methods of its contract (plugins/)",
            fix="define the method; a class that only serves as base of others has abc.ABC among its bases",
            part=defined.__name__,
            missing=[name for names in missing for name in names],
        )


def require_functions(kind: str, part: Any, problems: Iterable[str], origin: Origin) -> None:
    """Raise ConfigError unless the functions of a Part can be called, and there are no other `problems` of it.

    Functions that are given as "module:name" are not imported for this. kind: that of the registry. origin: the line
    that registers the part.
    """
    for found in (*_wrong_fields(part), *problems):
        raise _broken(
            f"{kind} {part.name!r}: {found}",
            origin,
            rule=f"the fields of a {type(part).__name__} are those of its class (plugins/)",
            fix="correct the part where it is registered",
            part=part.name,
        )


def _broken(found: str, origin: Origin, *, rule: str, fix: str, **facts: Any) -> ConfigError:
    place = f" ({origin})" if origin.file else ""
    return ConfigError(
        "E-PLUGIN-CONTRACT", found + place, rule=rule, fix=fix, file=origin.file, line=origin.line, **facts
    )


def _wrong_fields(part: Any) -> Iterator[str]:
    for name, (number, optional) in _functions_of(type(part)).items():
        value = getattr(part, name)
        if value is None and optional:
            continue
        if number is None and isinstance(value, str):
            if not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", value):
                yield f'{name} = {value!r} is not "module:name" of a function or class'
        elif not callable(value):
            yield f"{name} = {value!r} is not a function"
        elif number is not None and not _takes(value, number):
            yield f"{name}{inspect.signature(value)} cannot be called with {number} arguments"


@functools.cache
def _functions_of(kind: type) -> dict[str, tuple[int | None, bool]]:
    """Return the fields of a part that are functions: name -> (number of arguments, None for a Reference; whether the
    field may be None)."""
    found: dict[str, tuple[int | None, bool]] = {}
    hints = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        hint = hints[one.name]
        if hint in (Reference, Reference | None):
            found[one.name] = (None, hint == Reference | None)
        elif get_origin(hint) is collections.abc.Callable:
            found[one.name] = (len(get_args(hint)[0]), False)
    return found


def _takes(function: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * number)
    except ValueError:  # a function of C without a signature
        return True
    except TypeError:
        return False
    return True
