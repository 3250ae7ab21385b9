"""Callbacks that a program gives to a run in Python, besides those that the run file names. No torch.

A callback with state is a part of the run: checkpoints record it under the name of its class, as they record a table
[callbacks.NAME]. It is not in the run's run.toml, because a file cannot name an object. A function only looks at the
numbers of log lines, so nothing records it.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.errors import UsageError
from ingot.plugins.callback import CallbackRun, StepCallback, StepNumbers
from ingot.plugins.registry import MAIN, resolve
from ingot.schema.run import RunConfig

Given = type[StepCallback] | StepCallback | Callable[[Sequence[StepNumbers]], object]


@dataclass(frozen=True)
class GivenCallbacks:
    """The callbacks that a program gives to a run.

    callbacks: name of the class -> the class, or an instance. functions: called on rank 0 at log lines with the numbers
    of the steps since the previous line; the result is ignored.
    """

    callbacks: Mapping[str, type[StepCallback] | StepCallback] = field(default_factory=dict)
    functions: Sequence[Callable[[Sequence[StepNumbers]], object]] = ()

    def __bool__(self) -> bool:
        return bool(self.callbacks or self.functions)

    def added_to(self, config: RunConfig) -> RunConfig:
        """Return `config` with these callbacks. Raises UsageError for a name that the run file has, too."""
        for name in self.callbacks:
            if name in config.callbacks:
                raise _unusable(name, f"the run file has a callback {name!r}, too")
        own: dict[str, dict[str, Any]] = {name: {} for name in self.callbacks}
        return replace(config, callbacks=config.callbacks | own) if own else config

    def make(self, name: str, run: CallbackRun) -> object:
        """Return the instance `name`, or make one of the class `name`, without options."""
        given = self.callbacks[name]
        return given(run, None) if isinstance(given, type) else given

    def references(self) -> list[tuple[str, str]]:
        """Return (folder, "module:Class") of each callback, by which another process can import it.

        Raises UsageError for a function, an instance, or a class that cannot be imported by name.
        """
        for function in self.functions:
            raise _not_importable(_name_of(function), "is a function")
        return [_reference(name, given) for name, given in self.callbacks.items()]


NOTHING_GIVEN = GivenCallbacks()


def given_callbacks(items: Iterable[Given]) -> GivenCallbacks:
    """Sort `items` into callbacks and functions. Raises UsageError for anything else, or two of the same name."""
    callbacks: dict[str, type[StepCallback] | StepCallback] = {}
    functions = []
    for item in items:
        kind = item if isinstance(item, type) else type(item)
        if issubclass(kind, StepCallback):
            if kind.__name__ in callbacks:
                raise _unusable(kind.__name__, f"two callbacks have the name {kind.__name__!r}")
            callbacks[kind.__name__] = item  # pyright: ignore[reportArgumentType]
        elif callable(item) and not isinstance(item, type):
            functions.append(item)
        else:
            raise _unusable(kind.__name__, f"{item!r} is neither a StepCallback nor a function")
    return GivenCallbacks(callbacks, tuple(functions))


def imported_callbacks(references: Iterable[Sequence[str]]) -> GivenCallbacks:
    """Import the callbacks that `GivenCallbacks.references` describes. Raises ConfigError for one that is not there."""
    classes = []
    for folder, reference in references:
        if folder not in sys.path:
            sys.path.append(folder)
        classes.append(resolve(reference))
    return given_callbacks(classes)


def _reference(name: str, given: type[StepCallback] | StepCallback) -> tuple[str, str]:
    if not isinstance(given, type):
        raise _not_importable(name, "is an instance, which the processes of the ranks cannot import; give its class")
    if given.__module__ == MAIN or "<locals>" in given.__qualname__:
        where = "inside a function" if "<locals>" in given.__qualname__ else "in this program or notebook"
        raise _not_importable(name, f"is defined {where}")
    module = sys.modules.get(given.__module__)
    if module is None or getattr(module, name, None) is not given:
        raise _not_importable(name, f"is not found as {given.__module__}:{name}")
    file = Path(inspect.getfile(given)).resolve()
    depth = given.__module__.count(".") + (file.name == "__init__.py")
    return str(file.parents[depth]), f"{given.__module__}:{name}"


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _unusable(name: str, found: str) -> UsageError:
    return UsageError(
        "E-CALLBACKS-GIVEN",
        found,
        rule="callbacks are classes or instances of StepCallback with different names, or functions of step numbers",
        fix="rename one, or give something else",
        name=name,
    )


def _not_importable(name: str, found: str) -> UsageError:
    return UsageError(
        "E-CALLBACKS-RANKS",
        f"callback {name!r} {found}, and the run has several ranks",
        rule="each rank is a process of its own, which imports its callbacks by module and name",
        fix="put a subclass of StepCallback into a module and give the class; or register it there and name it in the "
        "run file: [plugins] modules, and [callbacks.NAME]",
        name=name,
    )
