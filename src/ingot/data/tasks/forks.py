"""The fork server: a process from which worker processes are forked. Code of its owner, of the server, of the workers.

The fork server has imported the modules of the tasks and has no threads, so a new worker starts in milliseconds, even
if it replaces one that died. The owner may have threads (torch, duckdb), and forking the owner would copy their locks.
Unlike the fork server of `multiprocessing`, this one never imports the caller's script again, reports how each worker
ended, never kills another process that got a worker's pid, and dies with all workers when the owner ends.

Messages are JSON. The owner sends {"fork": n, "import": [...]} with the worker's end of its pipe, and {"kill": n} over
the control socket; the fork server answers {"ended": n, "status": ...} (as Popen.returncode). Linux only.
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

from ingot.data.tasks.store import Store, run_task
from ingot.data.tasks.task import Task, error_to_json
from ingot.errors import ConfigError

OUT_OF_MEMORY = 77  # exit code of a worker whose task got a MemoryError
ANSWER_SECONDS = 10.0  # time to wait for the other side in the middle of a message
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ForkServer:
    """The owner's handle of a fork server: starts it, sends messages, and ends it. memory_bytes: limit per worker."""

    def __init__(self, memory_bytes: int):
        if sys.platform != "linux":
            raise ConfigError(
                "E-WORKERS-PLATFORM",
                f"worker processes are not supported on {sys.platform}",
                rule="the limits of workers, and ending them together with the driver, need the Linux kernel",
                fix="use --runner inline, which works in one process",
                platform=sys.platform,
            )
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _never_blocks(self.control)
        # The fork server gets this process's sys.path, however that was set, and does not import the running script.
        start = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from ingot.data.tasks.forks import serve\nserve({theirs.fileno()}, {os.getpid()}, {memory_bytes})"
        )
        # One process per core: threads of libraries would only compete for the cores.
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the owner, which then kills the server and workers as a group
            env={**dict.fromkeys(threads, "1"), "TOKENIZERS_PARALLELISM": "false", **os.environ},
        )
        theirs.close()
        self.gone, self._owner, self._forked = False, os.getpid(), 0

    def fork(self, modules: list[str]) -> tuple[int, Connection]:
        """Return (number, pipe) of a new worker. modules: names of modules that are imported before the fork."""
        self._forked += 1
        ours, theirs = socket.socketpair()
        _never_blocks(ours)
        with theirs:
            self._send({"fork": self._forked, "import": modules}, [theirs.fileno()])
        return self._forked, Connection(ours.detach())

    def kill(self, number: int) -> None:
        self._send({"kill": number})

    def ended(self) -> dict[int, int]:
        """Return worker number -> exit code, for the workers that ended since the last call."""
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
        """End the fork server and all workers. None of them remains as a zombie."""
        if os.getpid() != self._owner or self.control.fileno() < 0:
            return  # called in a fork of the owner at its exit, or stopped already
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)  # the fork server then kills and reaps its workers
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
        """Kill the fork server and all workers at once, unless that is done already."""
        if self.gone:
            return
        self.gone = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # before the wait: until then no other process gets its number
        self.process.wait()


def _never_blocks(ours: socket.socket) -> None:
    """Set time limits on a socket, so that a process that stops in the middle of a message does not block this one."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(ANSWER_SECONDS), 0))


def serve(control_fd: int, parent: int, memory_bytes: int) -> None:
    """Fork workers on request until the other end of the control socket is closed; then end all workers."""
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
                    with contextlib.suppress(Exception):  # the task that needs the module reports the error
                        importlib.import_module(name)
                pid = _fork(fds[0], memory_bytes, not_its=(control.fileno(), woken, wake))
                os.close(fds[0])
                children[pid] = message["fork"]
            else:
                for pid in [pid for pid, number in children.items() if number == message["kill"]]:
                    os.kill(pid, signal.SIGKILL)  # not reaped yet: no other process has its number
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
    gc.freeze()  # else the first garbage collection of each worker copies every page
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
    # Only private writable memory counts: not maps of big files, nor address space that libraries reserve and never
    # use (duckdb alone reserves a gigabyte, which RLIMIT_AS would count).
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")  # out of memory, the kernel kills a worker, not the build


def _work(pipe: Connection, memory_bytes: int) -> NoReturn:
    """Send this process's id, then do tasks until the pipe is closed."""
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
                answer = {"failed": error_to_json(error, task)}
            # A worker ends if it still holds much memory after a task, so that the next task has enough memory.
            _send(pipe, answer | {"retire": (full := _data_bytes() > memory_bytes // 2)})
            if full:
                break
    os._exit(0)


def _send(pipe: Connection, message: dict) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def _data_bytes() -> int:
    """Return the private writable memory of this process, which RLIMIT_DATA limits."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, even if this process hangs in compiled code."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)
