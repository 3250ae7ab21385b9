"""A task: a registered function, its specification, and the key that names the result.

    @dataclass(frozen=True, kw_only=True)
    class CountWords:
        smallest: int                      # a setting: part of the key
        pages: TaskRef[Pages]              # the result of another task: its key is part of the key
        cache: Annotated[Path, PLACE]      # where something is on this machine: not part of the key

    @task_function("count_words")
    def count_words(specification: CountWords, attempt: Attempt) -> int: ...

    task = count_words.task(CountWords(smallest=3, pages=pages.ref, cache=folder), label="page 7")

A specification and a result are JSON values, dataclasses and paths, nested in tuples, lists and dictionaries. The
function gets the specification with its references resolved: `specification.pages.folder`, `.result`. Any process on
any machine can do the task: it imports the recorded module of `ingot`, which registers the function under its name.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import struct
import threading
import time
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, overload

from ingot import __version__, errors
from ingot.config import LEFT_OUT_AT_DEFAULT
from ingot.storage import canonical_json, sha256_bytes

S = TypeVar("S")
R = TypeVar("R")

PLACE = "place"  # Annotated[Path, PLACE]: a field that says where data is, never which data it is
BOARD = struct.Struct("<qqqq")  # the head of a progress file: watched, beats, record, records
COUNTS_BYTES = 8192  # after the head: the counts as JSON
_COUNTS_SECONDS = 0.5
_BEAT_SECONDS = 5.0
_TRACEBACK_CHARACTERS = 20_000


def done_folder(root: Path, key: str) -> Path:
    """Return the folder of a finished task in the store at `root`."""
    return root / "done" / key[:2] / key


def done_facts(root: Path, key: str) -> dict[str, Any]:
    """Return the content of a finished task's done.json: its label, function, result, `records` and `counts`."""
    return json.loads((done_folder(root, key) / "done.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class TaskRef(Generic[R]):
    """A reference, in the specification of a task, to the result of an earlier task, which must be finished first.

    `Task.ref` creates a reference that has only a key. Inside a task's function, `folder` and `result` work too.
    """

    key: str
    root: Path | None = field(default=None, compare=False, repr=False)
    kind: Any = field(default=None, compare=False, repr=False)

    @property
    def folder(self) -> Path:
        """The folder that the earlier task wrote."""
        assert self.root is not None, "a reference is resolved inside a task's function only"
        return done_folder(self.root, self.key)

    @property
    def result(self) -> R:
        """The value that the earlier task's function returned."""
        assert self.root is not None, "a reference is resolved inside a task's function only"
        return decode(self.kind, done_facts(self.root, self.key)["result"])


@dataclass(frozen=True)
class TaskGroup(Sequence[TaskRef[R]]):
    """References to the results of many tasks, in order, under one name (Store.group).

    Without a group, a thousand specifications that each list a hundred thousand keys would be gigabytes to hash, send
    and store.
    """

    name: str
    root: Path | None = field(default=None, compare=False, repr=False)
    kind: Any = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def _keys(self) -> list[str]:
        assert self.root is not None, "a group is resolved inside a task's function only"
        return (self.root / "groups" / self.name).read_text(encoding="utf-8").splitlines()

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> TaskRef[R]: ...
    @overload
    def __getitem__(self, index: slice) -> list[TaskRef[R]]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [TaskRef[R](key, self.root, self.kind) for key in self._keys[index]]
        return TaskRef[R](self._keys[index], self.root, self.kind)

    @property
    def folders(self) -> list[Path]:
        """The folders that the tasks wrote, in the order of the group."""
        return [one.folder for one in self]


class Attempt:
    """One attempt at a task: the folder that it writes, the records that it leaves out, and its progress.

    out: the folder to write into; it becomes the task's folder when the function returns.
    skip: numbers of the records to leave out, because several earlier attempts died at them.
    board: the progress file, mapped into memory, so that its content remains if this process dies.
    watched: True if another process watches this one and records how it ends. beat: called about twice a second.
    """

    def __init__(
        self,
        out: Path,
        skip: frozenset[int],
        board: Any,
        *,
        watched: bool = False,
        beat: Callable[[], None] | None = None,
    ):
        self.out, self.skip = out, skip
        self.records = 0
        self.held = -1  # an open file descriptor of the folder `out`, to recognize the folder
        self._board, self._watched, self._beat = board, watched, beat
        self._beats, self._due = 0, 0.0
        self._counts: Callable[[], dict[str, int]] | None = None
        self.at(-1)

    def at(self, record: int, counts: Callable[[], dict[str, int]] | None = None) -> None:
        """Report that `record` is next; -1 if the next work belongs to no record.

        Call this for every record: it costs very little, and calls counts() at most twice a second. Call at(-1) after
        the last record, and regularly in a long task without records: a task that reports nothing is considered dead.
        The report remains even if the process is killed right after the call.
        """
        self._beats += 1
        if record >= 0:
            self.records = record + 1
        if counts is not None:
            self._counts = counts
        BOARD.pack_into(self._board, 0, self._watched, self._beats, record, self.records)
        if (now := time.monotonic()) >= self._due:
            self._due = now + _COUNTS_SECONDS
            self._board[BOARD.size :] = _fitting(self.counts()).ljust(COUNTS_BYTES, b"\0")
            if self._beat is not None:
                self._beat()

    def counts(self) -> dict[str, int]:
        """Return the counts that the function reported last: name -> number."""
        return dict(self._counts()) if self._counts is not None else {}

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Report every few seconds, until the block ends, that a task without records is alive."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_BEAT_SECONDS):
                self.at(-1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _fitting(counts: dict[str, int]) -> bytes:
    """Return the counts as JSON; only the largest counts if all of them exceed COUNTS_BYTES."""
    while len(text := canonical_json(counts).encode()) > COUNTS_BYTES:
        counts = dict(sorted(counts.items(), key=lambda item: -item[1])[: len(counts) // 2])
    return text


@dataclass(frozen=True)
class TaskFunction(Generic[S, R]):
    """A registered function that tasks can name. A call with a specification and an attempt returns the result.

    module: the module that registers the function. specification, result: types of the first argument and the result.
    """

    name: str
    module: str
    function: Callable[[S, Attempt], R]
    specification: type[S]
    result: Any

    def __call__(self, specification: S, attempt: Attempt) -> R:
        return self.function(specification, attempt)

    def task(self, specification: S, label: str = "") -> "Task[R]":
        """Return the task that calls this function with `specification`. label: shown to users, like a file name."""
        return Task(function=self, specification=specification, label=label)


_FUNCTIONS: dict[str, TaskFunction] = {}


def task_function(name: str) -> Callable[[Callable[[S, Attempt], R]], TaskFunction[S, R]]:
    """Register the decorated function under `name`. Do not change the name: it is part of the keys of its tasks."""

    def register(function: Callable[[S, Attempt], R]) -> TaskFunction[S, R]:
        hints = typing.get_type_hints(function)
        result, (specification, _) = hints.pop("return"), hints.values()
        other = _FUNCTIONS.get(name)
        if other is not None and other.module not in (function.__module__, "__main__"):
            raise ValueError(f"the task function {name!r} is already registered by {other.module}")
        made = TaskFunction[S, R](name, function.__module__, function, specification, result)
        _FUNCTIONS[name] = made
        return made

    return register


def registered(name: str, module: str) -> TaskFunction:
    """Return the task function `name` of `module`. Raises ValueError if there is none, or `module` is not of ingot."""
    if not module.startswith("ingot."):
        raise ValueError(f"{module!r} is not a module of ingot")  # a store is data: data must not choose the code
    importlib.import_module(module)
    found = _FUNCTIONS.get(name)
    if found is None or found.module != module:
        raise ValueError(f"{module} registers no task function {name!r}")
    return found


@dataclass(frozen=True, kw_only=True)
class Task(Generic[R]):
    """A call of `function` with `specification`. Equal tasks have equal keys on every machine."""

    function: TaskFunction[Any, R]
    specification: Any
    label: str = ""

    @property
    def title(self) -> str:
        """The label, or the name of the function if there is no label."""
        return self.label or self.function.name

    @functools.cached_property
    def key(self) -> str:
        """The name of the result: a hash of function name, version of ingot, and all fields that are not `PLACE`."""
        values = [self.function.name, self._values(places=False), __version__]
        return sha256_bytes(canonical_json(values).encode())[:32]

    @property
    def ref(self) -> TaskRef[R]:
        """A reference to this task's result, for the specifications of other tasks."""
        return TaskRef(self.key)

    def resolved(self, root: Path) -> Any:
        """Return the specification with its references resolved in the store at `root`."""
        return decode(self.function.specification, encode(self.specification), root)

    def to_json(self) -> dict[str, Any]:
        """Return the task as JSON values; `from_json` reads them in any process."""
        return {
            "function": self.function.name,
            "module": self.function.module,
            "specification": self._values(places=False),
            "places": self._values(places=True),
            "label": self.label,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Task[Any]":
        """Return the task from which `to_json` made `values`. Import the module that registers its function."""
        function = registered(values["function"], values["module"])
        specification = decode(function.specification, values["specification"] | values["places"])
        return cls(function=function, specification=specification, label=values["label"])

    def _values(self, *, places: bool) -> dict[str, Any]:
        """Return the specification's fields as JSON values: those marked PLACE if `places`, otherwise all others."""
        hints = _hints(type(self.specification))
        names = [name for name, hint in hints.items() if (PLACE in getattr(hint, "__metadata__", ())) == places]
        return {name: encode(getattr(self.specification, name)) for name in names}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return field -> type of a dataclass."""
    found = typing.get_type_hints(kind, include_extras=True)
    return {one.name: found[one.name] for one in dataclasses.fields(kind)}


def encode(value: Any) -> Any:
    """Return a specification or a result as JSON values."""
    if isinstance(value, TaskRef):
        return value.key
    if isinstance(value, TaskGroup):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: encode(getattr(value, one.name)) for one in dataclasses.fields(value) if _kept(value, one)}
    if isinstance(value, dict):
        return {str(key): encode(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [encode(one) for one in value]
    return value


def _kept(value: Any, one: dataclasses.Field) -> bool:
    """Return False for a field that has its default and is left out then, so that keys of tasks stay what they were."""
    if one.metadata != LEFT_OUT_AT_DEFAULT or one.default_factory is dataclasses.MISSING:
        return True
    return getattr(value, one.name) != one.default_factory()


def decode(hint: Any, value: Any, root: Path | None = None) -> Any:
    """Undo `encode`: return the value of type `hint`. References in it are resolved in the store at `root`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if value is None:
        return None
    if origin is Annotated:
        return decode(arguments[0], value, root)
    if origin in (Union, types.UnionType):
        return decode(next(one for one in arguments if one is not types.NoneType), value, root)
    if origin in (TaskRef, TaskGroup):
        return origin(value, root, arguments[0])
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(decode(kind, one, root) for kind, one in zip(kinds, value, strict=True))
    if origin is list:
        return [decode(arguments[0], one, root) for one in value]
    if origin is dict:
        return {key: decode(arguments[1], one, root) for key, one in value.items()}
    if hint is Path:
        return Path(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = _hints(hint)
        return hint(**{name: decode(hints[name], one, root) for name, one in value.items()})
    return value


def error_to_json(error: Exception, task: Task | None = None) -> dict[str, Any]:
    """Return an error of a task as JSON, so that the waiting process can raise it again, with an IngotError's fields.

    Errors are not pickled: a store is data, and data must not choose the code that runs.
    """
    if isinstance(error, errors.IngotError):
        # A class that is private to one module is replaced by its nearest base class in ingot.errors.
        known = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        kept = {"kind": known.__name__, "code": error.code, "found": error.found, "rule": error.rule}
        kept |= {"fix": error.fix, "facts": error.facts}
    else:
        text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        kept = {"kind": "", "found": f"{type(error).__name__}: {error}"[:_TRACEBACK_CHARACTERS], "traceback": text}
    return kept | {"task": task.title if task else ""}


def error_from_json(record: dict[str, Any]) -> Exception:
    """Undo `error_to_json`: return the IngotError, or a RuntimeError with the traceback for any other error."""
    kind = getattr(errors, str(record.get("kind")), None)
    if isinstance(kind, type) and issubclass(kind, errors.IngotError):
        return kind(record["code"], record["found"], rule=record["rule"], fix=record["fix"], **record["facts"])
    where = f" in {record['task']}" if record.get("task") else ""
    return RuntimeError(f"{record['found']}{where}\nin a worker:\n{record.get('traceback', '')}")
