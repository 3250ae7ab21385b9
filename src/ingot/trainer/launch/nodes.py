"""The other nodes of a job, as its leader has them: those that have joined, their messages, and which of them are gone.

No torch.
"""

import contextlib
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ingot.errors import ConfigError, IngotError, ResourceError, RunBusyError
from ingot.machine.health.report import node_name
from ingot.machine.health.rules import HealthFinding
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.message import as_error
from ingot.trainer.launch.evidence import Answers
from ingot.trainer.launch.handover import STARTED
from ingot.trainer.launch.health import Sickness, finding_from, record_finding, unhealthy, write_drained
from ingot.trainer.launch.link import LeaderAddress, Link, answer, listen
from ingot.trainer.launch.node_messages import answers_from, difference, hang_from
from ingot.trainer.launch.watchdog import Hang
from ingot.trainer.resilience.heartbeat import Beat
from ingot.trainer.resilience.incidents import JobIncident

_GOODBYE_SECONDS = 2.0
_RETRY_SECONDS = 0.1


@dataclass
class Node:
    """Another node, with `host` as its name. pid, started: of its launcher. number: its place in the job, None for a
    spare. attempt: the newest that it takes part in. done: its ranks have ended. ready: it has imported what ranks
    need. ended: the newest attempt of which it has no process any more, but those of the ranks `kept`. hang: by its
    watchdog. facts: about the end of its ranks (JobHere.facts). sickness: of its machine. answered: the number of a
    question, and what its ranks answered. checked: the number of a request of a check (checking.py), and what was
    measured."""

    link: Link
    host: str = ""
    pid: int = 0
    started: float = 0.0
    number: int | None = None
    attempt: int = -1
    done: bool = True
    ready: bool = False
    ended: int = -1
    kept: list[int] = field(default_factory=list)
    hang: Hang | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    sickness: Sickness = field(default_factory=Sickness)
    answered: tuple[int, dict[int, Beat], Answers] | None = None
    checked: tuple[int, dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        return self.host if self.number is None else f"node {self.number} ({self.host})"


def nodes_missing(folder: RunFolder, launch: Launch, missing: int) -> JobIncident:
    """Return the incident of `missing` nodes that have not joined, with its error."""
    wait, fewest = f"{launch.node_wait_seconds:.0f} s", launch.min_ranks
    enough = f", or those for launch.min_ranks = {fewest} ranks" if fewest else ""
    error = ResourceError(
        "E-NODES-MISSING",
        f"{missing} of {launch.nodes} nodes have not joined within {wait}",
        rule=f"a run starts, and goes on, when launch.nodes launchers have joined it{enough}",
        fix=f"run the same command on {missing} more nodes that see {folder.root}, or lower launch.nodes and "
        "parallel.* together; launch.node_wait_seconds is how long the leader waits",
        missing=missing,
        nodes=launch.nodes,
    )
    return JobIncident(rank=-1, kind="node", cause=error.found, step=0, error=error)


class LeaderStepsDown(RunBusyError):
    """The nodes of a job do not reach its leader any more: another node may lead."""


class Nodes:
    """The nodes that have joined. terms, facts: as for JobOnNodes. record: writes an event."""

    def __init__(
        self,
        folder: RunFolder,
        launch: Launch,
        *,
        terms: Mapping[str, Any],
        facts: Mapping[str, str],
        say: Callable[[str], None],
        record: Callable[..., None],
    ):
        self._folder, self._launch, self._terms, self._facts = folder, launch, terms, facts
        self._say, self._record = say, record
        self._nodes: list[Node] = []
        self._gone: list[tuple[Node, str]] = []
        self._released = False
        self._waiting, self._waiting_since, self._reported = -1, 0.0, launch.spares  # spares, of launch.spares
        self._listener, self._address = listen()
        self._arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._bell = socket.socketpair()
        self._bell[0].setblocking(False)
        threading.Thread(target=self._receive, args=(self._address.key,), name="ingot-nodes", daemon=True).start()
        self._address.write(folder.leader)
        self._record_own("leads")

    def present(self) -> list[Node]:
        """Return the nodes that can take part, in the order in which they joined."""
        return [node for node in self._nodes if node.host]

    def poll(self) -> Iterator[tuple[Node, dict[str, Any]]]:
        """Return the messages about ranks that have come; take in the others."""
        with contextlib.suppress(BlockingIOError):
            self._bell[0].recv(64)
        while not self._arrived.empty():
            self._nodes.append(Node(self._arrived.get()))
        for node in list(self._nodes):
            for message in node.link.read():
                try:
                    if not self._take(node, message):
                        yield node, message
                except (KeyError, TypeError, ValueError, ConfigError):
                    node.link.close("it sent a message of another form")
            if node.link.closed:
                self.drop(node, node.link.closed)
            elif node.link.silent() > self._launch.node_seconds:
                self.drop(node, f"gives no sign of life for {node.link.silent():.0f} s")
        self._count_spares()

    def _count_spares(self) -> None:
        """Report, once for each number, that fewer spares wait than launch.spares, and that as many do again. At the
        start they join after the others, and a scheduler may replace one that took a place: both take some time."""
        wanted, now = self._launch.spares, time.monotonic()
        waiting = min(max(len(self.present()) - (self._launch.nodes - 1), 0), wanted)
        if waiting != self._waiting:
            self._waiting, self._waiting_since = waiting, now
        lasts = waiting == wanted or now >= self._waiting_since + self._launch.shrink_seconds
        if waiting == self._reported or not lasts:
            return
        self._reported = waiting
        self._record(events.SPARES, wanted=wanted, waiting=waiting)
        if waiting == wanted:
            self._say(f"nodes     spares: {waiting}, as launch.spares wants")
        else:
            self._say(
                f"WARNING   spares: {waiting} of {wanted} (launch.spares). A machine that is lost now may have no "
                "replacement; give the same command on another one"
            )

    def links(self) -> list[Link]:
        return [node.link for node in list(self._nodes)]

    def gone(self) -> Iterator[tuple[Node, str]]:
        """Return the nodes that are gone since the last call, and why."""
        while self._gone:
            yield self._gone.pop(0)

    def expel(self, node: Node, finding: HealthFinding) -> None:
        """Go on without a node that is not sound: its launcher ends, and it cannot join this run again."""
        write_drained(self._folder, finding)
        self._send_error(node, unhealthy(finding, self._folder))
        node.link.finish(_GOODBYE_SECONDS)
        self.drop(node, finding.words, "drained")

    def _send_error(self, node: Node, error: IngotError, result: Mapping[str, Any] | None = None) -> None:
        text = as_error(error).decode("utf-8", "surrogateescape")
        node.link.send(bye={"result": result, "error": text})

    def drop(self, node: Node, why: str, action: str = "lost") -> None:
        """Go on without a node. action: of its event."""
        node.link.close(why)
        if node in self._nodes:
            self._nodes.remove(node)
            if node.host:
                who = {"host": node.host, "pid": node.pid, "started": node.started}
                self._record(events.NODE, **who, action=action, node=node.number, reason=why)
                self._gone.append((node, why))

    def wait(self, seconds: float, *others: int) -> None:
        """Wait until something comes from a node, or can be read from another file descriptor, at most so long."""
        with selectors.DefaultSelector() as selector:
            for waited in (self._bell[0], *others, *(node.link for node in self._nodes if not node.link.closed)):
                selector.register(waited, selectors.EVENT_READ)
            selector.select(seconds)

    def step_down(self, seconds: float) -> NoReturn:
        """End the lead of this node, which has been alone for `seconds`."""
        why = f"no other node has reached it for {seconds:.0f} s"
        self._say(f"nodes     this node leads no longer: {why}; another one may lead now")
        self._record_own("steps_down", why)
        raise LeaderStepsDown(
            "E-RUN-BUSY",
            f"{self._folder.root} waits for its nodes",
            rule="a leader that no node reaches lets another one lead",
            fix="none is needed: the node that leads next decides",
        )

    def _record_own(self, action: str, reason: str = "") -> None:
        own = {"host": node_name(), "pid": os.getpid(), "started": STARTED}
        self._record(events.NODE, **own, action=action, node=0, reason=reason)

    def part(self, result: Mapping[str, Any] | None, error: IngotError | None = None) -> None:
        """Give every node the end of the job: its result, or its error. With neither, they look for another leader."""
        for node in self._nodes:
            if error:
                self._send_error(node, error, result)
            elif result is not None:
                node.link.send(bye={"result": result})
        for node in self._nodes:
            node.link.finish(_GOODBYE_SECONDS)
        self._nodes.clear()

    def release(self) -> None:
        """Stop listening, and remove the address of this leader."""
        self._released = True
        if LeaderAddress.read(self._folder.leader) == self._address:  # or it is another leader's, which took over
            self._folder.leader.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # accept() returns
        self._listener.close()
        for one in self._bell:
            one.close()

    def _receive(self, key: str) -> None:
        """Let whatever connects prove that it is a node of this run, each in a thread: it may be a scanner."""
        while not self._released:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # this leader parted; or too many files are open, or that one has gone again
                time.sleep(_RETRY_SECONDS)
                continue
            threading.Thread(target=self._greet, args=(connected, key), name="ingot-greeting", daemon=True).start()

    def _greet(self, connected: socket.socket, key: str) -> None:
        if (link := answer(connected, key)) is not None:
            self._arrived.put(link)
            with contextlib.suppress(OSError):  # this leader parted
                self._bell[1].send(b".")

    def _take(self, node: Node, message: dict[str, Any]) -> bool:
        """Take in a message about the node itself. Returns False for others."""
        if "hello" in message:
            self._welcome(node, message["hello"])
        elif "ready" in message:
            node.ready = True
        elif "ended" in message:
            node.ended, node.kept = int(message["ended"]), [int(rank) for rank in message["kept"]]
        elif "watch" in message:
            node.hang = hang_from(message["watch"])
        elif "health" in message:
            finding = finding_from(message["health"])
            record_finding(finding, self._record, self._say)
            node.sickness.take(finding)
        elif "answers" in message:
            node.answered = (int(message["answers"]), *answers_from(message))
        elif "checked" in message:
            node.checked = int(message["checked"]), dict(message["answer"])
        else:
            return False
        return True

    def _welcome(self, node: Node, hello: dict[str, Any]) -> None:
        host, pid = str(hello["host"]), int(hello["pid"])
        if found := difference(self._facts, hello["facts"]):
            self._say(f"nodes     {host} is refused: {found}")
            node.link.send(refused=found)
            node.link.finish(_GOODBYE_SECONDS)
            self._nodes.remove(node)
            return
        who = {"host": host, "pid": pid, "started": float(hello["started"])}
        node.link.send(accepted=dict(self._terms))
        if node.link.closed:  # it gave up before it was heard, and comes again
            return
        node.host, node.pid, node.started = host, pid, who["started"]
        way = {"address": node.link.other_host, "leader_address": node.link.own_host}
        self._record(events.NODE, **who, action="joined", node=None, reason="", **way)
        spares = len(self._nodes) - (self._launch.nodes - 1)
        if spares > 0:
            self._say(f"nodes     {host} waits as a spare; spares: {spares}")
