"""alerts.jsonl, and the channels: each record is written once, and sent by every channel once, or given up.

A record that is written has a number. alerts-sent.json has the last number that each channel has sent, so that the next
process sends what this one could not. If the disk takes no more, the channels still get everything.
"""

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ingot.observe.alerts.channels import AlertChannel, AlertmanagerChannel, ChannelThread
from ingot.schema.alert_record import FIRED, AlertRecord, record_of
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic, write_json

_MOST_BYTES = 8 << 20  # of alerts.jsonl; its older half goes when it has more
_OLD_SECONDS = 3600.0  # a record that is older is news to nobody
NUMBER, SENT = "number", "sent"  # of a line; SENT: false if its record is for no channel


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of alerts.jsonl that are objects, in order."""
    found = []
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
                found += [value] if isinstance(value, dict) else []
    return found


class Outbox:
    """The records of a run, on disk and on their way. lines: what alerts.jsonl has. say: shows a line to the user of
    the launcher: a channel that fails says so once."""

    def __init__(self, folder: RunFolder, channels: Sequence[AlertChannel], lines: Sequence[dict[str, Any]], say):
        self._folder, self._say, self._lock = folder, say, threading.Lock()
        self._numbers = max((one[NUMBER] for one in lines if isinstance(one.get(NUMBER), int)), default=0)
        self._sent = self._read_sent()
        self._disk_fails = False
        self._threads = [ChannelThread(channel, self._note_sent, self._note_failed) for channel in channels]
        self._send_rest(lines)

    def add(self, record: AlertRecord, *, send: bool = True) -> None:
        """Write a record, and send it unless it is news to nobody."""
        self._numbers += 1
        self.write({NUMBER: self._numbers, **record.as_dict(), **({} if send else {SENT: False})})
        for thread in self._threads if send else ():
            thread.put(self._numbers, record)

    def send_again(self, records: Sequence[AlertRecord]) -> None:
        """Send open alerts again to channels that forget them."""
        for thread in self._threads:
            if isinstance(thread.channel, AlertmanagerChannel):
                for record in records:
                    thread.put(self._numbers, record)

    def write(self, values: dict[str, Any]) -> None:
        """Append a line to alerts.jsonl."""
        data = json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            with self._folder.alerts.open("a+b", buffering=0) as file:
                if _is_torn(file):  # by a process that was killed, or by a disk that was full
                    data = b"\n" + data
                if (written := file.write(data)) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{written} of {len(data)} bytes")
                size = os.fstat(file.fileno()).st_size
            if size > _MOST_BYTES:
                self._shorten()
            self._disk_fails = False
        except OSError as error:
            if not self._disk_fails:
                self._say(f"{self._folder.alerts} cannot be written ({error.strerror}); alerts are sent all the same")
            self._disk_fails = True

    def close(self, seconds: float) -> bool:
        """Wait until everything is sent or given up, at most `seconds`. Returns whether it is."""
        until = time.monotonic() + seconds
        done = [thread.finish(max(until - time.monotonic(), 0.0)) for thread in self._threads]
        return all(done)

    def _send_rest(self, lines: Sequence[dict[str, Any]]) -> None:
        """Give each channel the new records that an earlier process has written and not sent."""
        for thread in self._threads:
            last = self._sent.get(thread.channel.name, 0)
            for line in lines:
                with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                    if line.get(SENT) is False:
                        continue
                    if line[NUMBER] > last and line["time"] > time.time() - _OLD_SECONDS:
                        thread.put(line[NUMBER], record_of(line))

    def _shorten(self) -> None:
        data = self._folder.alerts.read_bytes()
        half = data.find(b"\n", len(data) // 2) + 1
        write_atomic(self._folder.alerts, data[half:])

    def _read_sent(self) -> dict[str, int]:
        try:
            found = json.loads(self._folder.alerts_sent.read_bytes())
            return {str(name): int(number) for name, number in found.items()}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return {}

    def _note_sent(self, name: str, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._sent[name] = max(number, self._sent.get(name, 0))
            write_json(self._folder.alerts_sent, self._sent)

    def _note_failed(self, name: str, reason: str) -> None:
        self._say(f"alerts.{name} could not send: {reason}; it is tried with the next alert, and only shown again then "
                  "if it has worked in between")  # fmt: skip


def _is_torn(file: IO[bytes]) -> bool:
    """Return whether the last line of a file has no end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    return size > 0 and file.read(1) != b"\n"


def said_on(out: int):
    """Return a function that writes a line to the file descriptor `out`."""

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(out, f"alerts    {text}\n".encode())

    return say


def is_news(record: AlertRecord) -> bool:
    """Return whether a record is young enough to be sent."""
    return record.state == FIRED and record.time > time.time() - _OLD_SECONDS
