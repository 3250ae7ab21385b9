"""The process that uploads a run's checkpoints to its store while the run trains: one per run, or one per node if the
files are on disks of nodes.

Rank 0, or the first rank of the node, starts `python -m ingot.trainer.checkpoint.uploader RUN EPOCH`, which has no
torch, and names to it what was saved. It uploads the one that was named last; those that were saved in the meantime are
left out. Saves of the weights alone wait until no checkpoint does, and are left out if one was named after them.
A store that does not answer is asked again, after pauses with jitter. The process ends at once when its rank is gone:
an upload that was killed is repeated by the next start of the run.
"""

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from ingot.errors import IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import FULL, KINDS, WEIGHTS, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.stores.store import StoreUnreachable
from ingot.trainer.checkpoint.meter import Meter
from ingot.trainer.checkpoint.remote import NotYetStored, RemoteTier

UPLOAD_SECONDS = 600.0  # that the end of a run waits for its last uploads
_PAUSE_SECONDS = 1.0  # before the second attempt; doubled with every further one
_LONGEST_PAUSE_SECONDS = 60.0
_QUIET_SECONDS = 8.0  # a first node that waits for the uploads of others reports that from this pause on
_PROGRESS_SECONDS = 0.5  # between two answers about an upload in progress
_END = {"end": True}
_LEFT = "left"  # the bytes that an upload still has to send: an answer that is no event


class Uploader:
    """The uploader process of this run or node, seen from the rank that starts it. It is started by the first `push`.

    epoch: the number of this attempt (fence.py). left: the bytes that the last upload still has to send, as of a second
    ago; None before the first one has begun.

    A process that has ended is replaced by the next `push`.
    """

    def __init__(self, folder: RunFolder, epoch: int):
        self._folder, self._epoch = folder, epoch
        self._process: subprocess.Popen[bytes] | None = None
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.left: int | None = None

    def push(self, step: int, kind: SaveKind = FULL) -> None:
        """Ask for the upload of the saved checkpoint of `step`, or of its weights alone. Does not wait."""
        self._tell({"push": step, "kind": kind})

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the last call, each with its `kind` (schema/events.py)."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._reports.get_nowait()

    def end(self) -> None:
        """Let the process end when the newest checkpoint is in the store, or was given up. Does not wait."""
        if self._process is not None:
            self._tell(_END)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process, at most `seconds`. Returns whether it has ended; True if there is none."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join()
        return True

    def close(self) -> None:
        """End the process, even in the middle of an upload."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None

    def _tell(self, request: dict[str, Any]) -> None:
        if self._process is None or self._process.poll() is not None:
            if request == _END:
                return
            self.close()
            module, root = "ingot.trainer.checkpoint.uploader", str(self._folder.root.absolute())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, root, str(self._epoch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in a terminal is for the launcher, which lets the ranks save
            )
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has just ended: the next request starts another one
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            answer = json.loads(line)
            if _LEFT in answer:
                self.left = answer[_LEFT]
            else:
                self._reports.put(answer)


# -- the process --


_Done = Mapping[SaveKind, int]  # kind -> the number of the last request whose upload was tried


class _Request(NamedTuple):
    """A request to upload a save. number: 1, 2, ... in the order of arrival; after a roll-back, steps come again."""

    number: int
    kind: SaveKind
    step: int


class _Requests:
    """The last request of each kind from rank 0, set by a thread that reads standard input."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last: dict[SaveKind, _Request] = {kind: _Request(0, kind, 0) for kind in KINDS}
        self._named: list[_Request] = []  # the checkpoints since the last `overtaken`
        self._ends = False

    def add(self, step: int, kind: SaveKind) -> None:
        """Put a request in place of the one before of its kind."""
        with self._changed:
            number = 1 + max(one.number for one in self._last.values())
            self._last[kind] = _Request(number, kind, step)
            self._named += [self._last[kind]] if kind == FULL else []
            self._changed.notify()

    def overtaken(self, by: _Request) -> list[int]:
        """Return the steps of the checkpoints that were named before `by`, a checkpoint, and after the one before."""
        with self._changed:
            steps = [one.step for one in self._named if one.number < by.number]
            self._named = [one for one in self._named if one.number > by.number]
        return steps

    def read(self, lines: IO[bytes]) -> None:
        for line in lines:
            request = json.loads(line)
            if request == _END:
                self.end()
            else:
                self.add(request["push"], request["kind"])
        os._exit(0)

    def end(self) -> None:
        """Let `next` return None when all requests are done."""
        with self._changed:
            self._ends = True
            self._changed.notify()

    def next(self, done: _Done) -> _Request | None:
        """Wait for a request after those in `done`, of either kind, and return it; None if no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._first(done) is not None or self._ends)
            return self._first(done)

    def displaces(self, kind: SaveKind, done: _Done, seconds: float) -> bool:
        """Wait for a save that takes the place of another attempt with one of `kind`, at most `seconds`.

        Returns whether there is one. Weights alone never take the place of a checkpoint.
        """

        def is_displaced() -> bool:
            found = self._first(done)
            return found is not None and (found.kind == FULL or kind == WEIGHTS)

        with self._changed:
            return self._changed.wait_for(is_displaced, seconds)

    def _first(self, done: _Done) -> _Request | None:
        """Return what is uploaded next. Checkpoints go first, and one is as good as weights that were saved before."""
        full, weights = self._last[FULL], self._last[WEIGHTS]
        if full.number > done[FULL]:
            return full
        return weights if weights.number > max(done.values()) else None


def upload_all(
    tiers: Mapping[SaveKind, RemoteTier],
    requests: _Requests,
    report: Callable[[dict[str, Any]], None],
    is_logged: Callable[[SaveKind, int], bool],
    overtaken: Iterable[int] = (),
    stored: Collection[int] = (),
) -> None:
    """Upload the last requested checkpoint, else the last weights, again and again, until no more will come.

    is_logged: whether the event log shows that the store has the save of that kind and step. overtaken: the steps of
    checkpoints that earlier processes did not upload. stored: those that they did: a start asks for the one that it
    continues from once more, which is not left out if a newer one overtakes this request.
    """
    done: dict[SaveKind, int] = {FULL: 0, WEIGHTS: 0}
    left_out = [*overtaken]  # the steps of checkpoints that newer ones overtook, not reported so far
    while (found := requests.next(done)) is not None:
        done[found.kind], pause = found.number, _PAUSE_SECONDS
        if found.kind == FULL:
            # After a roll-back, later steps are void.
            older = (*left_out, *(step for step in requests.overtaken(found) if step not in stored))
            left_out = [step for step in older if step < found.step]
        while not _upload(tiers[found.kind], found.step, pause, report, is_logged, left_out):
            if requests.displaces(found.kind, done, random.uniform(pause / 2, pause)):
                left_out += [found.step] if found.kind == FULL else []
                break
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _upload(
    tier: RemoteTier,
    step: int,
    pause: float,
    report: Callable[[dict[str, Any]], None],
    is_logged: Callable[[SaveKind, int], bool],
    left_out: list[int],
) -> bool:
    """Upload a checkpoint, or weights alone, and report it. Returns False if another attempt may succeed.

    left_out: the steps of older checkpoints that are not in the store; emptied when a checkpoint is reported.

    What the store has already is reported if the log does not show it: its upload ended, but the answer of the store
    was lost, or the run was killed before it logged that.
    """
    began = time.monotonic()
    about = {"step": step, "what": tier.kind, "store": tier.url}
    try:
        sent = tier.push(step)
        if tier.commits and (sent or not is_logged(tier.kind, step)):
            stored = {"kind": events.CHECKPOINT_STORED, "bytes": sent, "seconds": time.monotonic() - began}
            if tier.kind == FULL and left_out:
                stored |= {"left_out": older} if (older := _absent(tier, left_out)) else {}
                left_out.clear()
            report(about | stored)
    except Exception as error:
        if isinstance(error, NotYetStored) and pause < _QUIET_SECONDS:
            return False  # other nodes are uploading
        again = isinstance(error, StoreUnreachable)
        code, reason, fix = "", repr(error), ""
        if isinstance(error, IngotError):
            code, reason, fix = error.code, error.found, error.fix
        failed = {"code": code, "reason": reason, "fix": fix, "retry_seconds": pause if again else None}
        report(about | {"kind": events.CHECKPOINT_NOT_STORED} | failed)
        return not again
    if not tier.commits:
        return True
    try:
        tier.prune()
    except IngotError as error:  # the next upload tries again
        print(f"{tier.url}: old checkpoints were not removed: {error.found}", file=sys.stderr)
    return True


def _absent(tier: RemoteTier, steps: Iterable[int]) -> list[int]:
    """Return those of `steps` that the store does not have, ascending: a command, or an upload whose event was lost in
    a kill, may have sent one."""
    older = sorted({*steps})
    with contextlib.suppress(Exception):  # the checkpoint is stored, whatever a listing raises
        return sorted({*older} - {*tier.steps()})
    return older


class Progress(Meter):
    """Reports to rank 0 how much an upload still has to send. answer: called with {"left": bytes}."""

    def __init__(self, answer: Callable[[dict[str, Any]], None]):
        self._answer, self._lock = answer, threading.Lock()
        self._left, self._next = 0, 0.0

    def begin(self, what: str, total: int) -> None:
        self._count(total - self._left)

    def add(self, size: int) -> None:
        self._count(-size)

    def _count(self, change: int) -> None:
        with self._lock:
            self._left += change
            now = time.monotonic()
            if now >= self._next or self._left <= 0:
                self._next = now + _PROGRESS_SECONDS
                self._answer({_LEFT: self._left})


def left_out_text(event: Mapping[str, Any]) -> str:
    """Return the end of the line `stored`: how many older checkpoints newer ones overtook; "" if none."""
    older = event.get("left_out", [])
    last = f" to {older[-1]}" if len(older) > 1 else ""
    return f"  {len(older)} older left out (step {older[0]}{last})" if older else ""


def is_stored_by_log(folder: RunFolder, url: str, kind: SaveKind, step: int) -> bool:
    """Return whether the event log of the run shows that the store `url` has the save of `kind` and `step`."""
    logged = read_events(folder.events, events.CHECKPOINT_STORED)
    return any((one.get("store"), one.get("what"), one.get("step")) == (url, kind, step) for one in logged)


def overtaken_by_log(folder: RunFolder, url: str, store: str) -> list[int]:
    """Return the steps of the checkpoints that were to go to a store, and that are later than the last one that the
    event log of the run shows to be stored: its event names the older ones that the store lacked then. url: the store
    in the run file; store: in events. Events without a step are left out."""
    waiting: set[int] = set()
    kinds = (events.CHECKPOINT, events.CHECKPOINT_STORED, events.RUN_STARTED, events.ROLLED_BACK)
    for event in read_events(folder.events, *kinds):
        match event:
            case {"kind": events.CHECKPOINT, "step": int(step)} if event.get("store") == url:
                waiting.add(step)
            case {"kind": events.CHECKPOINT_STORED, "step": int(last), "what": "full"} if event.get("store") == store:
                waiting = {step for step in waiting if step > last}
            case {"kind": events.RUN_STARTED, "from_step": int(to)} | {"kind": events.ROLLED_BACK, "to_step": int(to)}:
                waiting = {step for step in waiting if step <= to}
    return sorted(waiting)


def stored_by_log(folder: RunFolder, store: str) -> set[int]:
    """Return the steps of the checkpoints that went to a store, and were not saved again since, by the event log."""
    found: set[int] = set()
    for event in read_events(folder.events, events.CHECKPOINT, events.CHECKPOINT_STORED):
        match event:
            case {"kind": events.CHECKPOINT, "step": step}:
                found.discard(step)
            case {"kind": events.CHECKPOINT_STORED, "step": step, "what": "full"} if event.get("store") == store:
                found.add(step)
    return found


def main(root: str, epoch: str) -> None:
    """Answer the requests on standard input until it is closed or ends."""
    from ingot.theory.rules import recorded_run
    from ingot.trainer.checkpoint.remote import open_tier

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may signal all processes of a job: rank 0 decides
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write between the answers
    requests = _Requests()
    threading.Thread(target=requests.read, args=(sys.stdin.buffer,), daemon=True).start()
    folder, writing = RunFolder(Path(root)), threading.Lock()

    def report(event: dict[str, Any]) -> None:
        with writing:  # the threads that send report what is left
            answers.write(json.dumps(event).encode() + b"\n")
            answers.flush()

    tiers: dict[SaveKind, RemoteTier] = {}
    checkpoint = recorded_run(folder.config).checkpoint
    for kind in KINDS:
        tier = open_tier(folder.of(kind), checkpoint, int(epoch), Progress(report))
        assert tier is not None
        tiers[kind] = tier
    overtaken = overtaken_by_log(folder, checkpoint.remote.url, tiers[FULL].url)
    stored = stored_by_log(folder, tiers[FULL].url)
    upload_all(tiers, requests, report, partial(is_stored_by_log, folder, tiers[FULL].url), overtaken, stored)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # the thread that reads has the lock of standard input, without which the interpreter does not end
