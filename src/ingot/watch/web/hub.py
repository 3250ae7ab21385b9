"""One reader per run for all pages: it looks at the run folders, and sends what is new to every page that listens."""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectSendStream

from ingot.watch.chapters import head
from ingot.watch.charts import chart_keys
from ingot.watch.live import LiveRun
from ingot.watch.web.as_json import encoded, feed_json, feeds_of, head_json

MOST_PAGES = 1000
_LOOK_SECONDS, _IDLE_SECONDS = 0.5, 5.0  # between two looks, with and without a page that listens
_ALIVE_SECONDS = 15.0  # after which a line without content shows that the connection is there
_WAITING_MESSAGES = 16  # of a page; a slower one is disconnected, and asks for everything when it comes back


class Hub:
    """The runs, and the pages that listen. `pump` has to run as long as the server."""

    def __init__(self, runs: Sequence[LiveRun]):
        self.runs = tuple(runs)
        self._pages: set[MemoryObjectSendStream[bytes]] = set()
        self._sent = [(-1, -1, {}) for _ in self.runs]  # generation, version, rows by feed
        self._wake: anyio.Event | None = None
        self._is_ending = False

    @property
    def pages(self) -> int:
        """The number of pages that listen."""
        return len(self._pages)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever anything does."""
        return tuple(run.version for run in self.runs)

    async def pump(self) -> None:
        """Look at the runs again and again, and send what is new."""
        while True:
            message = await anyio.to_thread.run_sync(self.look)
            if message:
                self._send(message)
            if any(run.unread for run in self.runs):
                continue
            self._wake = anyio.Event()
            with anyio.move_on_after(_LOOK_SECONDS if self._pages else _IDLE_SECONDS):
                await self._wake.wait()

    def look(self) -> bytes:
        """Look at all runs once. Return a message of what is new since the last one; b"" if nothing is."""
        changed = []
        for number, run in enumerate(self.runs):
            run.refresh()
            with run.lock:
                if own := self._news(number, run):
                    changed.append(own)
        if not changed:
            return b""
        return b"data: " + encoded({"runs": changed, "charts": self.keys()}) + b"\n\n"

    def keys(self) -> list[str]:
        """Return the keys of the charts that have numbers."""
        for run in self.runs:
            run.lock.acquire()
        try:
            return chart_keys(self.runs)
        finally:
            for run in self.runs:
                run.lock.release()

    def _news(self, number: int, run: LiveRun) -> dict | None:
        generation, version, counts = self._sent[number]
        if run.version == version:
            return None
        feeds = feeds_of(run)
        new = {}
        if run.generation == generation:
            new = {name: feed_json(series, counts[name]) for name, series in feeds.items()}
        whole = run.generation == generation and None not in new.values()
        self._sent[number] = run.generation, run.version, {name: len(series) for name, series in feeds.items()}
        return {
            "run": number,
            "version": run.version,
            "again": not whole,  # the page asks for its charts again
            "head": head_json(head(run)),
            "new": {name: rows for name, rows in new.items() if rows and rows["step"]} if whole else {},
        }

    def _send(self, message: bytes) -> None:
        for page in list(self._pages):
            try:
                page.send_nowait(message)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                self._pages.discard(page)
                page.close()

    def end(self) -> None:
        """End the events of every page, for a server that stops."""
        self._is_ending = True
        for page in list(self._pages):
            page.close()

    async def listen(self) -> AsyncIterator[bytes]:
        """Yield server-sent events for one page until it is too slow, or the server ends."""
        if self._is_ending:
            return
        sending, receiving = anyio.create_memory_object_stream[bytes](_WAITING_MESSAGES)
        self._pages.add(sending)
        if self._wake is not None:
            self._wake.set()
        try:
            yield b"retry: 2000\n\n"
            while True:
                message = b": alive\n\n"
                with anyio.move_on_after(_ALIVE_SECONDS):
                    message = await receiving.receive()
                yield message
        except anyio.EndOfStream:
            return
        finally:
            self._pages.discard(sending)
            with suppress(anyio.ClosedResourceError):
                sending.close()
            receiving.close()
