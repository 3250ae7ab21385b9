"""A row of jobs on emulated hosts, each with a launcher: their links fail, lose packets, or are slow."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from ingot.drill.clean import left_running
from ingot.drill.job import TrainingJob, ended
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench
from .hosts import Hosts, missing
from .row import Row, judge_recovered, random_of
from .rows_launchers import Launchers

_STEPS = ("train.steps=120",)
_FEW_STEPS = ()  # 24
_NODES = ("launch.nodes=2", "launch.lease_seconds=3")
_NODE_SECONDS = 3.0
# A gap that TCP would double, if nothing limited the time between its repetitions, to more than a node may be silent.
_GAP_SECONDS, _PATIENT_SECONDS = 4.5, 7.0
_SLOW_BYTES = 2e6  # per second: a step takes ten times as long
_LATE_SECONDS = 0.005


@dataclass(frozen=True)
class _JobOnHost(TrainingJob):
    """`ingot train` on an emulated host."""

    hosts: Hosts | None = None
    host: int = 0

    def command(self) -> list[str]:
        assert self.hosts is not None
        return self.hosts.command(self.host, super().command())


class _HostLaunchers(Launchers):
    """A launcher on each of `hosts`; the one on the first host leads."""

    def __init__(self, bench: Bench, name: str, settings: Sequence[str], hosts: Hosts):
        super().__init__(bench, name, settings)
        self.hosts = hosts
        self._codes: list[int] = []

    def _start(self, words: list[str], env: dict[str, str]) -> subprocess.Popen:
        job = self._bench.job(self._name, *words, env=env)
        host = len(self.started)
        return _JobOnHost(job.run_file, job.run, job.temporary, job.options, job.variables, self.hosts, host).start()

    def codes(self) -> list[int]:
        """Wait for the ends of all launchers. Returns their exit codes."""
        self._codes = self._codes or [ended(launcher).code for launcher in self.started]
        return self._codes

    def found(self, *kinds: str) -> list[dict]:
        return list(read_events(self.folder.events, *kinds))

    def actions(self, action: str) -> list[str]:
        """Return the hosts of the `node` events with this action."""
        return [event["host"] for event in self.found(events.NODE) if event["action"] == action]

    def wait_for_start(self, count: int) -> bool:
        """Wait until the ranks have started training `count` times, and have made steps since. Returns whether they
        have."""
        steps = (events.RUN_STARTED, events.STEP)

        def trains() -> bool:
            kinds = [event["kind"] for event in self.found(*steps)]
            return kinds.count(events.RUN_STARTED) >= count and kinds[-3:] == [events.STEP] * 3

        return self._wait(trains)


@dataclass(frozen=True)
class _Trial:
    """A case of a row. where: the case, for people."""

    bench: Bench
    verdicts: Verdicts
    random: Random
    seed: int
    case: str

    @contextmanager
    def trains(
        self, count: int, steps: Sequence[str], *more: str, locks: bool = True
    ) -> Iterator[tuple[_HostLaunchers, Hosts]]:
        """Train on `count` hosts during a block. Afterwards all launchers have to end with code 0, and
        the run has to be that of an undisturbed one. locks: False: hosts do not see each other's locks of files."""
        name = f"links-{self.case}-{self.seed}"
        with (
            Hosts(count, self.bench.root / f"{name}.hosts") as hosts,
            _HostLaunchers(self.bench, name, (*steps, *_NODES, *more), hosts) as nodes,
        ):
            if not locks:
                hosts.hide_locks(nodes.folder.lock)
            nodes.start(count)
            yield nodes, hosts
            self.judge(f"exit codes {nodes.codes()}" if any(nodes.codes()) else "")
            left = hosts.shared_memory()
            self.verdicts.judge("o7", self.case, f"shared memory {left} is left" if left else "")
            self.verdicts.judge("o7", self.case, left_running(nodes.folder.root))
        judge_recovered(self.bench, self.verdicts, name, self.case, self.bench.reference(*steps))

    def judge(self, finding: str) -> None:
        self.verdicts.judge("o6", self.case, finding)

    def judge_undisturbed(self, nodes: _HostLaunchers) -> None:
        """No node may have been lost, and nothing started again."""
        nodes.codes()
        found = nodes.found(events.FAULT, events.RESTART, events.PLANNED_RESTART)
        self.judge(f"{[event['kind'] for event in found]}" if found else "")
        lost = nodes.actions("lost")
        self.judge(f"{lost} counted as lost" if lost else "")

    def judge_lost(self, nodes: _HostLaunchers, injected: float, most: int = 1) -> None:
        """The loss of a node, and no other fault. most: so often, in the place of rank 1."""
        nodes.codes()
        found = [(event["rank"], event["failure"]) for event in nodes.found(events.FAULT)]
        self.judge("" if found and found == [(1, "node")] * min(len(found), most) else f"faults {found}")
        self.verdicts.time(nodes.folder, injected)


def _gap(trial: _Trial) -> None:
    """A link that loses everything for less than launch.node_seconds: nothing starts again."""
    with trial.trains(2, _STEPS, f"launch.node_seconds={_PATIENT_SECONDS}") as (nodes, hosts):
        nodes.wait_for_step(trial.random.randrange(9, 60))
        hosts.hole(1)
        time.sleep(_GAP_SECONDS)
        hosts.repair(1)
        trial.judge_undisturbed(nodes)


def _spare(trial: _Trial) -> None:
    """A node is cut off: a spare takes its place, and it joins again as one, or finds the run finished."""
    with trial.trains(3, _STEPS, f"launch.node_seconds={_NODE_SECONDS}") as (nodes, hosts):
        nodes.wait_for_step(trial.random.randrange(9, 60))
        injected = time.time()
        hosts.hole(1)
        trial.judge("" if nodes.wait_for_start(2) else "nothing trains while the node is cut off")
        hosts.repair(1)
        trial.judge_lost(nodes, injected)


def _unplugged(trial: _Trial) -> None:
    """The cable of a node is out for longer: the run waits, and goes on with it."""
    with trial.trains(2, _STEPS, f"launch.node_seconds={_NODE_SECONDS}") as (nodes, hosts):
        nodes.wait_for_step(trial.random.randrange(9, 60))
        injected = time.time()
        hosts.cut(1)
        trial.judge("" if nodes.wait_for_fault(1) else "the node does not count as lost while it is cut off")
        hosts.repair(1)
        trial.judge_lost(nodes, injected)


def _leader(trial: _Trial) -> None:
    """The leader is cut off to the end of the run, and has the lock: it steps down, and the others go on."""
    with trial.trains(3, _STEPS, f"launch.node_seconds={_NODE_SECONDS}") as (nodes, hosts):
        nodes.wait_for_step(trial.random.randrange(9, 60))
        injected = time.time()
        hosts.hole(0)
        # It loses both others: if the spare gives its last sign a little later, it takes the place of the first one.
        trial.judge_lost(nodes, injected, most=2)
        leads, down = nodes.actions("leads"), nodes.actions("steps_down")
        trial.judge("" if leads[0] == "host-0" != leads[1] and down == ["host-0"] else f"lead {leads}, down {down}")


def _two_leaders(trial: _Trial) -> None:
    """The leader is cut off and frozen on a file system without locks, so another one leads; then it goes on, and
    still takes itself for the leader."""
    with trial.trains(3, _STEPS, f"launch.node_seconds={_NODE_SECONDS}", locks=False) as (nodes, hosts):
        nodes.wait_for_step(trial.random.randrange(9, 60))
        injected = time.time()
        hosts.hole(0)
        os.kill(nodes.started[0].pid, signal.SIGSTOP)
        trial.judge("" if nodes.wait_for_start(2) else "nothing trains while the leader is cut off")
        os.kill(nodes.started[0].pid, signal.SIGCONT)
        hosts.repair(0)
        nodes.codes()
        trial.verdicts.time(nodes.folder, injected)
        leads, found = nodes.actions("leads"), nodes.found(events.FAULT)
        trial.judge("" if len(set(leads)) == 2 else f"lead {leads}")
        faults = [(fault["rank"], fault["failure"]) for fault in found]  # of the leader, written by the next one
        trial.judge("" if faults == [(0, "node")] else f"faults {found}")


def _lossy(trial: _Trial) -> None:
    """A link loses packets: slower, but no alarm."""
    with trial.trains(2, _FEW_STEPS) as (nodes, hosts):
        hosts.degrade(1, loss=trial.random.uniform(0.05, 0.2))
        trial.judge_undisturbed(nodes)


def _slow(trial: _Trial) -> None:
    """A link is slow and late: so are the steps, but there is no alarm."""
    with trial.trains(2, _FEW_STEPS) as (nodes, hosts):
        hosts.degrade(1, rate=_SLOW_BYTES, delay=_LATE_SECONDS)
        trial.judge_undisturbed(nodes)


_CASES: dict[str, Callable[[_Trial], None]] = {
    "gap": _gap,
    "spare": _spare,
    "unplugged": _unplugged,
    "leader": _leader,
    "two-leaders": _two_leaders,
    "lossy": _lossy,
    "slow": _slow,
}


def rs31_links(bench: Bench, seed: int, verdicts: Verdicts, cases: Sequence[str] = tuple(_CASES)) -> None:
    """Cut, black-hole, slow down and disturb the links of nodes on emulated hosts. cases: a part of them."""
    for case in cases:
        _CASES[case](_Trial(bench, verdicts, random_of(f"RS31 links {case}", seed), seed, case))


ROWS = (
    Row(
        "RS31 links",
        "a node, the leader, or two leaders are cut off; links that lose packets or are slow",
        rs31_links,
        missing,
    ),
)
