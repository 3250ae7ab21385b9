"""A fault of a drill as data, and how a copy of a run gets it: played to the end of the copy, and judged. No torch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.drill.oracles import RunFacts
from ingot.drill.trial import DrilledRun, Trial
from ingot.schema.run import RunConfig
from ingot.trainer.checkpoint.manifest import candidate_folders


def _as_it_is(run: DrilledRun, place: Path) -> DrilledRun:
    return run


@dataclass(frozen=True, kw_only=True)
class DrillFault:
    """A fault that any run can have.

    id: the row of the board, and a word if it has several. injects: the fault, for people. inject: carries it out on a
    job that trains. expects: returns what is wrong in what was reported, "" if nothing. codes: the exit codes with
    which the job may end by it, and is then continued by the same command; none: the job survives it. repair: undoes
    the damage before that. intervals: the intervals between checkpoints whose steps may be done twice; more_redone: the
    steps besides them. saves: the checkpoints that the run needs before it. first, room: the steps before it and after
    it, at least. needs: returns why a run cannot have it, "" if it can; its `train.steps` are those of the copy.
    wrong_from: returns the first step whose log lines the fault itself makes wrong, until it is trained again; None
    without one. smoke: it is a part of the short drill. soaks: a soak draws it, too. settings: of the guard, which
    change no bits on a CPU (guarded.facts_with), that its copies have, and a soak with it. may_end:
    further exit codes with which a command of a soak may end by it; the damage stays, and the next command finds it.
    one_of: a name that several have; each round of a soak has one of these, at most once before its damage is repaired,
    and is prepared for it.

    planted: it comes from within the ranks (drill/planted.py). prepare: returns the run of the copy in the folder
    `place`, with the settings that the fault needs. by_size: the guard finds it by the size of a step, for which the
    copy has other settings (drill/guarded.py). directed: trains a second copy that is directed
    to do from its start what the first one decided, and returns its facts, or None if that failed; the copy is compared
    with it instead of with the undisturbed run.
    """

    id: str
    injects: str
    inject: Callable[[Trial], None]
    expects: Callable[[Trial], str]
    codes: frozenset[int] = frozenset()
    repair: Callable[[Trial], None] = lambda trial: None
    intervals: int = 1
    more_redone: Callable[[RunConfig], int] = lambda config: 0
    saves: int = 0
    first: Callable[[RunConfig], int] = lambda config: 2
    room: Callable[[RunConfig], int] = lambda config: 0
    needs: Callable[[RunConfig], str] = lambda config: ""
    wrong_from: Callable[[Trial], int | None] = lambda trial: None
    smoke: bool = False
    soaks: bool = True
    settings: Callable[[RunConfig], Mapping[str, Any]] = lambda config: {}
    may_end: frozenset[int] = frozenset()
    one_of: str = ""
    planted: bool = False
    prepare: Callable[[DrilledRun, Path], DrilledRun] = _as_it_is
    by_size: bool = False
    directed: Callable[[Trial], RunFacts | None] | None = None


def play(fault: DrillFault, trial: Trial, reference: RunFacts) -> None:
    """Carry out a fault once, at a random time, on a run that starts now; continue it to its end, and judge it."""
    run = trial.run
    first = max(fault.saves * run.interval + 2, fault.first(run.config))
    last = min(run.steps * 2 // 3, run.steps - fault.room(run.config))
    at = trial.random.randrange(first, max(last, first + 1))
    trial.start()
    if not trial.follow(lambda: trial.step >= at and can_have(fault, trial)):
        trial.finish()
        trial.judge("o6", f"it ended before step {at} with code {trial.codes[-1]}: {trial.last_words()}")
        return
    time.sleep(trial.random.uniform(0, min(run.step_seconds, 1.0)))  # somewhere in the next step
    fault.inject(trial)
    code = trial.finish()
    if fault.codes:
        trial.judge_end(code, fault.codes)
        fault.repair(trial)
        trial.start()
        code = trial.finish()
    trial.judge_end(code)
    trial.judge("o6", fault.expects(trial))
    most = trial.most_redone(fault.intervals) + fault.more_redone(run.config)
    if fault.directed is None:
        trial.judge_recovered(reference, most, fault.wrong_from(trial))
    elif code == run.done_code and (directed := fault.directed(trial)) is not None:
        trial.judge_recovered(directed, most)


def can_have(fault: DrillFault, trial: Trial) -> bool:
    """Return whether the job can have the fault now: its ranks run, and the checkpoints are there."""
    saves = candidate_folders(trial.folder.checkpoints) if fault.saves else []
    return len(saves) >= fault.saves and len(trial.job.ranks()) == trial.run.ranks
