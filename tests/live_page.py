"""`ingot watch RUN --web` in a process of its own, and a client of its page that is no browser."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any


class LivePage:
    """The page of a run. A context manager, whose end kills the process if it is still there.

    process: of the page. url: with the token."""

    def __init__(self, run: Path):
        command = [sys.executable, "-m", "ingot.cli.main", "watch", str(run), "--web", "--port", "0", "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]
        self._address, _, self._token = self.url.partition("/?token=")

    def __enter__(self) -> "LivePage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process of the page."""
        os.kill(self.process.pid, number)

    def get(self, path: str, token: str | None = None) -> Any:
        """Return the JSON of an answer. token: in place of that of the page. Raises HTTPError if it is refused."""
        with self._open(path, self._token if token is None else token) as answer:
            return json.load(answer)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the server-sent messages about the run as they come, until the server ends the stream."""
        with self._open("/api/events", self._token) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield from json.loads(line[len(b"data: ") :]).get("runs", ())

    def _open(self, path: str, token: str):
        asked = urllib.request.Request(self._address + path, headers={"Authorization": f"Bearer {token}"})
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60)
