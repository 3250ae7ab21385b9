"""Faults of the program of a rank: it holds its interpreter lock, waits for ever, leaves out a collective, fails at the
same step in each attempt, or is slow. No torch.

Nothing outside of a rank can cause these: the callback of planted.py does, which the copies alone have.
"""

from collections.abc import Callable

from ingot.drill.fault import DrillFault
from ingot.drill.guarded import planted, with_settings
from ingot.drill.plan import FaultKind, PlannedFault
from ingot.drill.trial import DrilledRun, Trial
from ingot.errors import RunFailed
from ingot.machine.facts import find_gpus
from ingot.schema import events
from ingot.schema.launch import SAME
from ingot.schema.run import RunConfig

_SLOW_STEPS, _WITHIN = 14, 10  # steps of a slow rank, and those within which it has to be named
_LEAST_SECONDS = 0.1  # that a step of a slow rank takes longer: more than the jitter of a small run on a busy machine
_GAVE_UP = frozenset({RunFailed.exit_code})
_BEFORE = 4  # steps: an earliest fault, and the line before it


# -- what a run needs --


def several(config: RunConfig) -> str:
    """Return why a run cannot have a fault that takes several ranks; "" if it can."""
    return "" if config.parallel.world_size > 1 else "the run has one rank"


def _has_peers(config: RunConfig) -> str:
    """Return why a slow rank of a run cannot be found; "" if it can."""
    parallel, steps = config.parallel, config.train.steps
    if not config.launch.straggler_factor:
        return "slow ranks are not looked for (launch.straggler_factor = 0)"
    if parallel.world_size == parallel.pp * parallel.cp:
        return "no two ranks have the same work"
    if find_gpus():
        return "the host cannot time ranks on GPUs"
    least = _BEFORE + _SLOW_STEPS
    return f"it needs {least} steps, and the copy has {steps}" if steps < least else ""


# -- faults --


def _plants(kind: FaultKind, what: str) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        rank = trial.any_rank()
        trial.plant(what.format(rank=rank), PlannedFault(kind=kind, rank=rank, latest=trial.run.steps - 1))

    return inject


def _slow(trial: Trial) -> None:
    rank, seconds = trial.any_rank(), max(trial.run.step_seconds, _LEAST_SECONDS)
    latest = trial.run.steps - _SLOW_STEPS
    fault = PlannedFault(kind="slow", steps=_SLOW_STEPS, rank=rank, seconds=seconds, once=False, latest=latest)
    trial.plant(f"rank {rank} takes {seconds:.2g} s longer in each of {_SLOW_STEPS} steps", fault)


def _repair(trial: Trial) -> None:
    for number in trial.planned:
        trial.plan.repair(number)
    trial.output.say("  repaired   the program of the rank has the fault no more")


def _starts_again(run: DrilledRun) -> DrilledRun:
    """Return the run with as many restarts as it takes to see that the same failure comes again."""
    return with_settings(run, {"launch.max_restarts": max(run.config.launch.max_restarts, SAME)})


# -- what has to be reported --


def _hang_found(named: str) -> Callable[[Trial], str]:
    """Return the judge of a hang. named: a part of its cause."""

    def expects(trial: Trial) -> str:
        if problem := trial.not_planted():
            return problem
        faults = trial.found(events.FAULT)
        right = [(e["detected_by"], e["rank"], named in e["cause"]) for e in faults]
        if right != [("watchdog", trial.named[0], True)]:
            causes = [(e["detected_by"], e["rank"], e["cause"]) for e in faults]
            return f"faults {causes}, not one hang of rank {trial.named[0]}"
        return trial.found_late(faults[0])

    return expects


def _differs(trial: Trial) -> str:
    if problem := trial.not_planted():
        return problem
    faults, printed = [event["cause"] for event in trial.found(events.FAULT)], trial.printed.read_text(errors="replace")
    right = len(faults) == 1 and "E-COLLECTIVES-DIFFER" in printed
    return "" if right else f"faults {faults}, not one that is named as a bug: {trial.last_words()}"


def _planted_at(trial: Trial) -> int | None:
    """Return the step of the fault; None if it did not come. Ranks whose collectives no longer fit may get each other's
    numbers, in log lines too, before that is noticed."""
    facts = trial.plan.planted(trial.planned[-1]) if trial.planned else None
    return None if facts is None else facts["step"]


def _repeats(trial: Trial) -> str:
    if problem := trial.not_planted():
        return problem
    faults = [(e["rank"], "SIGABRT" in e["cause"]) for e in trial.found(events.FAULT)]
    given_up = "E-RUN-REPEATS" in trial.printed.read_text(errors="replace")
    right = faults == [(trial.named[0], True)] * SAME and given_up
    return "" if right else f"faults (rank, SIGABRT) {faults}, not {SAME} and then the end: {trial.last_words()}"


def _slow_found(trial: Trial) -> str:
    if problem := trial.not_planted():
        return problem
    first, rank = _planted_at(trial), trial.named[0]
    assert first is not None
    named = [(e["step"], e["rank"], e["phase"]) for e in trial.found(events.STRAGGLER) if not e["ended"]]
    soon = [one for one in named if first <= one[0] < first + _SLOW_STEPS]
    if not soon or any(one[1:] != (rank, "compute") for one in soon):
        return f"slow ranks (step, rank, phase) {named}, not rank {rank} in its compute from step {first} on"
    if soon[0][0] >= first + _WITHIN:
        return f"rank {rank}, slow from step {first} on, was named in step {soon[0][0]}: not within {_WITHIN} steps"
    faults = [event["cause"] for event in trial.found(events.FAULT)]
    return f"a fault was reported: {faults}" if faults else ""


PROGRAM_FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        id="RS04",
        injects="a rank that holds its interpreter lock for ever",
        inject=_plants("hold", "rank {rank} holds its interpreter lock"),
        expects=_hang_found("interpreter lock"),
        soaks=False,
        planted=True,
        prepare=planted,
    ),
    DrillFault(
        id="RS04 wait",
        injects="a rank that waits for something that never comes",
        inject=_plants("wait", "rank {rank} waits for ever"),
        expects=_hang_found(""),
        needs=several,
        soaks=False,
        planted=True,
        prepare=planted,
    ),
    DrillFault(
        id="RS05",
        injects="a rank leaves out a collective: it stops; the program is repaired",
        inject=_plants("leave", "rank {rank} leaves out a collective"),
        expects=_differs,
        wrong_from=_planted_at,
        codes=_GAVE_UP,
        repair=_repair,
        needs=several,
        soaks=False,
        planted=True,
        prepare=planted,
    ),
    DrillFault(
        id="RS33",
        injects="a rank ends at the same step in each attempt: it is given up; the program is repaired",
        inject=_plants("abort", "rank {rank} ends by SIGABRT in each attempt"),
        expects=_repeats,
        codes=_GAVE_UP,
        repair=_repair,
        intervals=SAME,
        soaks=False,
        planted=True,
        prepare=lambda run, place: planted(_starts_again(run), place),
    ),
    DrillFault(
        id="RS35",
        injects="a rank that is slow in some steps: it is named, and the run goes on",
        inject=_slow,
        expects=_slow_found,
        intervals=0,
        room=lambda config: _SLOW_STEPS + 1,
        needs=_has_peers,
        soaks=False,
        planted=True,
        prepare=planted,
    ),
)
