"""Quiet faults: wrong bits, gradients that are not finite, a rate that is too high, bad documents. No torch.

No process ends by them. The guard (docs/guard.md), the hashes of the state or the reader of the data find them, and the
run goes back, skips a step, or passes data. They come from within the ranks, by the callback of planted.py, which the
copies alone have, or as damage to tokens of their own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.drill.fault import DrillFault
from ingot.drill.guarded import (
    READY,
    WARM_UP,
    directed_to_skip,
    hashes_in_each_step,
    planted,
    with_settings,
)
from ingot.drill.oracles import read_facts
from ingot.drill.plan import FaultKind, PlannedFault
from ingot.drill.shards import SHARD_FAULTS
from ingot.drill.trial import DrilledRun, Trial
from ingot.schema import events
from ingot.schema.alert import UNCHANGED
from ingot.schema.guard_record import AGAIN, PASS, Measure, read_measures
from ingot.schema.run import RunConfig

RATE_FACTOR = 50.0  # times optim.lr
_BITS = 64
_LARGE = 1 << 40
_NOT_FINITE = "gradient not finite"
_STILL = 4  # updates without a change before the alert


# -- what a run needs --


def _hashed(config: RunConfig) -> str:
    if not config.guard.hash_every:
        return "the state of the run is not hashed (guard.hash_every = 0)"
    return "the weights are in files (parallel.offload = 'nvme')" if config.parallel.offload == "nvme" else ""


def _computed_twice(config: RunConfig) -> str:
    """Return why no second rank can compute the gradients of a rank."""
    if config.parallel.data_ranks <= config.parallel.expert_parts:
        return "no other rank can compute the same part of the batch (guard.recompute_every)"
    return _hashed(config)


def _alerts(config: RunConfig) -> str:
    if not config.guard.watches:
        return f"nothing is watched (guard.preset = '{config.guard.preset}')"
    least, steps = _still_steps(config) + WARM_UP, config.train.steps
    return f"it needs {least} steps, and the copy has {steps}" if steps < least else ""


def _guarded(config: RunConfig) -> str:
    if not config.guard.acts:
        return f"the guard skips no updates (guard.preset = '{config.guard.preset}')"
    return "in fp16 the loss scale answers to large gradients" if config.train.precision == "fp16" else ""


def _room(needed: Callable[[RunConfig], int]) -> Callable[[RunConfig], str]:
    """Return why a run lacks the steps that a fault needs after the first ones, in `needed`."""

    def lacks(config: RunConfig) -> str:
        least = _judged(config) + needed(config)
        steps = config.train.steps
        return _guarded(config) or (f"it needs {least} steps, and the copy has {steps}" if steps < least else "")

    return lacks


def _judged(config: RunConfig) -> int:
    """Return the first step before which the guard knows enough healthy ones to judge the size of a step."""
    return max(READY, min(config.schedule.warmup_steps, WARM_UP)) + 2


def _row(config: RunConfig) -> int:
    return config.guard.in_a_row


def _of_one(config: RunConfig) -> int:
    """Return the steps after a fault in which it is found, and trained again."""
    return 2 * _row(config) + 2


def _of_three(config: RunConfig) -> int:
    return 4 * _row(config) + 4


def _all_of_it(config: RunConfig) -> str:
    if config.guard.recompute_every:
        return "the batch is read a second time, without the document (guard.recompute_every)"
    return _hashed(config) or _room(_of_three)(config)


# -- faults --


def _wrong_bit(kind: FaultKind, where: str) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        rank, random = trial.any_rank(), trial.random
        piece, element, bit = random.randrange(_LARGE), random.randrange(_LARGE), random.randrange(_BITS)
        latest = trial.run.steps - 1
        fault = PlannedFault(kind=kind, rank=rank, piece=piece, element=element, bit=bit, latest=latest)
        trial.plant(f"a wrong bit in {where} of rank {rank}", fault)

    return inject


_flip = _wrong_bit("flip", "a weight")


def _still(trial: Trial) -> None:
    steps = _still_steps(trial.run.config)
    fault = PlannedFault(kind="still", steps=steps, latest=trial.run.steps - steps)
    trial.plant(f"no learning rate in {steps} steps", fault)


def _not_finite_once(trial: Trial) -> None:
    trial.plant("NaN in the gradient of a step", PlannedFault(kind="nan", once=False))


def _not_finite_in_a_row(trial: Trial) -> None:
    steps = _row(trial.run.config)
    fault = PlannedFault(kind="nan", steps=steps, latest=trial.run.steps - steps)
    trial.plant(f"NaN in the gradients of {steps} steps", fault)


def _rate(trial: Trial) -> None:
    earliest, latest = _judged(trial.run.config), trial.run.steps - _row(trial.run.config) - 1
    fault = PlannedFault(kind="rate", factor=RATE_FACTOR, earliest=earliest, latest=latest)
    trial.plant(f"{RATE_FACTOR:g} times the learning rate in a step", fault)


def _document(trial: Trial) -> None:
    steps = _row(trial.run.config)
    what = f"a document of one repeated token in the data of {steps} steps"
    trial.plant(what, PlannedFault(kind="document", steps=steps))


def _together(trial: Trial) -> None:
    for inject in (_document, _rate, _flip):
        inject(trial)
        if not trial.follow(lambda: trial.recoveries[-1].recovered is not None):
            return


# -- what has to be reported --


def _planted(trial: Trial, kind: FaultKind) -> dict[str, Any]:
    """Return the step and the place of the fault of this kind, which was planted."""
    faults = trial.plan.faults()
    found = (trial.plan.planted(number) for number in trial.planned if faults[number].kind == kind)
    return next(facts for facts in found if facts is not None)


def _measures(trial: Trial) -> list[Measure]:
    return read_measures(trial.folder.guard)


def _found_in(trial: Trial) -> set[int]:
    return {event["step"] for event in trial.found(events.FINDING)}


def _flip_found(trial: Trial, kind: FaultKind = "flip") -> str:
    if problem := trial.not_planted():
        return problem
    facts, rank = _planted(trial, kind), trial.named[0]
    damaged = [(e["step"], e["rank"], e["bit"]) for e in trial.found(events.STATE_DAMAGED)]
    right = [(facts["step"], rank, facts["bit"])]
    if kind == "gradient":  # two ranks compute it, and both are suspects until the steps are trained again
        damaged = [one for one in damaged if one[1] == rank] if {one[::2] for one in damaged} == {right[0][::2]} else []
    if damaged != right:
        return f"damage (step, rank, bit) {damaged} was reported, not {right}"
    replayed = [(e["verdict"], e["ranks"], e["named"]) for e in trial.found(events.STATE_REPLAYED)]
    return "" if replayed == [("transient", [rank], True)] else f"the replay says {replayed}, not that it was transient"


def _flip_alone_found(trial: Trial) -> str:
    others = _found_in(trial)
    return _flip_found(trial) or (f"the guard found trouble in the steps {sorted(others)}" if others else "")


def _gradient_found(trial: Trial) -> str:
    return _flip_found(trial, "gradient")  # the guard may find the step, too: its gradient is wrong


def _moment_found(trial: Trial) -> str:
    return _flip_found(trial, "moment")


def _reported(trial: Trial) -> str:
    if problem := trial.not_planted():
        return problem
    first, steps = _planted(trial, "still")["step"], _still_steps(trial.run.config)
    alerts = [event["step"] for event in trial.found(events.ALERT) if event["alert"] == UNCHANGED]
    if not any(first < step <= first + steps for step in alerts):
        return f"alerts in the steps {alerts}, and none in the {steps} steps without a learning rate from {first} on"
    others = _found_in(trial)
    return f"the guard found trouble in the steps {sorted(others)}" if others or _measures(trial) else ""


def _skipped_once(trial: Trial) -> str:
    if problem := trial.not_planted():
        return problem
    at = _planted(trial, "nan")["step"]
    found = [(event["step"], event["found"], event["skipped"]) for event in trial.found(events.FINDING)]
    right = [(at, [_NOT_FINITE], True)]
    if found != right:
        return f"(step, finding, skipped) {found} was reported, not {right}"
    untrained, measures = read_facts(trial.folder).untrained, _measures(trial)
    return "" if untrained == {at} and not measures else f"skipped {sorted(untrained)}, measures {measures}"


def _trained_again(trial: Trial) -> str:
    if problem := trial.not_planted():
        return problem
    rows = [(one.action, one.first, one.last) for one in _measures(trial)]
    first = _planted(trial, "nan")["step"]
    right = [(AGAIN, first, first + _row(trial.run.config) - 1)]
    return "" if rows == right else f"the guard took the measures {rows}, not {right}"


def _rate_found(trial: Trial) -> str:
    return trial.not_planted() or _rate_measured(trial, _measures(trial))


def _rate_measured(trial: Trial, measures: list[Measure]) -> str:
    at = _planted(trial, "rate")["step"]
    rows = [(one.action, one.first) for one in measures]
    # The update of the step itself harms the weights, which the loss of a later one shows.
    right = len(rows) == 1 and rows[0][0] == AGAIN and at < rows[0][1] <= at + _row(trial.run.config)
    return "" if right else f"the guard took the measures {rows} after a spike of the rate in step {at}"


def _all_found(trial: Trial) -> str:
    if (problem := trial.not_planted()) or len(trial.planned) < 3:
        return problem or f"only {len(trial.planned)} of three faults were injected: the run ended before"
    first, measures = _planted(trial, "document")["step"], _measures(trial)
    last = first + _row(trial.run.config) - 1
    rows = [(one.action, one.first, one.last) for one in measures[:2]]
    if rows != [(AGAIN, first, last), (PASS, first, last)]:
        return f"the guard took the measures {rows} against a document in the steps {first}-{last}"
    untrained = sorted(read_facts(trial.folder).untrained)
    if untrained != list(range(first, last + 1)):
        return f"the steps {untrained} changed no weights, not {first}-{last}"
    return _rate_measured(trial, measures[2:]) or _flip_found(trial)


def _goes_back(times: int) -> Callable[[RunConfig], int]:
    """Return the steps that are done twice because the guard went back so often: it goes to a proven checkpoint."""
    return lambda config: times * (config.guard.proven_steps + _row(config) + 2)


def _computed_in_each_step(config: RunConfig) -> dict[str, Any]:
    return {**hashes_in_each_step(config), "guard.recompute_every": 1}


def _still_soon(config: RunConfig) -> dict[str, Any]:
    return {"guard.still_steps": min(config.guard.still_steps, _STILL)}


def _still_steps(config: RunConfig) -> int:
    """Return the steps without a learning rate: the first look at the weights is after one of them."""
    return min(config.guard.still_steps, _STILL) + 2 * max(config.watch.log_every, 1)


def _planted_with(settings: Callable[[RunConfig], dict[str, Any]]) -> Callable[[DrilledRun, Path], DrilledRun]:
    return lambda run, place: planted(with_settings(run, settings(run.config)), place)


QUIET_FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        id="RS19",
        injects="a wrong bit in a weight of a rank",
        inject=_flip,
        expects=_flip_alone_found,
        saves=1,
        needs=_hashed,
        planted=True,
        prepare=_planted_with(hashes_in_each_step),
        settings=hashes_in_each_step,
    ),
    DrillFault(
        id="RS20",
        injects="a wrong bit in a gradient of a rank, before it is reduced",
        inject=_wrong_bit("gradient", "a gradient"),
        expects=_gradient_found,
        saves=1,
        needs=_computed_twice,
        planted=True,
        prepare=_planted_with(_computed_in_each_step),
        settings=_computed_in_each_step,
    ),
    DrillFault(
        id="RS21",
        injects="a wrong bit in the optimizer's state of a rank",
        inject=_wrong_bit("moment", "a moment"),
        expects=_moment_found,
        saves=1,
        needs=_hashed,
        planted=True,
        prepare=_planted_with(hashes_in_each_step),
        settings=hashes_in_each_step,
    ),
    DrillFault(
        id="RS22",
        injects="NaN in the gradient of a step: its update is skipped",
        inject=_not_finite_once,
        expects=_skipped_once,
        intervals=0,
        needs=_guarded,
        soaks=False,
        planted=True,
        prepare=planted,
        directed=directed_to_skip,
    ),
    DrillFault(
        id="RS22 row",
        injects="NaN in the gradients of steps in a row: they are trained again",
        inject=_not_finite_in_a_row,
        expects=_trained_again,
        more_redone=_goes_back(1),
        saves=1,
        room=_of_one,
        needs=_guarded,
        planted=True,
        prepare=planted,
    ),
    DrillFault(
        id="RS23",
        injects="a learning rate that is too high in a step: it is trained again",
        inject=_rate,
        expects=_rate_found,
        more_redone=_goes_back(1),
        saves=1,
        first=_judged,
        room=_of_one,
        needs=_room(_of_one),
        planted=True,
        prepare=planted,
        by_size=True,
    ),
    DrillFault(
        id="RS23 together",
        injects="a bad document, which is passed; a rate that is too high; a wrong bit",
        inject=_together,
        expects=_all_found,
        intervals=4,
        more_redone=_goes_back(3),
        saves=1,
        first=_judged,
        room=lambda config: config.train.steps,  # it begins as early as it can: three faults need many steps
        needs=_all_of_it,
        soaks=False,
        planted=True,
        prepare=planted,
        by_size=True,
        directed=directed_to_skip,
    ),
    DrillFault(
        id="RS24",
        injects="no learning rate in some steps: an alert, and the run goes on",
        inject=_still,
        expects=_reported,
        intervals=0,
        room=_still_steps,
        needs=_alerts,
        planted=True,
        prepare=_planted_with(_still_soon),
        settings=_still_soon,
        directed=directed_to_skip,
    ),
    *SHARD_FAULTS,
)
