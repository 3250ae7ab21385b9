"""The process that worker processes are forked from, its owner's side of it, and what workers do.

It has imported what tasks need and has no threads, so that a worker starts in milliseconds, also in place of one that
died; the process that wants workers may have threads (torch, duckdb), and forking it would copy their locks. Unlike the
fork server of `multiprocessing` it never imports the caller's script again, says how each worker ended, kills one
without meeting another that got its number, and all of them die with the process that wanted them, however that ends.

Messages are JSON. On the control socket come {"fork": n, "import": [...]} with the worker's end of its pipe, and
{"kill": n}; back goes {"ended": n, "status": ...} (as Popen.returncode). Linux only.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from ingot.data.tasks.failures import to_json
from ingot.data.tasks.task import Store, Task, run_task
from ingot.errors import ConfigError

OUT_OF_MEMORY = 77  # exit code of a worker whose task got a MemoryError
ANSWER_SECONDS = 10.0  # that one side waits for the other in the middle of a message
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ForkServer:
    """The owner's side: starts the process that forks workers, speaks with it, and ends it."""

    def __init__(self, memory_bytes: int):
        if sys.platform != "linux":
            raise ConfigError(
                f"worker processes are not made for {sys.platform}",
                rule="their end with the driver, and their limits, are the Linux kernel's doing",
                fix="--workers 1, which works in one process",
            )
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _never_blocks(self.control)
        # Its sys.path is ours, however that was set; the script that runs here is not imported there.
        start = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from ingot.data.tasks.forks import serve\nserve({theirs.fileno()}, {os.getpid()}, {memory_bytes})"
        )
        # Processes are the parallelism: threads of libraries would only share their cores.
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which ends them; and all can be killed as one group
            env={**dict.fromkeys(threads, "1"), "TOKENIZERS_PARALLELISM": "false", **os.environ},
        )
        theirs.close()
        self.gone, self._owner, self._forked = False, os.getpid(), 0

    def fork(self, modules: list[str]) -> tuple[int, Connection]:
        """(number, pipe) of a new worker. It may be dead at once, like any worker."""
        self._forked += 1
        ours, theirs = socket.socketpair()
        _never_blocks(ours)
        with theirs:
            self._send({"fork": self._forked, "import": modules}, [theirs.fileno()])
        return self._forked, Connection(ours.detach())

    def kill(self, number: int) -> None:
        self._send({"kill": number})

    def ended(self) -> dict[int, int]:
        """number -> exit code of the workers that ended since the last call."""
        codes = {}
        try:
            while not self.gone and wait([self.control], timeout=0):
                if not (data := self.control.recv(1 << 16)):
                    self.give_up()
                    break
                message = json.loads(data)
                codes[message["ended"]] = message["status"]
        except OSError:
            self.give_up()
        return codes

    def stop(self) -> None:
        """End it and all workers; none is left as a zombie."""
        if os.getpid() != self._owner or self.control.fileno() < 0:
            return  # a fork of the owner, at its exit; or stopped already
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)  # it then kills and reaps its workers
            self.control.settimeout(5)
            while self.control.recv(1 << 16):
                pass
        self.give_up()
        self.control.close()

    def _send(self, message: dict, fds: Iterable[int] = ()) -> None:
        try:
            socket.send_fds(self.control, [json.dumps(message).encode()], list(fds))
        except OSError:
            self.give_up()

    def give_up(self) -> None:
        """Kill it with all workers at once, or notice that it is gone."""
        if self.gone:
            return
        self.gone = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # before it is waited for: the number is still its own
        self.process.wait()


def _never_blocks(ours: socket.socket) -> None:
    """A process that is stopped, in the middle of a message or before it reads ours, must not stop this one."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(ANSWER_SECONDS), 0))


def serve(control_fd: int, parent: int, memory_bytes: int) -> None:
    """Fork workers on request until the other end of the control socket is closed; then none is left."""
    _die_with(parent)
    control = socket.socket(fileno=control_fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # pid -> number
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(children, control)
        if control in ready:
            data, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not data:
                break
            message = json.loads(data)
            if "fork" in message:
                for name in message["import"]:
                    with contextlib.suppress(Exception):  # the task that needs it says what is wrong
                        importlib.import_module(name)
                pid = _fork(fds[0], memory_bytes, not_its=(control.fileno(), woken, wake))
                os.close(fds[0])
                children[pid] = message["fork"]
            else:
                for pid in [pid for pid, number in children.items() if number == message["kill"]]:
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def _report_ended(children: dict[int, int], control: socket.socket) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            control.send(json.dumps({"ended": children.pop(pid), "status": code}).encode())


def _fork(pipe: int, memory_bytes: int, not_its: tuple[int, ...]) -> int:
    gc.freeze()  # or each worker's first collection copies every page
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in not_its:
            os.close(fd)
        _die_with(parent)
        _limit(memory_bytes)
        _work(Connection(pipe), memory_bytes)
    finally:
        os._exit(1)


def _limit(memory_bytes: int) -> None:
    # Of the address space only what is private and writable counts: maps of big files do not, nor what libraries
    # reserve and never use (to RLIMIT_AS, duckdb alone is a gigabyte).
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")  # short of memory, the kernel takes a worker, not the build


def _work(pipe: Connection, memory_bytes: int) -> NoReturn:
    """Say hello, then do tasks until the pipe is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _send(pipe, {"pid": os.getpid()})
        while True:
            message = json.loads(pipe.recv_bytes())
            task = Task.from_json(message["task"])
            answer: dict = {"done": task.key}
            try:
                run_task(task, Store(Path(message["store"])), watched=True)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            except Exception as error:
                answer = {"failed": to_json(error, task)}
            # What a task leaves behind must not become the next one's lack of memory.
            _send(pipe, answer | {"retire": (full := _data_bytes() > memory_bytes // 2)})
            if full:
                break
    os._exit(0)


def _send(pipe: Connection, message: dict) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def _data_bytes() -> int:
    """Private writable memory of this process: what RLIMIT_DATA limits."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, also if it hangs in compiled code."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went in between
        os._exit(1)
