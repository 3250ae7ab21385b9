"""The watch over the folder of a run, whose mount may vanish while the run trains. No torch.

If it is detached, files that are open go on while its path shows what is below: the launcher compares the identity of
the folder at each look at its job, and an attempt saves nothing into a folder without its run file. If it fails or is
read-only, the next access does. If it does not answer, as a network file system whose server is gone, every process
that touches it waits in the kernel, the launcher too: a thread touches the folder, and another one, which touches
nothing, ends the job and the launcher.
"""

import contextlib
import errno
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ingot.errors import IngotError, ResourceError
from ingot.schema.launch import Launch
from ingot.trainer.checkpoint.folder_lost import folder_lost, is_loss
from ingot.units import format_seconds

_EVERY_SECONDS = 5.0  # between two touches; shorter if the limit is
_TICK_SECONDS, _LATE_SECONDS = 0.1, 1.0
_KILL_SECONDS = 70.0  # more than a job has to end (local.py)
_LAST_WORDS_SECONDS = 1.0  # standard error may be a file in the folder
# A touch is a write that a server has to answer. Some file systems have no times of folders, which is no loss.
_NO_TIMES = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class FolderWatch:
    """The watch over the run folder `root`, which is made if it is not there, to the end of a with block.

    limit: launch.watchdog_other_seconds; without a watchdog, a folder that does not answer is waited for. end: ends the
    process, given the error; it does not return.
    """

    def __init__(self, root: Path, launch: Launch, *, end: Callable[[IngotError], None] | None = None):
        self._root = root
        self._limit = launch.watchdog_other_seconds if launch.watchdog_seconds else math.inf
        self._end = end or self._end_process
        self._kill: Callable[[], None] = lambda: None
        self._ends = threading.Event()
        self._failed: OSError | None = None  # of the last touch
        root.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)  # its inode keeps its number as long as this is open
        self._thread = threading.Thread(target=self._watch, name="ingot-folder", daemon=True)
        self._thread.start()

    def kills(self, kill: Callable[[], None]) -> None:
        """Take in how the processes of the job are ended, from another thread, without touching the folder."""
        self._kill = kill

    def require(self, *, writable: bool = False) -> None:
        """Raise ResourceError if the folder is lost. writable: also touch it now. May wait for the folder."""
        try:
            if not os.path.samestat(self._root.stat(), os.fstat(self._fd)):
                raise folder_lost(self._root, "another folder is there")
            if writable:
                self._touch()
        except OSError as error:
            raise self._lost(error) from error
        if self._failed is not None:
            raise self._lost(self._failed)

    def __enter__(self) -> "FolderWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(_LAST_WORDS_SECONDS)

    def _lost(self, error: OSError) -> ResourceError:
        missing = isinstance(error, FileNotFoundError)
        return folder_lost(self._root, "nothing is there" if missing else error.strerror or str(error))

    def _touch(self) -> None:
        try:
            os.utime(self._fd)
        except OSError as error:
            if error.errno not in _NO_TIMES:
                raise

    def _watch(self) -> None:
        """Touch the folder again and again, each time in a thread of its own, which may not come back."""
        try:
            while not self._ends.wait(min(_EVERY_SECONDS, self._limit / 3)):
                touches = threading.Thread(target=self._touch_once, name="ingot-touch", daemon=True)
                touches.start()
                waited = 0.0
                while touches.is_alive() and not self._ends.is_set():
                    began = time.monotonic()
                    touches.join(_TICK_SECONDS)
                    took = time.monotonic() - began
                    # Time in which this process did not run (a suspended machine) does not count.
                    waited += took if took < _TICK_SECONDS + _LATE_SECONDS else _TICK_SECONDS
                    if waited >= self._limit:
                        self._end(self._silent(waited))
                        return
        finally:
            os.close(self._fd)

    def _touch_once(self) -> None:
        try:
            self._touch()
            self._failed = None
        except OSError as error:
            passing = error.errno in (errno.EIO, errno.ETIMEDOUT)  # the next one may succeed
            self._failed = error if is_loss(self._root, error) and not passing else None

    def _silent(self, seconds: float) -> ResourceError:
        return ResourceError(
            "E-RUN-FOLDER-SILENT",
            f"the run folder {self._root} has not answered for {format_seconds(seconds)}",
            rule="a process that touches a folder that does not answer waits in the kernel, so the ranks and this "
            "launcher are ended after launch.watchdog_other_seconds",
            fix="repair its file system, or mount it again, then run the same command: it continues from the last "
            "saved step",
            run=str(self._root),
            seconds=round(seconds, 3),
        )

    def _end_process(self, error: IngotError) -> None:
        """End the job and this process, whose other threads may wait for the folder for ever."""
        head, _, rest = str(error).partition("\n")
        text = f"{error.code}  {head}\n{rest}\n  more: ingot explain {error.code}\n"
        _try(self._kill, _KILL_SECONDS)
        _try(lambda: print(text, end="", file=sys.stderr, flush=True), _LAST_WORDS_SECONDS)
        os._exit(error.exit_code)


def _try(act: Callable[[], None], seconds: float) -> None:
    """Call `act` and wait for its end, at most so long. Its errors are lost: nothing could follow from them."""

    def call() -> None:
        with contextlib.suppress(Exception):
            act()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
