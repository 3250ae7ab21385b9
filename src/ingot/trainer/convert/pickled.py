"""Read a pickle as plain data, without executing it.

A pickle is a program that names functions and calls them. Here a name stays a `PickledName` and a call becomes a
`PickledCall`, which records what would have been called; no function is looked up. So nothing can be executed, whatever
the bytes are, and a name that the reader does not expect is refused. Python's Unpickler, also a restricted one, calls
what it has looked up, and restrictions were bypassed before (CVE-2025-32434, CVE-2026-24747).

Every operation and every character of text counts against a limit of memory, because an operation of one byte can make
an object of a hundred. A text is counted after it was read, when it takes at most five times its bytes.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 << 20
# Memory of an operation: an object with its place on the stack, in a list and in the memo.
_OPERATION_BYTES = 300
_CHARACTER_BYTES = 5  # one in the pickle's own encoding, at most four as text
_MAX_INT_BYTES = 8


class PickleRefused(ValueError):
    """A pickle that is damaged, too large, or names something that the reader does not expect."""


@dataclass(frozen=True, eq=False, slots=True)
class PickledName:
    """A module and an attribute that a pickle names, as "torch.float32"."""

    text: str


@dataclass(eq=False, slots=True)
class PickledCall:
    """A call or a new object that a pickle asks for. state: what BUILD gave it; None before."""

    name: str
    arguments: tuple
    state: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """A reference to something outside of the pickle, such as the storage of a tensor."""

    key: Any


class Pairs(list):
    """The (key, value) pairs of a dict. They are never hashed: that takes time without bound for nested tuples."""

    def get(self, key: str) -> Any:
        """Return the value of the text `key`; None if there is none."""
        return next((value for name, value in self if isinstance(name, str) and name == key), None)


def read_pickle(data: bytes, expected: Collection[str], most_bytes: int) -> Any:
    """Return the value of the pickle `data`: None, numbers, text, bytes, tuples, lists, and the classes of this module.

    expected: the names that the pickle may contain, such as "torch.Size". most_bytes: a limit for the memory of the
    value. Raises PickleRefused for any other name, for opcodes that plain data does not need, for a damaged pickle, and
    beyond the limit.
    """
    machine = _Machine(expected, most_bytes)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument)
    except PickleRefused:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, AttributeError) as error:
        raise PickleRefused(f"it is damaged ({str(error)[:80]})") from None
    raise PickleRefused("it has no end")


def numbers(value: Any, most: int) -> tuple[int, ...]:
    """Return `value` if it is a tuple of at most `most` numbers that are not negative. Raises PickleRefused."""
    if not isinstance(value, tuple) or len(value) > most:
        raise PickleRefused(f"a shape is not a tuple of at most {most} numbers")
    if any(type(one) is not int or one < 0 for one in value):
        raise PickleRefused("a shape, an offset or a length is not a number, or is negative")
    return value


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENT = {
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "LONG1"),
}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": Pairs}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}


class _Machine:
    """The stack and the memo of a pickle. most_bytes: the memory that its objects may take."""

    def __init__(self, expected: Collection[str], most_bytes: int):
        self._expected = expected
        self._most = self._left = most_bytes
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self._stack) != 1:
            raise PickleRefused(f"it ends with {len(self._stack)} values instead of one")
        return self._pop()

    def step(self, opcode: str, argument: Any) -> None:
        self._count(argument)
        push = self._stack.append
        if opcode in _ARGUMENT:
            if isinstance(argument, int) and argument.bit_length() > 8 * _MAX_INT_BYTES:
                raise PickleRefused(f"it has an integer of {argument.bit_length()} bits")
            push(argument)
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            push(_EMPTY[opcode]())
        elif opcode in _TUPLES:
            push(tuple(self._pop() for _ in range(_TUPLES[opcode]))[::-1])
        elif opcode in _GET:
            push(self._memo[argument])
        elif opcode in _PUT:
            self._memo[argument] = self._top()
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif opcode == "MARK":
            push(_MARK)
        elif opcode == "GLOBAL":
            push(self._name(*argument.split(" ", 1)))
        elif opcode == "STACK_GLOBAL":
            attribute, module = self._pop(str), self._pop(str)
            push(self._name(module, attribute))
        elif opcode not in ("PROTO", "FRAME"):
            self._combine(opcode)

    def _count(self, argument: object) -> None:
        """Count the memory of an operation with `argument`."""
        self._left -= _OPERATION_BYTES
        if isinstance(argument, str | bytes):
            self._left -= _CHARACTER_BYTES * len(argument)
        if self._left < 0:
            raise PickleRefused(f"its objects take more than {self._most:,} bytes of memory")

    def _combine(self, opcode: str) -> None:
        push = self._stack.append
        match opcode:
            case "TUPLE":
                push(tuple(self._to_mark()))
            case "APPEND":
                value = self._pop()
                self._list().append(value)
            case "APPENDS":
                values = self._to_mark()
                self._list().extend(values)
            case "SETITEM":
                value, key = self._pop(), self._pop()
                self._top(Pairs).append((key, value))
            case "SETITEMS":
                values = self._to_mark()
                self._top(Pairs).extend(zip(values[::2], values[1::2], strict=True))
            case "REDUCE" | "NEWOBJ":
                arguments, name = self._pop(tuple), self._pop(PickledName)
                push(PickledCall(name.text, arguments))
            case "BUILD":
                state, call = self._pop(), self._top(PickledCall)
                if call.state is not None:
                    raise PickleRefused(f"it sets the state of {call.name} twice")
                call.state = state
            case "BINPERSID":
                push(Stored(self._pop()))
            case _:
                raise PickleRefused(f"it contains the opcode {opcode}, which plain data does not need")

    def _name(self, module: str, attribute: str) -> PickledName:
        text = f"{module}.{attribute}"
        if text not in self._expected:
            raise PickleRefused(f"it names {text[:120]!r}, which it does not need")
        return PickledName(text)

    def _pop(self, kind: type | None = None) -> Any:
        top = self._top(kind)
        self._stack.pop()
        return top

    def _top(self, kind: type | None = None) -> Any:
        top = self._stack[-1] if self._stack else _MARK
        if top is _MARK or (kind is not None and not isinstance(top, kind)):
            raise PickleRefused("its operations do not fit its values")
        return top

    def _list(self) -> list:
        found = self._top(list)
        if isinstance(found, Pairs):
            raise PickleRefused("it appends a value to a dict")
        return found

    def _to_mark(self) -> list[Any]:
        values = []
        while self._stack and self._stack[-1] is not _MARK:
            values.append(self._stack.pop())
        self._stack.pop()
        return values[::-1]
