"""A node that follows the leader of its run: it starts, watches and ends the ranks of this machine as the leader asks.

It decides nothing but this: without a sign of life of the leader it ends its ranks, because the leader, or the next
one, starts them anew. No torch.
"""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.errors import EXIT_PREEMPTED, ConfigError, RunBusyError
from ingot.machine.health.report import node_name
from ingot.machine.interfaces import interface_of
from ingot.schema.launch import Launch
from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.checkpoint.keeper import end_keeper
from ingot.trainer.checkpoint.message import read_message
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.interrupts import PendingSignals
from ingot.trainer.launch.checking import NodeProbe
from ingot.trainer.launch.evidence import question
from ingot.trainer.launch.folder_watch import FolderWatch
from ingot.trainer.launch.handover import STARTED
from ingot.trainer.launch.health import HealthWatch, finding_values, require_sound
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.link import LeaderAddress, Link, dial, signs_of_life
from ingot.trainer.launch.node_messages import answers_values, hang_values
from ingot.trainer.launch.nodes import LeaderStepsDown
from ingot.trainer.launch.outcome import JobResult
from ingot.trainer.launch.repeated import repeated
from ingot.trainer.launch.watchdog import Hang
from ingot.trainer.mesh.start import NodeShare
from ingot.trainer.resilience.lock import is_holder

_LOOK_SECONDS = 0.2
_DIAL_SECONDS = 0.5
_STEPPED_DOWN_SECONDS = 10.0  # a call to a leader that is not reached takes five, on which a look at the lock follows


class LeaderGone(Exception):
    """The leader of the run gives no sign of life, or has ended without a word. joined: this node had joined it."""

    def __init__(self, joined: bool):
        super().__init__()
        self.joined = joined


def follow(
    folder: RunFolder,
    launch: Launch,
    facts: Mapping[str, str],
    job_of: Callable[[Mapping[str, Any]], Job],
    *,
    signals: PendingSignals,
    say: Callable[[str], None],
    health: HealthWatch | None = None,
) -> JobResult:
    """Join the leader of the run in `folder`, and do as it asks until it ends the job.

    facts: of this node (node_messages.own_facts). job_of: returns the job of this node's ranks for the leader's terms.
    signals: catches the stop signals to this process from here on. health: of this machine. Returns the result of the
    job; that of a stopped one if this node got a stop signal while nobody led. Raises LeaderGone if there is no leader
    to be reached, the IngotError with which the leader ended the job, ConfigError if it refuses this node,
    ResourceError if this node has lost the run folder.
    """
    link = _joined(folder, facts)
    signals.catch()
    received = signals.received
    running: JobHere | None = None
    with FolderWatch(folder.root, launch) as watch, signs_of_life(lambda: [link], launch.node_seconds):
        try:
            terms = _accepted(link, launch, received, say)
            if health:
                health.carries(interface_of(link.own_host))
            running = JobHere(folder, job_of(terms), launch, health=health)
            watch.kills(running.kill)
            running.prepare(f"node-{node_name()}.log")
            result = _Following(link, running, folder, watch, launch, received, say).until_the_end()
        except LeaderGone:
            if not received:
                raise
            return _stopped(folder)
        finally:
            if running is not None:
                running.close(keep_snapshots=True)  # the next leader may need those of this node
            link.close("this node leaves")
    facts = {name: result[name] for name in ("exit_code", "step", "saved_step", "restarts", "seconds")}
    return JobResult(**facts, run=folder.root)


def _stopped(folder: RunFolder) -> JobResult:
    """Return the result of a job that stopped on request, of a node without a leader that could report it."""
    step = resume_step(folder)
    return JobResult(exit_code=EXIT_PREEMPTED, step=step, saved_step=step, restarts=0, seconds=0.0, run=folder.root)


def lead_or_follow(
    lead: Callable[[PendingSignals], JobResult],
    follow: Callable[[PendingSignals], JobResult],
    folder: RunFolder,
    launch: Launch,
    signals: PendingSignals,
) -> JobResult:
    """Train as the leader of the run, or as a node of another one, whichever is possible, until the run ends.

    A stop signal between two leads makes this node lead at once, to stop the run; if another one leads, this node ends
    alone.

    Raises the error of the run, NodeUnhealthy if this machine was drained from it, and RunBusyError if something else
    than a leader of this run has held the folder, or the lease, for launch.node_wait_seconds.
    """
    require_sound(folder, launch)
    alone_since, seen = time.monotonic(), 0
    try:
        while True:
            began = time.monotonic()
            try:
                with _working(folder.lock, launch):
                    return lead(signals)
            except RunBusyError as error:
                busy = error
                if isinstance(error, LeaderStepsDown):
                    _wait_for_leader(folder, signals)
                elif signals.received:
                    return _stopped(folder)
            if time.monotonic() > began + launch.node_seconds:  # it led
                alone_since = time.monotonic()
            if (at_work := _last_work(folder.lock)) != seen:  # the holder of the lock prepares the run
                alone_since, seen = time.monotonic(), at_work
            if time.monotonic() > alone_since + launch.node_wait_seconds:
                raise busy
            if folder.leader.exists() and not signals.received:
                try:
                    return follow(signals)
                except LeaderGone as gone:
                    if gone.joined:
                        alone_since = time.monotonic()
            time.sleep(_DIAL_SECONDS)
    finally:
        end_keeper(os.getpid(), folder.root)


def _wait_for_leader(folder: RunFolder, signals: PendingSignals) -> None:
    """Leave the others the time in which each of them tries to lead: they may still call the leader that was. A stop
    signal ends the wait."""
    ends = time.monotonic() + _STEPPED_DOWN_SECONDS
    while not folder.leader.exists() and not signals.received and time.monotonic() < ends:
        time.sleep(_LOOK_SECONDS)


def _working(lock: Path, launch: Launch) -> contextlib.AbstractContextManager[None]:
    """Show by the time of the lock that its holder works, from a thread: to prepare a run may take long, and no other
    node can join before. Without the lock it shows nothing."""

    def work() -> None:
        if is_holder(lock):
            with contextlib.suppress(OSError):
                os.utime(lock)

    return repeated(work, min(launch.node_wait_seconds, launch.node_seconds) / 3, "ingot-working")


def _last_work(lock: Path) -> int:
    with contextlib.suppress(OSError):
        return lock.stat().st_mtime_ns
    return 0


def _joined(folder: RunFolder, facts: Mapping[str, str]) -> Link:
    address = LeaderAddress.read(folder.leader)
    link = dial(address) if address else None
    if link is None:
        raise LeaderGone(joined=False)
    link.send(hello={"host": node_name(), "pid": os.getpid(), "started": STARTED, "facts": dict(facts)})
    return link


def _accepted(
    link: Link, launch: Launch, received: list[signal.Signals], say: Callable[[str], None]
) -> Mapping[str, Any]:
    began = time.monotonic()
    while time.monotonic() < began + launch.node_seconds and not received:
        for message in link.read():
            if "accepted" in message:
                say("node      joined the run; the leader decides, and shows what happens")
                return message["accepted"]
            if "refused" in message:
                raise ConfigError(
                    "E-NODE-DIFFERS",
                    f"the leader of the run refused this node: {message['refused']}",
                    rule="all nodes of a run have the same versions, and give the same command",
                    fix="start this node with the software and the run file of the leader",
                    reason=message["refused"],
                )
        if link.closed:
            break
        time.sleep(0.02)
    raise LeaderGone(joined=False)


class _Following:
    """The work of a node that has joined."""

    def __init__(
        self,
        link: Link,
        running: JobHere,
        folder: RunFolder,
        watch: FolderWatch,
        launch: Launch,
        received: list[signal.Signals],
        say: Callable[[str], None],
    ):
        self._link, self._running, self._folder, self._launch = link, running, folder, launch
        self._watch, self._received, self._say = watch, received, say
        self._attempt: int | None = None  # the one that runs
        self._ready = False  # as the leader knows
        self._reported: set[int] = set()
        self._sent = 0  # of the signals received
        self._hang: Hang | None = None
        self._probe = NodeProbe(folder, launch)
        self._result: Mapping[str, Any] | None = None

    def until_the_end(self) -> Mapping[str, Any]:
        with contextlib.closing(self._probe):
            return self._follow()

    def _follow(self) -> Mapping[str, Any]:
        while self._result is None:
            self._watch.require()
            for message in self._link.read():
                self._take(message)
            if self._result is not None:
                break
            if self._link.closed or self._link.silent() > self._launch.node_seconds:
                why = self._link.closed or f"it gives no sign of life for {self._link.silent():.0f} s"
                self._say(f"node      the leader is gone ({why}); the ranks of this node are ended")
                raise LeaderGone(joined=True)
            for number in self._received[self._sent :]:
                self._link.send(signal=number.name)
                self._sent += 1
            if self._running.health:
                for finding in self._running.health.news():
                    self._link.send(health=finding_values(finding))
            if (measured := self._probe.answer()) is not None:
                self._link.send(**measured)
            if self._attempt is not None:
                self._look()
            elif not self._ready and self._running.prepared():
                self._ready = True
                self._link.send(ready=True)
            self._wait()
        return self._result

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            if not self._link.closed:
                selector.register(self._link, selectors.EVENT_READ)
            if self._attempt is not None:
                selector.register(self._running.reports, selectors.EVENT_READ)
            if self._probe.fileno() >= 0:
                selector.register(self._probe, selectors.EVENT_READ)
            selector.select(_LOOK_SECONDS)

    def _take(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._probe.close()
            self._start(message["start"])
        elif "check" in message:
            self._probe.take(message["check"], message["request"])
        elif "end" in message:
            kept = self._running.end_attempt(message["failed"], keep=message["keep"])
            if self._attempt is not None:
                self._report_ends()
                self._attempt = None
            self._link.send(ended=message["end"], kept=list(kept))
        elif "ask" in message:
            place = message["place"] and self._folder.incidents / str(message["place"])
            if place:
                place.mkdir(parents=True, exist_ok=True)
            beats = self._running.beats()
            self._link.send(answers=message["ask"], **answers_values(beats, question(beats, place or None)))
        elif "bye" in message:
            self._part(message["bye"])

    def _start(self, order: dict[str, Any]) -> None:
        own = self._link.own_host if not self._link.own_host.startswith("127.") else order["host"]
        share = NodeShare(
            first=order["first"],
            world=order["world"],
            host=order["host"],
            port=order["port"],
            interface=interface_of(own),
        )
        self._attempt, self._hang = order["attempt"], None
        self._reported.clear()
        overrides = order["overrides"]
        self._running.start(order["attempt"], name=order["log"], share=share, overrides=overrides)
        first = order["first"]
        self._say(f"node      ranks {first} to {first + self._running.job.processes - 1} of {order['world']}")

    def _look(self) -> None:
        """Report ranks that ended, and whether those that are left hang."""
        running = self._running.running()
        self._report_ends()
        if not running:
            self._link.send(done=self._attempt, facts=self._running.facts())
            self._attempt = None
            return
        hang = self._running.overdue()
        if (hang and hang.suspects) != (self._hang and self._hang.suspects) or (hang is None) != (self._hang is None):
            self._link.send(watch=hang_values(hang))
        self._hang = hang

    def _report_ends(self) -> None:
        codes = self._running.exit_codes()
        endings = self._running.endings() if codes.keys() - self._reported else {}
        for rank, code in codes.items():
            if rank not in self._reported:
                self._reported.add(rank)
                ending = asdict(endings[rank]) if rank in endings else None
                ago = time.monotonic() - (self._running.ended_at(rank) or time.monotonic())
                self._link.send(rank=rank, code=code, ago=ago, ending=ending, facts=self._running.facts())

    def _part(self, bye: dict[str, Any]) -> None:
        if bye.get("error"):
            read_message(bye["error"].encode("utf-8", "surrogateescape"), lambda data: data)  # raises it
        self._result = bye["result"]
