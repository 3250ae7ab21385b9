"""The process that feeds a run's sinks (ingot.observe.feed), seen from the supervisor. It can cost a run nothing but
the time that its end is waited for."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ingot.errors import RunBusyError
from ingot.plugins.sink import SinkLimits, split_limits
from ingot.schema.run_folder import RunFolder
from ingot.trainer.launch.stopping import report

_FEED = "ingot.observe.feed"  # by its name: the trainer imports nothing that observes
_END = b"end\n"
_MORE_SECONDS = 3.0  # that the feed gets for its own end, after those of its sinks
_PAUSE_SECONDS = 5.0  # before a feed that ended is started again; doubled with every further one


@contextlib.contextmanager
def feeding_sinks(
    folder: RunFolder, sinks: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]
) -> Iterator[None]:
    """Feed the sinks of a run while the block runs; afterwards they get time to send the rest. The folder has its run
    file. sinks: the tables [sinks.NAME] of it. say: called with each line about a sink.

    A block that ends because the run is another launcher's, or by an interrupt, leaves its sinks no time.
    """
    if not sinks:
        yield
        return
    limits = [SinkLimits(**split_limits(table)[0]) for table in sinks.values()]
    feed = _SinkFeed(folder, max(one.close_seconds for one in limits) + _MORE_SECONDS, say)
    try:
        yield
    except (RunBusyError, KeyboardInterrupt):
        feed.close(wait=False)
        raise
    except BaseException:
        feed.close()
        raise
    feed.close()


class _SinkFeed:
    """The feed of one run. It is started by a thread that lives as long: the kernel ends it with that thread."""

    def __init__(self, folder: RunFolder, seconds: float, say: Callable[[str], None]):
        self._folder, self._seconds, self._say = folder, seconds, say
        self._ends = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ingot-sinks", daemon=True)
        self._thread.start()

    def close(self, wait: bool = True) -> None:
        """Let the sinks send the rest, and end the process; without `wait`, end it at once."""
        with self._lock:
            self._ends.set()
            process = self._process
        if process is None:
            return
        if wait and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write(_END)
                process.stdin.flush()
            self._thread.join(self._seconds)
        process.kill()
        self._thread.join(_MORE_SECONDS)  # it may be inside of a mount that does not answer

    def _run(self) -> None:
        pause = _PAUSE_SECONDS
        while self._start():
            assert self._process is not None and self._process.stdout is not None
            with self._process as process:
                assert process.stdout is not None
                for line in process.stdout:
                    report(self._say, line.decode(errors="replace").rstrip("\n"))
            if not self._ends.is_set():
                report(self._say, f"sinks     the process that feeds them ended; it is started again in {pause:g} s")
            self._ends.wait(pause)
            pause *= 2

    def _start(self) -> bool:
        """Start the process, unless the run has ended."""
        with self._lock:
            if self._ends.is_set():
                return False
            self._folder.logs.mkdir(exist_ok=True)
            with (self._folder.logs / "sinks.log").open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _FEED, str(self._folder.root.absolute())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C in a terminal is for the launcher, which lets the ranks save
                )
            return True
