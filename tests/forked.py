"""Processes of Python that are forked from the tests' own process instead of started: torch is imported already.

A start of `ingot train` imports torch in its fork server, for 1.5 CPU seconds; a fork of a process that has it takes a
tenth of that. `forking()` replaces the last step of `subprocess.Popen`, so pipes, sessions, inherited descriptors and
waiting stay those of the standard library, and processes that a forked one starts are forked as well. A process that
needs what only a new interpreter has (a variable or option of Python, a preloaded library) is started as always.

The kernel shows a forked process with its own command line and environment, by which jobs find their processes.
"""

import atexit
import ctypes
import faulthandler
import gc
import inspect
import io
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.isolation import SHARED, seed

_execute = subprocess.Popen._execute_child
_signature = inspect.signature(_execute)
_kept: list[Any] = []  # objects of the tests whose end would close a descriptor that has another meaning here
_undo: list[Callable[[], None]] = []
# The C library reads these, or the interpreter, at their start.
_NEEDS_A_START = ("LD_", "PYTHON", "OMP_", "MKL_")


def remember() -> None:
    """Take the present state of the process as the one in which forked processes begin (tests/isolation)."""
    _undo[:] = [save() for save in SHARED]


@contextmanager
def forking() -> Iterator[None]:
    """Within the context, `subprocess.Popen` forks programs of Python where that has the same result."""
    before = subprocess.Popen._execute_child
    subprocess.Popen._execute_child = _execute_child
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before


def _execute_child(process: subprocess.Popen, *positional: Any) -> None:
    given = _signature.bind(process, *positional).arguments
    program = _program_of(given)
    if program is None or not can_be_described() or not _clean_path():
        _execute(process, *positional)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    process.pid = os.fork()
    if not process.pid:
        _live(program, given)
    process._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in pipes))


@dataclass(frozen=True)
class _Program:
    """The words after the interpreter and its options. on_path: whether the program's folder is on its path."""

    words: list[str]
    on_path: bool
    unbuffered: bool


def _program_of(given: Mapping[str, Any]) -> _Program | None:
    """Return the program of a call of Popen; None if it has to be started."""
    words = given["args"]
    if isinstance(words, (str, bytes)) or given["executable"] not in (None, sys.executable) or given["shell"]:
        return None
    interpreter, *words = (os.fsdecode(word) for word in words)
    options: set[str] = set()
    while words[:1] in (["-P"], ["-u"]):
        options.add(words.pop(0))
    if words[:2] == ["-W", "ignore"]:
        del words[:2]
    if interpreter != sys.executable or len(words) < 2 or not (words[0] == "-m" or words[0].endswith(".py")):
        return None
    env = os.environ if given["env"] is None else given["env"]
    changed = {name for name in {*env, *os.environ} if env.get(name) != os.environ.get(name)}
    if any(name.startswith(_NEEDS_A_START) and name != "PYTHONPATH" for name in changed):
        return None
    return _Program(words, "-P" not in options, "-u" in options)


def _live(program: _Program, given: Mapping[str, Any]) -> None:
    """The life of a forked process, which ends here."""
    code = 70
    try:
        _become(given)
        _connect(given, program.unbuffered)
        code = _run(program)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become(given: Mapping[str, Any]) -> None:
    """Make this process what a new one would be at its start."""
    gc.freeze()
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))
    folder = Path.cwd() if given["cwd"] is None else given["cwd"]
    env = dict(os.environ if given["env"] is None else given["env"])
    for restore in reversed(_undo):
        restore()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    describe([os.fsdecode(word) for word in given["args"]], env)
    if given["start_new_session"]:
        os.setsid()
    for number in range(1, signal.NSIG):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()
    _forget()


def _connect(given: Mapping[str, Any], unbuffered: bool) -> None:
    """Give the process its standard streams, and close all descriptors that it does not inherit."""
    for own, fd in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"])):
        if fd not in (-1, own):
            os.dup2(fd, own)
        os.set_inheritable(own, True)
    if given["close_fds"]:
        inherited = {0, 1, 2, *given["pass_fds"]}
        for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if fd not in inherited:
                try:
                    os.close(fd)
                except OSError:
                    continue  # that of the listing itself
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    out, errors = (os.fdopen(fd, "wb", closefd=False) for fd in (1, 2))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, "utf-8", write_through=unbuffered)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(errors, "utf-8", "backslashreplace", line_buffering=True)


def _forget() -> None:
    """Forget what the tests' process has beyond its modules: hooks of pytest, handlers, children, caches."""
    faulthandler.disable()
    atexit._clear()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    tempfile.tempdir = None
    subprocess._active.clear()
    multiprocessing.process._children.clear()
    multiprocessing.util._finalizer_registry.clear()
    atexit.register(multiprocessing.util._exit_function)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    seed()


def _run(program: _Program) -> int:
    """Run a program as Python would. Returns its exit code."""
    module = program.words[0] == "-m"
    arguments = program.words[module:]
    folder = Path.cwd() if module else Path(arguments[0]).absolute().parent
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([str(folder)] if program.on_path else []), *more, *_clean_path()]
    sys.path_importer_cache.clear()
    sys.argv[:] = arguments
    code = 0
    try:
        if module:
            sys.modules.pop(arguments[0], None)  # runpy warns about a module that is imported already
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


@cache
def _clean_path() -> list[str]:
    """Return sys.path of a new interpreter, without the folder of a program."""
    program = "import sys; print(*sys.path, sep='\\n')"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_FIELDS = {"start_code": 26, "end_code": 27, "start_data": 45, "end_data": 46, "start_brk": 47, "start_stack": 28}


class _Memory(ctypes.Structure):
    """struct prctl_mm_map of prctl(2)."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def describe(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Let the kernel show this process with the command line `words` and the environment `env`. Returns whether it
    does."""
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in env.items())
    memory = ctypes.create_string_buffer(line + variables)
    _kept.append(memory)
    library = ctypes.CDLL(None)
    library.sbrk.restype = ctypes.c_void_p
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start = ctypes.addressof(memory)
    places = {name: int(stat[number - 3]) for name, number in _FIELDS.items()}
    places |= {"arg_start": start, "arg_end": start + len(line), "env_start": start + len(line)}
    new = _Memory(**places, env_end=start + len(line + variables), brk=library.sbrk(0), exe_fd=0xFFFFFFFF)
    size = ctypes.c_ulong(ctypes.sizeof(new))
    return library.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(new), size, ctypes.c_ulong(0)) == 0


@cache
def can_be_described() -> bool:
    """Return whether the kernel lets a process change how it is shown; tried in a process of its own."""
    child = os.fork()
    if not child:
        os._exit(0 if describe(["python"], {}) else 1)
    return os.waitpid(child, 0)[1] == 0
