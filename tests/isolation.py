"""The state of a process that tests share, and its restoration: no test finds leftovers of another one.

Which tests run in one process, and in which order, depends on the load of the machine. A plug-in that stays imported
makes a test red that has a plug-in of the same name, on one run of a hundred. Warnings filters are restored by pytest.
"""

import os
import random
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import ingot
from ingot.plugins import load
from ingot.plugins.registry import INGOT, Registry

Restore = Callable[[], None]
# Modules of these folders stay imported: torch cannot be imported twice, and test modules are imported once, by pytest.
KEPT = tuple(
    f"{Path(folder)}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        # Packages from outside of the virtual environment, as tests of mutants have them.
        *(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")),
        Path(ingot.__file__).parent,
        Path(__file__).parent,
    )
)
_OWN = ("ingot.", "tests.")
_HANDLED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGUSR2")


@contextmanager
def restored() -> Iterator[None]:
    """On exit, undo every change of the state that the functions of SHARED save."""
    undo = [save() for save in SHARED]
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def seed() -> None:
    """Start all global random generators anew, so that a test has the same numbers alone and after others."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) and hasattr(torch, "default_generator"):
        torch.default_generator.manual_seed(0)


def forget_compiled() -> None:
    """Forget what torch has compiled: after some versions of a function it gives up, silently."""
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()


def _environment() -> Restore:
    before = _variables()

    def restore() -> None:
        now = _variables()
        for name in now.keys() - before.keys():
            del os.environ[name]
        for name in [name for name, value in before.items() if now.get(name) != value]:
            os.environ[name] = before[name]
        if now.get("TZ") != before.get("TZ"):
            time.tzset()

    return restore


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # pytest changes it


def _places() -> Restore:
    """Save the working folder, the folder of temporary files and the settings of the interpreter."""
    folder, temporary = Path.cwd(), tempfile.tempdir
    lists = [(place, list(place)) for place in (sys.path, sys.meta_path, sys.argv)]
    names = ("path", "meta_path", "argv", "dont_write_bytecode")
    values, recursion = {name: getattr(sys, name) for name in names}, sys.getrecursionlimit()

    def restore() -> None:
        os.chdir(folder)
        tempfile.tempdir = temporary
        for name, value in values.items():
            setattr(sys, name, value)
        for place, content in lists:
            place[:] = content
        if sys.getrecursionlimit() != recursion:
            sys.setrecursionlimit(recursion)

    return restore


def _modules() -> Restore:
    """Save which modules are imported. Modules of KEPT that are imported first by a test stay."""
    before = dict(sys.modules)

    def restore() -> None:
        if sys.modules == before:
            return
        for name in [name for name, module in sys.modules.items() if name not in before and not _is_kept(module)]:
            _drop(name)
        sys.modules.update(before)
        if _parents_restored(before):
            # A test removed modules of ingot and imported them again; newer ones may hold parts of these copies.
            for name in [name for name in sys.modules if name not in before and name.startswith(_OWN)]:
                _drop(name)

    return restore


def _is_kept(module: ModuleType | None) -> bool:
    own = vars(module) if module is not None else {}  # attributes of torch.classes are made when they are asked for
    places = [own.get("__file__") or "", *own.get("__path__", ())]
    return all(not place or f"{place}{os.sep}".startswith(KEPT) for place in places)


def _drop(name: str) -> None:
    module = sys.modules.pop(name)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules and vars(sys.modules[parent] or object).get(child) is module is not None:
        delattr(sys.modules[parent], child)


def _parents_restored(before: dict[str, ModuleType]) -> bool:
    """Let packages have the modules `before` as attributes again. Return whether a package had another one."""
    changed = False
    for name, module in before.items():
        if name.startswith(_OWN):
            parent, _, child = name.rpartition(".")
            there = vars(before[parent]).get(child) if before.get(parent) else module
            if isinstance(there, ModuleType) and there is not module:
                setattr(before[parent], child, module)
                changed = True
    return changed


def _plugins() -> Restore:
    """Save what is registered and which plug-ins are loaded. Parts of ingot that are registered later stay."""
    every, entries = list(Registry.every), [dict(registry._entries) for registry in Registry.every]
    loaded, folders, importing = dict(load._loaded), list(load._folders), Registry.importing

    def restore() -> None:
        load._loaded.clear()
        load._loaded.update(loaded)
        load._folders[:] = folders
        Registry.importing = importing
        if len(Registry.every) != len(every):  # made by a test, or imported by it first
            values = [value for name, module in list(sys.modules.items()) if name.startswith("ingot.")
                      for value in vars(module).values() if isinstance(value, Registry)]  # fmt: skip
            own = {id(registry) for registry in values}
            Registry.every[len(every) :] = [one for one in Registry.every[len(every) :] if id(one) in own]
        for registry in Registry.every[len(every) :]:
            registry._entries = _of_ingot(registry)
        for registry, saved in zip(every, entries, strict=True):
            if registry._entries != saved:
                registry._entries = saved | {k: v for k, v in _of_ingot(registry).items() if k not in saved}

    return restore


def _of_ingot(registry: Registry) -> dict:
    return {name: entry for name, entry in registry._entries.items() if entry.module == INGOT}


def _task_functions() -> Restore:
    name = "ingot.data.tasks.task"
    saved = dict(sys.modules[name]._FUNCTIONS) if name in sys.modules else {}

    def restore() -> None:
        if name in sys.modules:
            functions = sys.modules[name]._FUNCTIONS
            later = {key: value for key, value in functions.items() if value.module.startswith("ingot.")}
            kept = later | saved
            functions.clear()
            functions.update(kept)

    return restore


def _signals() -> Restore:
    numbers = [signal.Signals[name] for name in _HANDLED]
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                if number == signal.SIGALRM:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(number, handler)

    return restore


def _torch() -> Restore:
    """Save torch's flags and whether there is a process group, if torch is imported; otherwise they become again what
    they are after its import."""
    before = _flags_of_torch()

    def restore() -> None:
        now = _flags_of_torch()
        if now is None:
            return
        torch = sys.modules["torch"]
        wanted = before or (torch.float32, 1, (False, False), True, False)
        dtype, threads, deterministic, gradients, grouped = wanted
        if now[-1] and not grouped:
            torch.distributed.destroy_process_group()
        if now[:-1] != wanted[:-1]:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
            torch.set_grad_enabled(gradients)

    return restore


def _flags_of_torch() -> tuple | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):  # not imported, or its import failed
        return None
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    parallel = sys.modules.get("torch.distributed")
    grouped = parallel is not None and parallel.is_available() and parallel.is_initialized()
    return torch.get_default_dtype(), torch.get_num_threads(), deterministic, torch.is_grad_enabled(), grouped


# Restored from the last to the first: plug-ins after the modules that registered them.
SHARED = (_environment, _places, _signals, _torch, _task_functions, _plugins, _modules)
