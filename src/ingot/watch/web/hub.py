"""One reader per run for all pages: it looks at the run folders, and sends what is new to every page that listens."""

import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectSendStream

from ingot.watch.chapters import WatchHead, head
from ingot.watch.charts import chart_keys
from ingot.watch.live import LiveRun
from ingot.watch.web.as_json import encoded, feed_json, feeds_of, head_json

MOST_PAGES = 1000
_LOOK_SECONDS, _IDLE_SECONDS = 0.5, 5.0  # between two looks, with and without a page that listens
_READ_SECONDS = 0.1  # of reading a long log between two messages
_OPENING_SECONDS = 1.5  # for which reading a long log waits for the requests of a page that opens
_AFTER_ANSWER_SECONDS = 0.1  # and between two of them
_ALIVE_SECONDS = 15.0  # after which a line without content shows that the connection is there
_NOTHING: tuple[int, int, dict[str, int]] = (-1, -1, {})
_WAITING_MESSAGES = 16  # of a page; a slower one is disconnected, and asks for everything when it comes back


class Hub:
    """The runs, and the pages that listen. `pump` has to run as long as the server."""

    def __init__(self, runs: Sequence[LiveRun]):
        self.runs = tuple(runs)
        self._pages: set[MemoryObjectSendStream[bytes]] = set()
        self._sent = [_NOTHING for _ in self.runs]  # generation, version, rows by feed
        self._failures = ["" for _ in self.runs]  # why the last look at a run failed
        self._wake: anyio.Event | None = None
        self._is_ending = False
        self._answering, self._answered, self._opened = 0, -_AFTER_ANSWER_SECONDS, -_OPENING_SECONDS

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count an answer that is being made."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            self._answered = time.monotonic()

    def page_opens(self) -> None:
        """Have the reading of a long log wait for the requests of a page that opens: all threads of this process share
        one processor. Pages that are open ask again and again, and must not stop the reader."""
        self._opened = time.monotonic()

    @property
    def is_opening(self) -> bool:
        """True if a page was opened just now, and an answer is being made, or just was."""
        now = time.monotonic()
        is_asked = self._answering > 0 or now < self._answered + _AFTER_ANSWER_SECONDS
        return is_asked and now < self._opened + _OPENING_SECONDS

    @property
    def pages(self) -> int:
        """The number of pages that listen."""
        return len(self._pages)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever anything does."""
        return tuple(run.version for run in self.runs)

    async def pump(self) -> None:
        """Look at the runs again and again, and send what is new. A look that fails is reported, and the next one may
        succeed."""
        failure = ""
        while True:
            message, before = b"", failure
            try:
                message = await anyio.to_thread.run_sync(self.look, abandon_on_cancel=True)  # of a disk that hangs
                failure = ""
            except Exception as error:
                failure = _described(error)
                if failure != before:
                    traceback.print_exception(error, file=sys.stderr)
                    trouble = {"found": failure, "rule": "", "fix": "the figures below are of before"}
                    message = b"event: trouble\ndata: " + encoded(trouble) + b"\n\n"
            if message:
                self._send(message)
            if message and not failure and any(run.unread for run in self.runs):
                while self.is_opening:
                    await anyio.sleep(_AFTER_ANSWER_SECONDS / 4)
                continue
            self._wake = anyio.Event()
            with anyio.move_on_after(_LOOK_SECONDS if self._pages else _IDLE_SECONDS):
                await self._wake.wait()

    def look(self) -> bytes:
        """Look at all runs, at long logs until there is something else to do. Return a message of what is new since the
        last one; b"" if nothing is."""
        changed = []
        for number, run in enumerate(self.runs):
            try:
                until = time.monotonic() + _READ_SECONDS
                while run.refresh() and run.unread and not self.is_opening and time.monotonic() < until:
                    pass
                with run.lock:
                    own = self._news(number, run)
                    self._failures[number] = ""
            except Exception as error:  # the other runs go on, and the next look at this one may succeed
                own = self._failed(number, run, error)
            if own:
                changed.append(own)
        if not changed:
            return b""
        return b"data: " + encoded({"runs": changed, "charts": self.keys()}) + b"\n\n"

    def keys(self) -> list[str]:
        """Return the keys of the charts that have numbers."""
        with self.locked(range(len(self.runs))):
            return chart_keys(self.runs)

    @contextmanager
    def locked(self, numbers: Iterable[int]) -> Iterator[None]:
        """Hold the locks of runs. All threads take them in the order of the runs, so none waits for another's."""
        with ExitStack() as held:
            for number in sorted(set(numbers)):
                held.enter_context(self.runs[number].lock)
            yield

    def head(self, number: int) -> dict:
        """Return the state of a run as values for JSON; without figures if the last look at it failed."""
        run = self.runs[number]
        with run.lock:
            if not self._failures[number]:
                return head_json(head(run))
            note, name = self._failures[number], run.folder.root.name
            return head_json(
                WatchHead(
                    name=name, state=run.state, note=note, step=run.last_step, steps=run.total_steps,
                    last_event=run.last_event, figures=(),
                )
            )  # fmt: skip

    def _failed(self, number: int, run: LiveRun, error: Exception) -> dict | None:
        """Return the message of a look that failed; None if the last one failed in the same way."""
        before, self._failures[number] = self._failures[number], _described(error)
        self._sent[number] = _NOTHING  # when a look succeeds, pages ask for everything
        if self._failures[number] == before:
            return None
        traceback.print_exception(error, file=sys.stderr)
        with run.lock:
            run.version += 1
            return {"run": number, "version": run.version, "again": False, "head": self.head(number), "new": {}}

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
            "reading": run.unread > 0,
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
            yield b"retry: 2000\nevent: ready\ndata: " + encoded(self.version) + b"\n\n"
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


def _described(error: Exception) -> str:
    """Return an error in words that a page may show: the traceback is in the terminal."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return f"the page failed to read this run ({why}); the terminal of `ingot watch --web` shows where"
