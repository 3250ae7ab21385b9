"""The processes that observe a run, started by its launcher: they read the run folder, and cost the ranks nothing.

A launcher that is killed closes their standard input, by which they learn that the run has ended.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

from ingot.schema.alerting import Alerts
from ingot.schema.run_folder import RunFolder

_ALERTS = "ingot.observe.alerts"  # by its name: the trainer imports nothing that observes it
_END_SECONDS = 15.0  # that the last alerts of a run may take
_KILLED_SECONDS = 1.0


@contextlib.contextmanager
def alerting(folder: RunFolder, alerts: Alerts, *, quiet: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Keep the process of alerts running, if the run file names a channel. quiet: it prints no alerts.

    If it cannot be started, or ends, the run goes on without it.
    """
    if not alerts.has_channel:
        yield
        return
    command = [sys.executable, "-P", "-m", _ALERTS, "--supervised", str(folder.root)]
    out = subprocess.DEVNULL if quiet else None
    try:  # Ctrl-C in a terminal is for the launcher: the last alerts come after it
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, start_new_session=True)
    except OSError as error:
        say(f"alerts    are not sent: their process cannot be started ({error.strerror})")
        yield
        return
    try:
        yield
    finally:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be inside of a mount that does not answer
                process.wait(_KILLED_SECONDS)
