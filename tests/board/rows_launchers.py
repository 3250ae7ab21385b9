"""Rows of jobs on several nodes with a launcher each: a node is lost, or does not answer, or the leader is lost."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ingot.drill.job import DEADLINE_SECONDS, marked_processes
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import Row, judge_recovered, random_of
from .times import CRASH, WARM

SETTINGS = ("train.steps=120", "launch.nodes=2", "launch.node_seconds=3")
_REFERENCE = SETTINGS[:1]
# With canonical sums, one and two ranks compute the same bits.
CANONICAL = (
    "train.steps=400",
    "parallel.dp_shard=1",
    "parallel.dp_replicate=2",
    "parallel.reduce=canonical",
    "parallel.virtual_ranks=2",
)
SHRINKS = ("launch.nodes=2", "launch.min_ranks=1", "launch.shrink_seconds=0.5", "launch.grow_seconds=1")


class Launchers:
    """The launchers of a run on two nodes of this machine. A context manager, which ends them."""

    def __init__(self, bench: Bench, name: str, settings: Sequence[str] = SETTINGS):
        self._bench, self._name, self.folder = bench, name, bench.folder(name)
        self._settings = settings
        self.started: list[subprocess.Popen] = []

    def __enter__(self) -> "Launchers":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in marked_processes(self.folder.root):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.started:
            launcher.communicate()

    def start(self, count: int = 1, *settings: str, node: str = "", env: dict[str, str] | None = None) -> None:
        """Start launchers one after the other, so that their order is known: the first leads. node: their name."""
        for _ in range(count):
            before = self._nodes()
            more = (env or {}) | ({"SLURMD_NODENAME": node} if node else {})
            self.started.append(self._start(options((*self._settings, *settings)), more))
            self._wait(lambda before=before: self._nodes() > before)

    def _start(self, words: list[str], env: dict[str, str]) -> subprocess.Popen:
        return self._bench.start(self._name, *words, env=env)

    def _nodes(self) -> int:
        return sum(event["action"] in ("leads", "joined") for event in read_events(self.folder.events, events.NODE))

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        """Wait until something is so, for a limited time. Returns whether it is."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := is_so()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def wait_for_step(self, step: int) -> None:
        self._bench.wait_for_step(self._name, step, self.started[-1])

    def wait_for_fault(self, count: int) -> bool:
        return self._wait(lambda: len(list(read_events(self.folder.events, events.FAULT))) >= count)

    def wait_for_start(self, count: int) -> None:
        self._wait(lambda: len(list(read_events(self.folder.events, events.RUN_STARTED))) >= count)

    def of_node(self, launcher: subprocess.Popen) -> list[int]:
        """Return the processes of a node: its launcher, and all that it started."""
        mark = f"INGOT_SUPERVISOR={launcher.pid}\0".encode()
        found = [launcher.pid]
        for pid in marked_processes(self.folder.root):
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def ends(self, without: int) -> list[int | None]:
        """Wait for the launchers, except the one with this number. Returns their exit codes."""
        return [self._bench.ended(one).code for number, one in enumerate(self.started) if number != without]


def rs07_spare(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Lose node 1: with a spare, without one until it is started again, and frozen as a whole until it is too late."""
    random = random_of("RS07 spare", seed)
    for case in ("spare", "again", "frozen"):
        name, step = f"{case}-{seed}", random.randrange(9, 60)
        where = f"{case} at step {step}"
        with Launchers(bench, name) as nodes, ExitStack() as thaw:
            nodes.start(2 if case == "again" else 3)
            nodes.wait_for_step(step)
            lost, injected = nodes.of_node(nodes.started[1]), time.time()
            for pid in lost:
                os.kill(pid, signal.SIGSTOP if case == "frozen" else signal.SIGKILL)
                thaw.callback(_continue, pid)
            if case == "again":
                nodes.start()
            if case == "frozen":  # it goes on when the spare trains, and has to do no harm
                nodes.wait_for_fault(1)
                thaw.close()
            codes = nodes.ends(without=-1 if case == "frozen" else 1)
            verdicts.judge("o6", where, f"exit codes {codes}" if any(codes) else "")
            found = [(e["rank"], e["failure"]) for e in read_events(nodes.folder.events, events.FAULT)]
            verdicts.judge("o6", where, "" if found == [(1, "node")] else f"faults {found}")
            if case != "frozen":
                verdicts.time(nodes.folder, injected)
        judge_recovered(bench, verdicts, name, where, bench.reference(*_REFERENCE))


def rs07_shrink(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Lose one of two nodes: the run goes on with the other, and with both again when a node joins. With odd seeds,
    rank 0 keeps its process in both restarts, with another number of ranks in each."""
    random, name = random_of("RS07 shrink", seed), f"shrink-{seed}"
    step, restart = random.randrange(9, 60), ("full", "partial")[seed % 2]
    where = f"{restart} restarts at step {step}"
    settings = (*CANONICAL, *SHRINKS, "launch.node_seconds=3", f"launch.restart={restart}")
    with Launchers(bench, name, settings) as nodes:
        nodes.start(2)
        nodes.wait_for_step(step)
        injected = time.time()
        for pid in nodes.of_node(nodes.started[1]):
            os.kill(pid, signal.SIGKILL)
        nodes.wait_for_start(2)  # or the new node would take the lost one's place before the run shrinks
        nodes.start()
        codes = nodes.ends(without=1)
        verdicts.judge("o6", where, f"exit codes {codes}" if any(codes) else "")
        found = [(e["rank"], e["failure"]) for e in read_events(nodes.folder.events, events.FAULT)]
        verdicts.judge("o6", where, "" if found == [(1, "node")] else f"faults {found}")
        sizes = [event["world_size"] for event in read_events(nodes.folder.events, events.RUN_STARTED)]
        verdicts.judge("o6", where, "" if sizes == [2, 1, 2] else f"trained on {sizes} ranks")
        started = read_events(nodes.folder.events, events.RANK_STARTED)
        pids = {event["pid"] for event in started if event["rank"] == 0}
        expected = {"full": 3, "partial": 1}[restart]
        verdicts.judge("o6", where, "" if len(pids) == expected else f"rank 0 had processes {pids}, not {expected}")
        verdicts.time(nodes.folder, injected)
    judge_recovered(bench, verdicts, name, where, bench.reference(*CANONICAL), all_layouts=True)


def rs31_leader(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill the leader, with rank 0 and the store of the ranks: another node leads, and a spare takes its place."""
    random, name = random_of("RS31 leader", seed), f"leader-{seed}"
    step = random.randrange(9, 60)
    where = f"at step {step}"
    with Launchers(bench, name) as nodes:
        nodes.start(3)
        nodes.wait_for_step(step)
        injected = time.time()
        nodes.started[0].kill()
        codes = nodes.ends(without=0)
        verdicts.judge("o6", where, f"exit codes {codes}" if any(codes) else "")
        leads = [e for e in read_events(nodes.folder.events, events.NODE) if e["action"] == "leads"]
        verdicts.judge("o6", where, "" if len(leads) == 2 else f"led: {leads}")
        found = [(e["rank"], e["failure"]) for e in read_events(nodes.folder.events, events.FAULT)]
        verdicts.judge("o6", where, "" if found == [(0, "node")] else f"faults {found}")
        verdicts.time(nodes.folder, injected)
    judge_recovered(bench, verdicts, name, where, bench.reference(*_REFERENCE), faults=1)


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


ROWS = (
    Row("RS07 spare", "a node is lost, or frozen, with a spare and without", rs07_spare, limits=WARM),
    Row(
        "RS07 shrink",
        "a node is lost: the run goes on with fewer, and with all again when one joins",
        rs07_shrink,
        limits=CRASH,
    ),
    Row("RS31 leader", "the leader of several nodes is killed, with the store of the ranks", rs31_leader, limits=CRASH),
)
