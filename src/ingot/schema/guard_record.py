"""guard.json of a run folder: the measures that the guard took, oldest first. Checkpoints have a copy.

The batches that training passes, and the learning rate, follow from this record and the run file: a run that continues
takes the same way. No torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.errors import DataError
from ingot.schema.sealed import sealed, unsealed
from ingot.schema.step_ranges import StepSpan, merged
from ingot.storage import write_json

Action = Literal["again", "pass", "earlier", "lower", "accept", "stop", "failed"]
RetrainVerdict = Literal["data", "hardware"]  # of steps that were trained again: found again, or not
AGAIN: Action = "again"
PASS: Action = "pass"
EARLIER: Action = "earlier"
LOWER: Action = "lower"
ACCEPT: Action = "accept"
STOP: Action = "stop"
FAILED: Action = "failed"  # no measure: the run ended there, and the weights before are in doubt
_MEASURES = "measures"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure that was taken because updates of the steps first..last were skipped: those of a row, or a share.

    skipped: how many of these updates were skipped, if it was a share; 0: it was a row, so no other was between them.
    found: the kinds of what was found in them. proven_to: the last step that had guard.proven_steps steps after it
    when the trouble began: weights of later ones are in doubt. With "earlier" and "lower", `first` is one step earlier.
    lr_factor, clip_factor, lr_last: with "lower", the factors of the learning rate and of the limit of the gradient
    norm from step `first` to `lr_last`. lr: optim.lr when the measure was taken, 0 if the record does not have it. The
    factors hold for this rate alone: with another one, which its user chose, they have ended.
    """

    action: Action
    first: int
    last: int
    found: tuple[str, ...]
    skipped: int = 0
    proven_to: int = 0
    lr_factor: float = 1.0
    clip_factor: float = 1.0
    lr_last: int = 0
    lr: float = 0.0

    @property
    def passes(self) -> bool:
        """True if the data of the steps are passed from here on."""
        return self.action in (PASS, EARLIER, LOWER)

    def is_of(self, lr: float) -> bool:
        """Return whether the measure was taken with optim.lr = `lr`, as far as its record says."""
        return self.lr in (0.0, lr)

    def lowers(self, step: int, lr: float) -> bool:
        """Return whether the factors hold for `step` of a run with optim.lr = `lr`."""
        return self.action == LOWER and self.first <= step <= self.lr_last and self.is_of(lr)


@dataclass(frozen=True, kw_only=True)
class SanityState:
    """The fixed batch of held-out text (trainer/guard/sanity.py). step, loss: of the last checkpoint without doubt;
    None: there is none, or its loss was not finite. doubted: how many checkpoints since then are suspect. batch: the
    identity of the batch; "": not recorded. unfit: why the batch judges no checkpoint; "": it does. unfit_gap: the
    guard.sanity_gap that made it unfit; 0: another reason. unlike: at that step, its loss was that far above the loss
    of the training batches.
    """

    step: int = 0
    loss: float | None = None
    doubted: int = 0
    batch: str = ""
    unfit: str = ""
    unfit_gap: float = 0.0
    unlike: bool = False


@dataclass(frozen=True, kw_only=True)
class GuardState:
    """The guard in a checkpoint. measures: those taken so far. row: the steps up to the checkpoint whose updates were
    skipped, one after the other, and no measure was taken yet. row_found: what was found in them. skipped: the steps of
    the last guard.calm_steps whose updates were skipped, and what was found in each. losses, norms: of the last healthy
    steps, the norms as logarithms. sanity: of held-out text.
    """

    measures: tuple[Measure, ...] = ()
    row: tuple[int, ...] = ()
    row_found: tuple[str, ...] = ()
    skipped: tuple[tuple[int, tuple[str, ...]], ...] = ()
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    sanity: SanityState = SanityState()


def guard_state(values: Mapping[str, Any]) -> GuardState:
    """Return the GuardState whose JSON is `values`. Raises KeyError, TypeError or ValueError for other values."""
    return GuardState(
        measures=tuple(map(measure_of, values["measures"])),
        row=tuple(map(int, values["row"])),
        row_found=tuple(map(str, values["row_found"])),
        skipped=tuple((int(step), tuple(map(str, found))) for step, found in values.get("skipped", ())),
        losses=tuple(map(float, values["losses"])),
        norms=tuple(map(float, values["norms"])),
        sanity=SanityState(**values.get("sanity", {})),
    )


def described(measure: Measure) -> str:
    """Return a sentence for people about what was found and done."""
    steps = f"step {measure.first}" if measure.first == measure.last else f"steps {measure.first}-{measure.last}"
    if measure.skipped:
        steps += f", of which {measure.skipped} updates were skipped"
    done = {
        AGAIN: "the run goes back and trains them again",
        PASS: "the run goes back and passes their data",
        EARLIER: "the run goes back further, and passes their data",
        LOWER: f"the run goes back, passes their data and has {measure.lr_factor:g} of its learning rate and "
        f"{measure.clip_factor:g} of its limit of the gradient norm up to step {measure.lr_last}",
        ACCEPT: "the run goes back, and they are the new level",
        STOP: "the run stops",
        FAILED: "the run ended",
    }
    return f"{steps}: {', '.join(measure.found)}; {done[measure.action]}"


def retrained_text(first: int, last: int, verdict: RetrainVerdict) -> str:
    """Return a sentence for people about the steps first..last, which were trained again."""
    steps = f"step {first}" if first == last else f"steps {first}-{last}"
    if verdict == "data":
        return f"{steps}: the same was found when they were trained again: of their data or of the weights before them"
    return f"{steps}: nothing was found when they were trained again: a fault of the hardware, or of chance"


def retried_text(retried: Mapping[str, Any]) -> str:
    """Return a sentence for people about a `retried` event."""
    found = f"step {retried['step']}, because of {', '.join(retried['found'])}: "
    if retried["healthy"]:
        ranks = ", ".join(map(str, retried.get("ranks", ())))
        own = f"; of the ranks {ranks}, one computed other bits" if ranks else ""
        return found + f"nothing was found in the second try, whose update is made; the fault was transient{own}"
    if retried["same"]:
        return found + "the same bits again, so it is the data or the weights"
    return found + "other bits, and a finding again"


def passed_steps(measures: Sequence[Measure]) -> list[StepSpan]:
    """Return the ranges of steps whose data are passed."""
    return [StepSpan(one.first, one.last) for one in measures if one.passes]


@dataclass(frozen=True)
class Doubt:
    """A doubt about the weights of a checkpoint. A run continues from the newest checkpoint with the smallest `grade`:
    0 (none), UNPROVEN (too few steps followed before there was trouble) or SUSPECT. reason: for people."""

    grade: int = 0
    reason: str = ""


UNPROVEN, SUSPECT = 1, 2
NO_DOUBT = Doubt()


def doubt(measures: Sequence[Measure], step: int, saved: Sequence[Measure]) -> Doubt:
    """Return the doubt about the weights of a checkpoint of `step` with the measures `saved`.

    measures: those of the run. Each goes back to before its first step, and nothing is trained from what was saved
    since then.
    """
    later = [one for one in measures if one not in saved]
    first = min((one.first for one in later), default=step + 1)
    if first <= step:
        then = "and ended" if all(one.action == FAILED for one in later) else "and went back"
        return Doubt(SUSPECT, f"the guard found trouble from step {first} on, {then}")
    if step > min((one.proven_to for one in later), default=step):
        return Doubt(
            UNPROVEN, f"only {first - step - 1} steps of training followed before trouble from step {first} on"
        )
    return NO_DOUBT


def proven_to(first: int, proven_steps: int, changed_after: int) -> int:
    """Return up to which step a checkpoint has guard.proven_steps of training before trouble from step `first` on.

    The step before counts as trouble. An update with changed settings between a checkpoint and the trouble is the cause
    to look for: the run does not go back to before the change, where the change would hold for more steps.
    changed_after: the step after which the newest accepted change holds; 0: there is none.
    """
    proven = max(first - 2 - proven_steps, 0)
    return max(proven, changed_after) if changed_after < first - 1 else proven


def back_to(path: Path, state: GuardState | None = None, proven_steps: int = 0) -> tuple[int, ...]:
    """Return up to which steps the run may have to go back: to a proven checkpoint, or, if there is none, to one from
    before the trouble by more than one step.

    path: the record, with the last trouble that was trained again; nothing if there is none, or it cannot be read,
    which the run will report. state: of the newest checkpoint, whose skipped steps may become trouble. proven_steps:
    of the guard.
    """
    skipped = min((step for step, _ in state.skipped), default=0) if state else 0
    may_be = (skipped - 2 - proven_steps, skipped - 2) if skipped else ()
    try:
        rows = [one for one in read_measures(path) if one.action in (AGAIN, FAILED)]
    except DataError:
        return may_be
    return (rows[-1].proven_to, rows[-1].first - 2, *may_be) if rows else may_be


def lr_factor(measures: Sequence[Measure], step: int, lr: float) -> float:
    """Return the factor of the learning rate of `step`: the product of those that hold for it. lr: optim.lr."""
    return math.prod(one.lr_factor for one in measures if one.lowers(step, lr))


def clip_factor(measures: Sequence[Measure], step: int, lr: float) -> float:
    """Return the factor of the limit of the gradient norm of `step`: the product of those that hold for it. lr:
    optim.lr."""
    return math.prod(one.clip_factor for one in measures if one.lowers(step, lr))


def in_force(measures: Sequence[Measure], first_step: int, lr: float) -> list[str]:
    """Return sentences for people about what the measures do in the steps from `first_step` on, and about factors that
    would hold there with the rate of before. lr: optim.lr."""
    found = []
    if passed := merged(passed_steps(measures), first_step - 1):
        found.append(f"passes the data of the steps {', '.join(map(str, passed))}, as its measures decided")
    open_ones = [one for one in measures if one.action == LOWER and one.lr_last >= first_step]
    for one in open_ones:
        factors = f"{one.lr_factor:g} of the learning rate and {one.clip_factor:g} of optim.clip_norm"
        because = f"because of steps {StepSpan(one.first, one.last)}"
        if one.is_of(lr):
            found.append(f"lowered: {factors} up to step {one.lr_last}, {because}; another optim.lr ends it")
        else:
            found.append(f"no longer lowered: {factors} {because} ended, as optim.lr is {lr:g} and was {one.lr:g}")
    holding = [one for one in open_ones if one.is_of(lr)]
    if len(holding) > 1:
        at = max(first_step, *(one.first for one in holding))
        found.append(f"lowered: in all, step {at} has {lr_factor(measures, at, lr):g} of the learning rate")
    return found


def read_measures(path: Path) -> list[Measure]:
    """Return the measures of the file `path`; none if there is no such file. Raises DataError if it cannot be read."""
    try:
        record = json.loads(path.read_bytes())
        # A list is of an earlier version of ingot.
        found = record if isinstance(record, list) else unsealed(record, {_MEASURES})[_MEASURES]
        return [measure_of(values) for values in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "E-GUARD-READ",
            f"{path} cannot be read ({error})",
            rule="this file records which batches the run passes, and where its learning rate is lower",
            fix="restore the file from a copy of the run folder, or delete it: then the record is that of the newest "
            "checkpoint",
            path=str(path),
        ) from None


def measure_of(values: Mapping[str, Any]) -> Measure:
    """Return the measure whose JSON is `values`. Raises KeyError, TypeError or ValueError for other values."""
    if values["action"] not in (AGAIN, PASS, EARLIER, LOWER, ACCEPT, STOP, FAILED):
        raise ValueError(f"action {values['action']!r}")
    return Measure(
        action=values["action"],
        first=int(values["first"]),
        last=int(values["last"]),
        found=tuple(map(str, values["found"])),
        skipped=int(values.get("skipped", 0)),
        proven_to=int(values.get("proven_to", max(int(values["first"]) - 1, 0))),  # of before there was such a step
        lr_factor=float(values["lr_factor"]),
        clip_factor=float(values.get("clip_factor", 1.0)),
        lr_last=int(values["lr_last"]),
        lr=float(values.get("lr", 0.0)),
    )


def write_measures(path: Path, measures: Sequence[Measure]) -> None:
    """Replace the file `path`."""
    write_json(path, sealed({_MEASURES: [asdict(one) for one in measures]}))


def with_those_of(measures: Sequence[Measure], saved: Sequence[Measure]) -> list[Measure]:
    """Return `saved`, the measures of a checkpoint, and after them those of `measures` that it lacks."""
    return [*saved, *(one for one in measures if one not in saved)]


def deviations_text(found: Sequence[str], loss_sigmas: float, norm_sigmas: float) -> tuple[str, str]:
    """Return what follows loss and gradient norm of a finding, " (+7.0 deviations)" and " (+1.0)"; "" for values that
    are not finite, whose deviations have no meaning. found: the kinds of the finding."""
    if any("not finite" in kind for kind in found):
        return "", ""
    return f" ({loss_sigmas:+.1f} deviations)", f" ({norm_sigmas:+.1f})"
