"""The watch over the folder of a run, whose mount may vanish while the run trains. No torch.

If it is detached, files that are open go on while its path shows what is below: the launcher compares the identity of
the folder at each look at its job, and an attempt saves nothing into a folder without its run file. If it fails or is
read-only, the next access does; some errors may pass, and count if they stay. If it does not answer, as a network file
system whose server is gone, every process that touches it waits in the kernel, the launcher too: a thread touches the
folder, and another one, which touches nothing, ends the job and the launcher.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ingot.errors import IngotError, ResourceError
from ingot.schema.launch import Launch
from ingot.trainer.checkpoint.folder_lost import MAY_PASS, folder_lost, is_loss
from ingot.units import format_seconds

_EVERY_SECONDS = 5.0  # between two touches; shorter if the limit is
_TICK_SECONDS, _LATE_SECONDS = 0.1, 1.0
_KILL_SECONDS = 70.0  # more than a job has to end (local.py)
_LAST_WORDS_SECONDS = 1.0  # standard error may be a file in the folder
_STAYS_SECONDS, _AGAIN_SECONDS = 3.0, 0.2  # how long an error that may pass has to stay; between two looks meanwhile


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
        self._ends, self._asked, self._answered = threading.Event(), threading.Event(), threading.Event()
        self._failed: OSError | None = None  # of the last touch
        self._failing_since = math.inf  # with an error that may pass
        root.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)  # its inode keeps its number as long as this is open
        # Both for the whole job: while it trains, there may be no room for another thread.
        self._threads = [
            threading.Thread(target=self._touch_on_demand, name="ingot-touch", daemon=True),
            threading.Thread(target=self._watch, name="ingot-folder", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def kills(self, kill: Callable[[], None]) -> None:
        """Take in how the processes of the job are ended, from another thread, without touching the folder."""
        self._kill = kill

    def require(self, *, writable: bool = False, met: OSError | None = None) -> bool:
        """Raise ResourceError if the folder is lost. Returns False if its error may pass, and the next look decides.

        writable: also touch it now, and wait for some seconds for an error to pass. met: the error of another access.
        """
        while (error := self._look(writable)) is not None:
            self._failing_since = min(self._failing_since, time.monotonic())
            if error.errno not in MAY_PASS or time.monotonic() >= self._failing_since + _STAYS_SECONDS:
                raise self._lost(error, met) from error
            if not writable:
                return False
            time.sleep(_AGAIN_SECONDS)
        self._failing_since = math.inf
        if self._failed is not None:
            raise self._lost(self._failed, met)
        return True

    def __enter__(self) -> "FolderWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._asked.set()
        for thread in self._threads:
            thread.join(_LAST_WORDS_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):  # a touch that waits in the kernel needs it
            os.close(self._fd)

    def _lost(self, error: OSError, met: OSError | None) -> ResourceError:
        why = "nothing is there" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        return folder_lost(self._root, why if met is None else f"{why} (after {met})")

    def _look(self, writable: bool) -> OSError | None:
        """Return the error that the folder shows now, if it is a sign of its loss."""
        try:
            is_same = os.path.samestat(self._root.stat(), os.fstat(self._fd))
            if is_same and writable:
                self._touch()
        except OSError as error:
            return error if is_loss(self._root, error) else None
        if not is_same:
            raise folder_lost(self._root, "another folder is there")
        return None

    def _touch(self) -> None:
        """Write what a server has to answer. No room, or no times of folders, is no loss."""
        os.utime(self._fd)

    def _watch(self) -> None:
        """Have the folder touched again and again, by a thread that may not come back."""
        while not self._ends.wait(min(_EVERY_SECONDS, self._limit / 3)):
            self._answered.clear()
            self._asked.set()
            waited = 0.0
            while not self._answered.is_set() and not self._ends.is_set():
                began = time.monotonic()
                self._answered.wait(_TICK_SECONDS)
                took = time.monotonic() - began
                # Time in which this process did not run (a suspended machine) does not count.
                waited += took if took < _TICK_SECONDS + _LATE_SECONDS else _TICK_SECONDS
                if waited >= self._limit:
                    self._end(self._silent(waited))
                    return

    def _touch_on_demand(self) -> None:
        while self._asked.wait() and not self._ends.is_set():
            self._asked.clear()
            try:
                self._touch()
                self._failed = None
            except OSError as error:
                passing = error.errno in MAY_PASS  # the next one may succeed
                self._failed = error if is_loss(self._root, error) and not passing else None
            self._answered.set()

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
