"""The process of alerts: `python -m ingot.observe.alerts RUN` follows the event log of a run.

The launcher starts it with --supervised, and holds its standard input open: when that is closed, the run has ended, and
so does this process. Without the flag it follows the log until it is interrupted.
"""

import select
import signal
import sys
import time
from pathlib import Path

from ingot.errors import IngotError
from ingot.events import NewEvents
from ingot.observe.alerts.sink import UNREAD, AlertSink
from ingot.schema.run_folder import RunFolder

SUPERVISED = "--supervised"
END_SECONDS = 10.0  # that the last alerts may take
_LOOK_SECONDS = 0.5
_MOST_BYTES = 4 << 20  # of the log, read at a time


def follow(run: Path, *, supervised: bool) -> None:
    """Give the events of a run to its alerts, until the launcher is gone or this process is interrupted."""
    sink, log, over = AlertSink(run), NewEvents(RunFolder(run).events, without=UNREAD, most_bytes=_MOST_BYTES), False
    try:
        while True:
            before = log.position
            try:
                for event in log.read():
                    sink.event(event)
            except OSError:  # a lost mount is the launcher's matter
                pass
            if log.position > before:
                continue
            if over:
                break
            sink.idle()
            if supervised:
                over = bool(select.select([sys.stdin], [], [], _LOOK_SECONDS)[0])  # a word, or its end: no launcher
            else:
                time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        pass
    finally:
        sink.close(END_SECONDS, ended=supervised and over)


def main(arguments: list[str]) -> int:
    supervised = SUPERVISED in arguments
    folders = [one for one in arguments if one != SUPERVISED]
    if len(folders) != 1:
        print("usage: python -m ingot.observe.alerts [--supervised] RUN", file=sys.stderr)
        return 2
    if supervised:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # the launcher decides
    try:
        follow(Path(folders[0]), supervised=supervised)
    except IngotError as error:
        print(f"{error.code}  {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
