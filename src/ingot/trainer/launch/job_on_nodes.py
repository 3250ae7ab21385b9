"""A job on several nodes, as its leader sees it: the ranks of this node, and the launchers of the others.

Each node runs the same command. The one that gets the lock of the run leads, and the others join it (launch/node.py).
The leader decides; a node starts and ends its ranks, watches their heartbeats, and reports. Nodes that are more than
launch.nodes wait as spares, with everything imported, and take the place of one that is lost. Without a spare, the run
goes on with fewer nodes if launch.min_ranks permits that, and with more again when they join.
"""

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.config import from_dict
from ingot.errors import IngotError
from ingot.machine.health.report import node_name
from ingot.machine.health.rules import HealthFinding
from ingot.machine.interfaces import interface_of
from ingot.schema.fallbacks import Fallback
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.launch.checking import MachineCheck
from ingot.trainer.launch.handover import EarlierJob, earlier_job
from ingot.trainer.launch.hangs_on_nodes import HangsOnNodes
from ingot.trainer.launch.health import record_finding, restart_for, unhealthy, write_drained
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.layouts import Layouts
from ingot.trainer.launch.link import Link, own_host
from ingot.trainer.launch.nodes import Node, Nodes, nodes_missing
from ingot.trainer.launch.running import PlannedRestart, RunningJob, next_log, ranks_of
from ingot.trainer.launch.slow_nodes import NONE_SLOW, SlowNodes, SlowRank
from ingot.trainer.launch.watchdog import Hang
from ingot.trainer.mesh.start import NodeShare
from ingot.trainer.resilience.endings import RankEnding, clear_endings
from ingot.trainer.resilience.incidents import AttemptEnd, JobIncident, explain
from ingot.trainer.resilience.start_times import FIRST, Ordered

_POLL_SECONDS = 0.02
_SUSPECT_SECONDS = 2.5  # without a sign of life: a node that is to blame if ranks elsewhere lost their peers


class JobOnNodes(RunningJob):
    """The job of a leader.

    here: the ranks of this node. layouts: those of the run, for fewer nodes too. terms: what other nodes need to start
    theirs (node_messages.py). facts: this node's, which those of the others have to equal. record: writes an event.
    """

    def __init__(
        self,
        folder: RunFolder,
        here: JobHere,
        launch: Launch,
        layouts: Layouts,
        *,
        terms: Mapping[str, Any],
        facts: Mapping[str, str],
        say: Callable[[str], None],
        record: Callable[..., None],
    ):
        self._folder, self._here, self._launch = folder, here, launch
        self._layouts, self._say, self._record = layouts, say, record
        self._slow_nodes = SlowNodes(folder, here.job.processes)
        self._layout: Fallback | None = None  # of this attempt, if it is not that of the run file
        self._grows: PlannedRestart | None = None
        self._earlier = earlier_job(folder)
        self._trained = self._earlier is not None  # with all nodes, just now
        self._check: MachineCheck | None = None  # that is due before this attempt
        self._nodes = Nodes(folder, launch, terms=terms, facts=facts, say=say, record=record)
        self._codes: dict[int, int] = {}
        self._endings: dict[int, RankEnding] = {}
        self._ended_at: dict[int, float] = {}
        self._before = FIRST
        self._lost: JobIncident | None = None
        self._signals: list[tuple[signal.Signals, str]] = []
        self._attempt, self._started, self._since, self._missing = 0, False, 0.0, 0
        self._hangs = HangsOnNodes(folder, here, members=self._members, poll=self._poll, wait=self.wait)
        here.prepare("leader.log")

    # -- the interface of the supervisor --

    @property
    def log(self) -> Path:
        return self._here.log

    @property
    def started(self) -> bool:
        return self._started

    @property
    def ranks(self) -> int:
        return self._here.job.processes * self._size

    def earlier(self) -> EarlierJob | None:
        return self._earlier

    def start(self, attempt: int, before: Ordered = FIRST, *, check: bool = False) -> None:
        self._before = before
        self._check = MachineCheck(self._folder, self._launch, self._say) if check else None
        self._attempt, self._started, self._since, self._missing = attempt, False, time.monotonic(), 0
        self._lost = self._grows = None
        self._codes, self._endings, self._ended_at = {}, {}, {}
        self._expel()
        clear_endings(self._folder)
        self.running()

    def running(self) -> bool:
        self._poll()
        self._expel()
        if not self._started:
            self._start_if_complete()
            return True
        here = self._here.running()
        self._codes |= {rank: code for rank, code in self._here.exit_codes().items() if rank not in self._codes}
        if not here:  # without codes if the fork server was lost
            lost = self._here.facts()["server_code"] or -signal.SIGKILL
            self._codes |= {rank: lost for rank in ranks_of(self._here.job, 0) if rank not in self._codes}
        return here or any(not node.done for node in self._members())

    def wait(self, seconds: float) -> None:
        reports = [self._here.reports] if self._started and self._here.running() else []
        reports += [self._check.fileno()] if self._check and self._check.fileno() >= 0 else []
        self._nodes.wait(seconds, *reports)

    def exit_codes(self) -> Mapping[int, int]:
        return self._codes

    def ended_at(self, rank: int) -> float | None:
        return self._ended_at.get(rank, self._here.ended_at(rank))

    def endings(self) -> Mapping[int, RankEnding]:
        return {**self._here.endings(), **self._endings}

    def lost_node(self, step: int) -> JobIncident | None:
        if self._lost is None and self._started and self._codes:  # ranks lost their peers: a silent node is the cause
            self._poll()  # what has come while this process waited for a disk
            for node in self._members():
                if not node.done and node.link.silent() > _SUSPECT_SECONDS:
                    self._nodes.drop(node, f"gives no sign of life for {node.link.silent():.0f} s")
            self._poll()
        if self._lost is None and not self._started and self._overdue() and not self._smaller():
            self._lost = nodes_missing(self._folder, self._launch, self._missing)
        return replace(self._lost, step=step) if self._lost else None

    def signals(self) -> Iterator[tuple[signal.Signals, str]]:
        while self._signals:
            yield self._signals.pop(0)

    def planned_restart(self, slow: Mapping[int, SlowRank] = NONE_SLOW) -> PlannedRestart | None:
        if not self._started:
            return None
        faults = [self._here.fault_of_machine(), *(node.sickness.worst for node in self._members())]
        # The others train on while a node imports what its ranks need.
        there = 1 + sum(node.ready or node.number is not None for node in self._nodes.present())
        if not any(faults):
            faults = [self._drain_slow(slow.values(), there - 1)]
        if (restart := restart_for(faults)) is not None:
            return restart
        if self._grows is None and self._layouts.can_grow(self._size, there):
            self._layouts.grow()
            self._grows = PlannedRestart(f"{there} nodes are there, and the run is trained on {self._size}")
        return self._grows

    def _drain_slow(self, ranks: Collection[SlowRank], others: int) -> HealthFinding | None:
        """Return the fault of the first slow node that leaves for it; None if none does. others: the number
        of nodes that are ready without it."""
        if others < self._size <= len(self._nodes.present()):
            return None  # a spare is still importing what its ranks need
        for slow in ranks:
            number = slow.rank // self._here.job.processes
            node = next((node for node in self._members() if node.number == number), None)
            if number and node is None:
                continue  # it is lost
            host, sickness = (node.host, node.sickness) if node else (node_name(), self._here.sickness)
            if found := self._slow_nodes.judge(slow, host, self._why_it_stays(slow, others)):
                record_finding(found, self._record, self._say)
                sickness.take(found)
                if sickness.worst:
                    return sickness.worst
        return None

    def _why_it_stays(self, slow: SlowRank, others: int) -> str:
        """Return why the job does not gain by going on without the node of a slow rank; "" if it does."""
        if others >= self._size:
            return ""
        fewer = self._layouts.for_nodes(others)
        if fewer is None:
            return "no spare can take its place, and launch.min_ranks permits no fewer ranks"
        if slow.slowdown * fewer.ranks <= self.ranks:
            return f"no spare can take its place, and {fewer.ranks} ranks are not faster than {self.ranks} with it"
        return ""

    def hang(self) -> Hang | None:
        return self._hangs.find() if self._started else None

    def examine(self, hang: Hang, step: int) -> JobIncident:
        return self._hangs.examine(hang, step)

    def explain(self, step: int) -> JobIncident:
        by_node = {0: self._here.facts()} | {node.number: node.facts for node in self._members() if node.facts}
        lost, facts = self.lost_ranks(), list(by_node.values())
        where = lost[0] // self._here.job.processes if lost else 0
        return explain(
            AttemptEnd(
                ranks=self.ranks,
                endings=self.endings(),
                dead=lost,
                exit_codes=self._codes,
                step=step,
                last_words=next((one["last_words"] for one in facts if one["last_words"]), ""),
                log=by_node.get(where, by_node[0])["log"],
                server_code=next((one["server_code"] for one in facts if one["server_code"] is not None), None),
                oom_kills=sum(one["oom_kills"] for one in facts),
            )
        )

    def respond(self, incident: JobIncident) -> JobIncident:
        return self._layouts.respond(incident)

    def end_attempt(self, failed: Collection[int] = (), *, keep: bool = False) -> Collection[int]:
        for node in self._members():
            node.link.send(end=self._attempt, failed=list(failed), keep=keep)
        kept = list(self._here.end_attempt(failed, keep=keep))
        while left := [node for node in self._members() if node.ended < self._attempt]:
            self._poll()
            for node in left:
                if node.link.silent() > self._launch.node_seconds:
                    self._nodes.drop(node, "does not say that its ranks have ended")
            self.wait(_POLL_SECONDS)
        stay = [node for node in self._members() if not node.sickness.worst]  # the others leave before the next attempt
        return sorted(kept + [rank for node in stay for rank in node.kept])

    def close(self) -> None:
        """End the ranks of this node. Those of other nodes end with `part`, or when they see that this one is gone."""
        if self._check:
            self._check.close()
        self._here.close(keep_snapshots=True)  # this node may have to lead, or to follow, again

    def part(self, result: Mapping[str, Any] | None, error: IngotError | None = None) -> None:
        """See Nodes.part."""
        self._nodes.part(result, error)

    def links(self) -> list[Link]:
        return self._nodes.links()

    def release(self) -> None:
        """See Nodes.release."""
        self._nodes.release()

    # -- nodes --

    def _members(self) -> list[Node]:
        return [node for node in self._nodes.present() if node.number is not None and node.attempt == self._attempt]

    def _ranks_of(self, node: Node) -> range:
        return ranks_of(self._here.job, (node.number or 0) * self._here.job.processes)

    def _poll(self) -> None:
        for node, message in self._nodes.poll():
            self._take(node, message)
        for node, why in self._nodes.gone():
            self._lose(node, why)

    def _take(self, node: Node, message: dict[str, Any]) -> None:
        """Take in a message about ranks. Raises KeyError, TypeError, ValueError, ConfigError for another form."""
        if "rank" in message:
            rank = int(message["rank"])
            if message["ending"] is not None:
                self._endings[rank] = from_dict(RankEnding, message["ending"])
            node.facts = message["facts"]
            self._ended_at[rank] = time.monotonic() - float(message["ago"])
            self._codes.setdefault(rank, int(message["code"]))
        elif "done" in message and message["done"] == node.attempt:
            node.done, node.facts = True, message["facts"]
            for rank in self._ranks_of(node):  # they have no codes if the fork server was lost
                self._codes.setdefault(rank, node.facts["server_code"] or -signal.SIGKILL)
        elif "signal" in message:
            self._signals.append((signal.Signals[message["signal"]], f"{node.host}:{node.pid}"))

    def _expel(self) -> None:
        """Part from nodes that are not sound, unless they have ranks. Raises NodeUnhealthy if it is this one."""
        members = self._members() if self._started else []
        for node in self._nodes.present():
            if node.sickness.worst and node not in members:
                self._nodes.expel(node, node.sickness.worst)
        if not self._started and (fault := self._here.fault_of_machine()):
            write_drained(self._folder, fault)
            raise unhealthy(fault, self._folder)

    def _lose(self, node: Node, why: str) -> None:
        """Take in that a node is gone: a failure of the job if it had ranks that had not ended well."""
        if node.number is None or node.attempt != self._attempt or not self._started:
            self._say(f"nodes     {node.name} has left: {why}")
            if self._check and self._check.has_begun:
                self._since = time.monotonic()  # all were there until now
        elif self._lost is None and any(self._codes.get(rank) != 0 for rank in self._ranks_of(node)):
            cause = f"was lost with {node.name}: {why}"
            self._lost = JobIncident(rank=self._ranks_of(node)[0], kind="node", cause=cause, step=0)

    # -- the start of an attempt --

    @property
    def _size(self) -> int:
        """The number of nodes that take part in this attempt."""
        return self._layout.nodes if self._layout else self._launch.nodes

    def _smaller(self) -> Fallback | None:
        """Return the layout with which the run goes on without the nodes that are missing, if it has waited enough."""
        there = 1 + len(self._nodes.present())
        none_lost = self._trained and there >= self._size  # of those that took part before
        waited = time.monotonic() - self._since >= self._layouts.wait_seconds(trained=self._trained)
        return self._layouts.for_nodes(there) if waited or none_lost else None

    def _start_if_complete(self) -> None:
        present = self._nodes.present()
        missing = self._launch.nodes - 1 - len(present)
        layout = self._smaller() if missing > 0 else None
        if missing > 0 and layout is None:
            if missing != self._missing:
                self._missing = missing
                there = f"{len(present) + 1} of {self._launch.nodes}"
                self._say(f"nodes     {there}; the others join with the same command")
            alone = time.monotonic() - self._since
            is_due = alone > self._launch.node_seconds and self._layouts.for_nodes(1) is None  # else it goes on alone
            if self._attempt and not present and is_due:
                # It may be cut off, and it has the lock: no other node can find out whether the rest reach each other.
                # Once: its next lead begins with attempt 0.
                self._nodes.step_down(alone)
            return
        self._missing = 0
        if self._check:
            ready = [node for node in present if node.ready or node.attempt >= 0]
            self._go_on_with(self._check, ready, layout.nodes if layout else self._launch.nodes)
            return
        self._layout = layout
        overrides = self._layouts.begin(layout, self.ranks)
        if layout:
            self._say(f"nodes     goes on with {layout.nodes} of {self._launch.nodes}: {' '.join(overrides)}")
        self._give_places(present)
        host, each = own_host(node.link for node in present if node.number), self._here.job.processes
        name, world = next_log(self._folder), self.ranks
        share = NodeShare(first=0, world=world, host=host, port=0, interface=interface_of(host))
        if self._here.health:
            self._here.health.carries(share.interface)
        self._here.start(self._attempt, self._before, name, share, overrides)
        self._started = self._trained = True
        for node in present:
            if node.number is None:
                continue
            node.attempt, node.done, node.hang, node.facts = self._attempt, False, None, {}
            order = {"attempt": self._attempt, "log": name.replace(".log", f".node-{node.number}.log")}
            order |= {"first": node.number * each, "world": world, "host": host, "port": self._here.port}
            order["overrides"] = list(overrides)
            node.link.send(start=order)
        spares = len([node for node in present if node.number is None])
        members = ", ".join(["0 (this one)", *(f"{node.number} ({node.host})" for node in self._members())])
        self._say(f"nodes     {members}" + (f"; spares: {spares}" if spares else ""))

    def _go_on_with(self, check: MachineCheck, ready: list[Node], size: int) -> None:
        """Go on with a check of nodes that have imported everything: they measure nothing while they are busy. Raises
        NodeUnhealthy if the run cannot go on with the sound ones."""
        is_ready = len(ready) + 1 >= size and (self._attempt > 0 or self._here.prepared())
        if not (check.has_begun or is_ready or check.waited(self._launch.node_wait_seconds)) or check.goes_on(ready):
            return
        self._check, self._before = None, replace(self._before, check=check.seconds)
        layouts, nodes = self._layouts, self._launch.nodes
        check.conclude(
            self._here.sickness,
            lambda sound: sound >= nodes or layouts.for_nodes(sound) is not None,
            self._nodes.present(),
        )
        if any(node.sickness.worst for node in self._nodes.present()):
            self._trained, self._since = True, time.monotonic()  # all were there: they wait for no more than a spare

    def _give_places(self, present: list[Node]) -> None:
        """Give each place of the job to a node: the one that had it, else the one that has waited longest."""
        for node in present:
            if node.number is not None and node.number >= self._size:  # that place is no more
                node.number = None
        taken = {node.number for node in present if node.number is not None}
        spares = [node for node in present if node.number is None]
        for number in range(1, self._size):
            if number not in taken:
                spares.pop(0).number = number

    def _overdue(self) -> bool:
        return self._missing > 0 and time.monotonic() > self._since + self._launch.node_wait_seconds
