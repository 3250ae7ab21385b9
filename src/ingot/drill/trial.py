"""One copy of a run that is disturbed: its job, what its log shows of each fault, and the judgment. No torch."""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from ingot.drill.clean import o7, shared_memory
from ingot.drill.job import DEADLINE_SECONDS, END_SECONDS, TrainingJob, gone_within, send
from ingot.drill.oracles import Recovery, RunFacts, Trace, Verdicts, o1, o2, o3, read_facts, redone
from ingot.drill.plan import LOUD, OF_ONE_RANK, FaultPlan, PlannedFault
from ingot.errors import EXIT_OK, EXIT_PREEMPTED, IngotError
from ingot.events import EventLog, NewEvents, read_events
from ingot.schema import events
from ingot.schema.guard_record import described, measure_of
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.units import format_seconds

_POLL_SECONDS = 0.01
_LIMIT_STEPS = 5  # the watchdog waits as long as that many of the longest steps (trainer/launch/watchdog.py)
_DEVICES = "CUDA_VISIBLE_DEVICES"
_LAST_CHARACTERS = 300  # of what a command printed, in a finding


class DrillOutput(Protocol):
    """The interface for what a drill shows while it runs, such as the terminal of cli/terminal.py."""

    def say(self, text: str = "") -> None: ...
    def progress(self, fraction: float, text: str = "") -> None: ...


class Silence(DrillOutput):
    """Shows nothing."""

    def say(self, text: str = "") -> None: ...
    def progress(self, fraction: float, text: str = "") -> None: ...


@dataclass(frozen=True, kw_only=True)
class DrilledRun:
    """The part of a run that a drill trains again and again.

    run_file, settings: of the command; settings as "a.b=c". config: what both give. until: the step after which the run
    stops; None: its end. variables: more of the environment. step_seconds: the duration of a step, if it is known.
    hang_seconds: how long after its limit the watchdog may find a hang.
    """

    run_file: Path
    config: RunConfig
    settings: tuple[str, ...] = ()
    until: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float = 0.0
    hang_seconds: float = 1.5

    @property
    def steps(self) -> int:
        return self.config.train.steps if self.until is None else self.until

    @property
    def interval(self) -> int:
        """The steps between two checkpoints; 0 if they are counted otherwise."""
        return self.config.checkpoint.interval.steps

    @property
    def ranks(self) -> int:
        return self.config.parallel.world_size

    def devices(self, node: int) -> dict[str, str]:
        """Return the variables by which a node of several, all on this machine, has its share of the GPUs."""
        nodes = self.config.launch.nodes
        if nodes == 1:
            return {}
        given = os.environ.get(_DEVICES)
        all_devices = [*map(str, range(self.ranks))] if given is None else given.split(",")
        share = self.ranks // nodes
        return {_DEVICES: ",".join(all_devices[node * share : (node + 1) * share])}

    @property
    def done_code(self) -> int:
        """The exit code of the command that reaches the last step."""
        return EXIT_PREEMPTED if self.steps < self.config.train.steps else EXIT_OK

    def job(self, root: Path, temporary: Path) -> TrainingJob:
        """Return the job that trains the run into the folder `root`."""
        options = [word for setting in self.settings for word in ("--set", setting)]
        options += [] if self.until is None else ["--until-step", str(self.until)]
        return TrainingJob(self.run_file, RunFolder(root), temporary, tuple(options), self.variables)


class Trial:
    """A copy of a run in the folder `root`, which must not exist. A context manager: its end ends the job.

    step: the newest in the log. reached: the highest. codes: the exit codes of the commands so far. where: the newest
    fault, for people. recoveries: of all faults.
    """

    def __init__(
        self,
        run: DrilledRun,
        root: Path,
        random: Random,
        verdicts: Verdicts,
        *,
        output: DrillOutput | None = None,
        name: str = "",
        deadline: float = DEADLINE_SECONDS,
    ):
        self.run, self.random, self.verdicts, self.name = run, random, verdicts, name
        self.output = output or Silence()
        self.job = run.job(root, root.with_name(f"{root.name}.tmp"))
        self.folder, self.printed = self.job.run, root.with_name(f"{root.name}.log")
        self.step = self.reached = 0
        self.trains = False  # the newest command has trained a step
        self.codes: list[int] = []
        self.where, self.recoveries, self.stopped_seconds = "", list[Recovery](), 0.0
        self.stop_reasons: tuple[str, ...] = ()  # that an event of a requested stop may give
        self.named: tuple[int, ...] = ()  # the ranks of the newest fault
        self.plan, self.planned = FaultPlan(root), list[int]()  # of faults in the ranks, and the numbers of them
        self.launchers: list[subprocess.Popen] = []  # of each node
        self._events, self._deadline = NewEvents(self.folder.events), deadline
        self._memory_before = shared_memory()

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, *_: object) -> None:
        self.job.kill(*self.launchers)

    # -- the job --

    @property
    def launcher(self) -> subprocess.Popen | None:
        """The newest command; of several nodes, that of the first one."""
        return self.launchers[0] if self.launchers else None

    def start(self) -> None:
        """Give the command of the run, which continues what is there, on each of its nodes."""
        self.look()
        self.trains = False
        self.launchers = [self.start_node(number) for number in range(self.run.config.launch.nodes)]

    def start_node(self, number: int) -> subprocess.Popen:
        """Give the command of the run on its node `number`."""
        job = replace(self.job, variables={**(self.job.variables or {}), **self.run.devices(number)})
        with self.printed.open("ab") as file:
            return job.start(file)

    def follow(self, enough: Callable[[], bool] = lambda: False) -> bool:
        """Follow the job until `enough()` holds, or it ends, or makes no progress until the deadline, and is then
        killed. Returns `enough()`."""
        last, deadline = self.step, time.monotonic() + self._deadline
        while any(one.poll() is None for one in self.launchers):
            self.look()
            if enough():
                return True
            if self.step != last:
                last, deadline = self.step, time.monotonic() + self._deadline
            if time.monotonic() > deadline:
                self.verdicts.judge("o6", self.where or self.name, f"no progress for {self._deadline:.0f} s")
                self.job.kill(*self.launchers)
            time.sleep(_POLL_SECONDS)
        self.look()
        return enough()

    def finish(self) -> int:
        """Follow the job to its end. Returns its exit code, which has to be that of each node."""
        self.follow()
        codes = [one.wait() for one in self.launchers]
        if len(codes) > 1:
            self.judge("o6", "" if len(set(codes)) == 1 else f"exit codes of nodes {codes}: {self.last_words()}")
        self.codes.append(codes[0])
        gone_within(END_SECONDS, self.job.processes)
        self.look()
        return self.codes[-1]

    def look(self) -> None:
        """Take in what is new in the log, and show it."""
        for event in self._events.read():
            if event["kind"] == events.STEP:
                self.step, self.reached, self.trains = event["step"], max(self.reached, event["step"]), True
            elif event["kind"] == events.RUN_STARTED:
                self.step = event["from_step"]
            elif event["kind"] == events.CHECKPOINT_REFUSED:
                self.output.say(f"  refused    the checkpoint of step {event['step']}: {event['reason']}")
            elif event["kind"] == events.GUARD:
                self.output.say(f"  measure    {described(measure_of(event))}")
            elif event["kind"] == events.STATE_REPLAYED:
                ranks = ", ".join(map(str, event["ranks"]))
                self.output.say(
                    f"  replayed   {event['verdict']}: rank {ranks}, as the same steps show when trained again"
                )
            for fault in self.recoveries[-1:]:  # what comes after another fault may be about that
                self._show(fault, event)
        text = f"{self.name}  step {self.step} of {self.run.steps}"
        if self.recoveries and self.recoveries[-1].recovered is None:
            text += f"  {self.where}, {max(time.time() - self.recoveries[-1].injected, 0.0):.0f} s ago"
        self.output.progress(self.step / self.run.steps, text)

    def _show(self, fault: Recovery, event: dict) -> None:
        detected, recovered = fault.detected, fault.recovered
        fault.take(event)
        if fault.detected is not None and detected is None:
            who = "the job" if event.get("rank") is None else f"rank {event['rank']}"
            own_words = fault.quiet or fault.found_by
            found = f"{fault.by}: {fault.cause}" if own_words else f"the {fault.by}: {who} {fault.cause}"
            self.output.say(f"  detected   after {format_seconds(fault.detected)} by {found}")
        if fault.recovered is not None and recovered is None:
            self.output.say(f"  recovered  after {format_seconds(fault.recovered)}: step {event['step']} is trained")

    def last_words(self) -> str:
        """Return the end of what the commands printed."""
        return self.printed.read_text(errors="replace")[-_LAST_CHARACTERS:]

    # -- faults --

    def injects(self, what: str, ranks: Iterable[int] = (), *, quiet: bool = False, found_by: str = "") -> None:
        """Record a fault that comes now. what: for people. ranks: that it is about. quiet: no process ends by it.
        found_by: the kind of event that alone reports it, as for Recovery."""
        self.named = tuple(ranks)
        self.where = f"{what} (last logged step: {self.step})"
        self.recoveries.append(Recovery(time.time(), self.reached, quiet, found_by))
        log = EventLog(self.folder.events)  # first, so that the event is before the effects
        log.write(events.DRILL, action=what, rank=self.named[0] if len(self.named) == 1 else None, step=self.step)
        log.close()
        self.output.say(f"  injected   {self.where}")

    def plant(self, what: str, fault: PlannedFault) -> None:
        """FaultPlan a fault in the ranks, which comes with the next step that is free. what: for people."""
        ranks = [fault.rank] if fault.kind in OF_ONE_RANK else ()
        found_by = events.STRAGGLER if fault.kind == "slow" else ""
        self.injects(what, ranks, quiet=fault.kind not in LOUD, found_by=found_by)
        self.planned.append(self.plan.add(fault))

    def signal_ranks(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Send a signal to ranks. It is the fault."""
        alive, ranks = self.job.ranks(), tuple(ranks)
        self.injects(f"{number.name} of {_ranks(ranks, self.run.ranks)}", ranks)
        send(number, [alive[rank] for rank in ranks if rank in alive])

    def any_rank(self) -> int:
        """Return a random rank."""
        return self.random.randrange(self.run.ranks)

    # -- the judgment --

    def judge(self, oracle: str, finding: str) -> None:
        """Record that an oracle was asked about the newest fault. finding: what is wrong, "" if nothing."""
        self.verdicts.judge(oracle, self.where or self.name, finding)

    def judge_end(self, code: int, right: Iterable[int] | None = None) -> None:
        """Judge the exit code of a command. right: those that it may have; None: that of the last step."""
        allowed = {self.run.done_code} if right is None else set(right)
        self.judge("o6", "" if code in allowed else f"exit code {code}: {self.last_words()}")

    def found(self, *kinds: str) -> list[dict]:
        """Return the events of these kinds."""
        return list(read_events(self.folder.events, *kinds))

    def found_late(self, fault: Mapping[str, Any]) -> str:
        """Return by how much a hang was found later than the watchdog has to; "" if it was not. fault: its event."""
        limit = max(self.run.config.launch.watchdog_seconds, _LIMIT_STEPS * self.longest_step()) + self.run.hang_seconds
        return f"found after {fault['seconds']:.1f} s, more than {limit:.1f} s" if fault["seconds"] > limit else ""

    def not_planted(self) -> str:
        """Return that faults which were to come from within the ranks did not; "" if all did."""
        faults = self.plan.faults()
        missing = [faults[number].kind for number in self.planned if self.plan.planted(number) is None]
        return f"it was not injected: {missing} is not planted" if missing or not self.planned else ""

    def longest_step(self) -> float:
        """Return the longest time [s] between two logged steps of an attempt, before the newest fault."""
        log = [e for e in self.found(events.STEP, events.RUN_STARTED) if e["time"] <= self.recoveries[-1].injected]
        pairs = itertools.pairwise(log)
        return max((b["time"] - a["time"] for a, b in pairs if b["kind"] == events.STEP), default=0.0)

    def judge_recovered(self, reference: RunFacts, most_redone: int, since: int | None = None) -> None:
        """Judge O1, O2, O3, O7 and O8 of the run, which has ended. most_redone: steps that may be done twice. since: as
        in the function of this name."""
        self.judge("o7", o7(self.folder, self.job.temporary, self._memory_before))
        judge_recovered(self.verdicts, self.folder, self.where or self.name, reference, most_redone, since=since)
        for fault in self.recoveries:
            self.verdicts.detect += [] if fault.detected is None else [fault.detected]
            self.verdicts.recover += [] if fault.recovered is None else [fault.recovered]

    def most_redone(self, intervals: int) -> int:
        """Return how many steps may be done twice if those of `intervals` intervals between checkpoints may. A save
        that is being written when the fault comes is lost with it."""
        late = 2 if self.run.config.checkpoint.mode == "async" and intervals else 1
        return self.run.interval * (intervals * late + len(self.found(events.CHECKPOINT_SKIPPED)))


def judge_recovered(
    verdicts: Verdicts,
    folder: RunFolder,
    where: str,
    reference: RunFacts,
    most_redone: int,
    *,
    all_layouts: bool = False,
    earlier: Trace | None = None,
    since: int | None = None,
) -> None:
    """Judge O1, O2, O3 and O8 of a run that has ended.

    where: the case, for people. most_redone: steps that may be done twice. all_layouts: random states are not
    compared, because another number of ranks has others. earlier: the trace of attempts whose log was lost. since: the
    first step that the run may have trained otherwise when it trained it again, as without a block of data that was
    whole before; from there on, the last time that a step was logged counts.
    """
    verdicts.restored(folder)
    try:
        facts = read_facts(folder)
    except (IngotError, IndexError) as error:
        verdicts.judge("o2", where, f"no state: {error}")
        return
    # A step without an update was logged by the run that decided so, and not by one that was directed to.
    whole = _joined(earlier or {}, facts.trace)
    trace = {step: found for step, found in whole.items() if step in reference.trace or step not in facts.untrained}
    verdicts.untrained = tuple(sorted(facts.untrained))
    void = facts.void | {step for step in trace if since is not None and step >= since}
    verdicts.judge("o1", where, o1(trace, reference.trace, void))
    ours, theirs = facts.state, reference.state
    if all_layouts:
        ours, theirs = facts.state_of_all_layouts, reference.state_of_all_layouts
    verdicts.judge("o2", where, o2(ours, theirs))
    verdicts.judge("o3", where, o3(facts.samples, reference.samples))
    twice = redone(whole)
    verdicts.redone = max(verdicts.redone, twice)
    finding = f"{twice} steps were done twice, more than {most_redone}" if twice > most_redone else ""
    verdicts.judge("o8", where, finding)


def _joined(first: Trace, second: Trace) -> Trace:
    return {step: first.get(step, []) + second.get(step, []) for step in first | second}


def _ranks(ranks: tuple[int, ...], world: int) -> str:
    if len(ranks) == world > 1:
        return f"all {world} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
