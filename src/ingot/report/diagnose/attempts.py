"""One training of a step, which the run may have trained again: the rates, settings and measures on its way."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ingot.events import read_events
from ingot.rehearse.replay.found import RecordedWay
from ingot.report.facts import RunData
from ingot.schema import events as kinds
from ingot.schema.changes import ChangeClass, class_of
from ingot.schema.guard_record import Measure, read_measures

# Changes of these do not change the update of a step on the same data. train.steps stretches a schedule: the rates show
# that. Changes of data are shown apart (data_changes.py).
_NO_CAUSE = ("guard.", "data.", "train.steps", "init", "seed")


@dataclass(frozen=True, kw_only=True)
class ChangedSetting:
    """A setting that was changed with --accept-change. step: the last one before the change."""

    step: int
    key: str
    before: Any
    after: Any

    @property
    def may_harm(self) -> bool:
        """True if the change can make a spike: of what an update is computed from, and no lower learning rate."""
        if class_of(self.key) is not ChangeClass.OTHER_NUMBERS or self.key.startswith(_NO_CAUSE):
            return False
        numbers = all(isinstance(one, int | float) for one in (self.before, self.after))
        return not (self.key == "optim.lr" and numbers and self.after <= self.before)

    @property
    def shown(self) -> bool:
        """True if a change of it may matter to a step, and is none of the data, which are shown apart."""
        is_free = class_of(self.key).is_free
        return not is_free and not self.key.startswith(("data", "train.seq_len", "train.global_batch"))

    def __str__(self) -> str:
        return f"{self.key} changed from {_short(self.before)} to {_short(self.after)} at step {self.step + 1}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass(frozen=True, kw_only=True)
class StepAttempt:
    """One training of a step. steps: step -> its event on the way there, without those that the run went back from.

    changes: of settings that held for it, oldest first. later_measures: of the guard, taken after it. foreign: the
    steps whose checkpoints, as they are now, are not on the way: saved later, after the run had gone back to before
    them, or earlier, and trained again without a save. began: Unix seconds of its event; infinite if the log has none.
    """

    step: int
    steps: dict[int, dict] = field(default_factory=dict)
    changes: tuple[ChangedSetting, ...] = ()
    later_measures: tuple[tuple[str, int, int], ...] = ()
    foreign: frozenset[int] = frozenset()
    began: float = math.inf

    @property
    def rates(self) -> dict[int, float]:
        """The learning rate of each step up to this one, with the factors of the guard."""
        return {step: event["lr"] for step, event in self.steps.items() if math.isfinite(event.get("lr", math.nan))}

    def measures(self, data: RunData) -> list[Measure]:
        """Return the measures of the guard that the run had taken before this training of the step.

        Raises DataError if the record cannot be read.
        """
        recorded = read_measures(data.folder.guard)
        # Those taken because of the step are from after it was trained, also where the log has lost them.
        return [
            one
            for one in recorded
            if (one.action, one.first, one.last) not in self.later_measures and not one.first <= self.step <= one.last
        ]

    def changed_since(self, step: int) -> list[ChangedSetting]:
        """Return the changes that may make a spike and hold since a step after `step`, the newest first."""
        return [one for one in reversed(self.changes) if one.step >= step and one.may_harm]


def recorded_way(data: RunData, attempt: StepAttempt) -> RecordedWay:
    """Return what a replay of the attempt follows. Raises DataError if the record of the guard cannot be read."""
    return RecordedWay(rates=attempt.rates, measures=attempt.measures(data), foreign=attempt.foreign)


def attempt_of(data: RunData, step: int, until: float = math.inf) -> StepAttempt:
    """Return the training of `step` that the log reports last up to the time `until`, in Unix seconds."""
    names = (kinds.STEP, kinds.RUN_STARTED, kinds.ROLLED_BACK, kinds.SETTING_CHANGED, kinds.CHECKPOINT, kinds.GUARD)
    log = [event for event in read_events(data.folder.events, *names) if isinstance(event.get("time"), int | float)]
    own = [
        at
        for at, event in enumerate(log)
        if event["kind"] == kinds.STEP and event.get("step") == step and event["time"] <= until
    ]
    if not own:
        return StepAttempt(step=step, steps=dict(data.steps))
    end = own[-1] + 1
    return _on_the_way(step, log[:end], log[end:])


def _on_the_way(step: int, before: Iterable[dict], after: Iterable[dict]) -> StepAttempt:
    """Return the attempt whose events are `before`, up to that of `step`."""
    steps: dict[int, dict] = {}
    changes: list[ChangedSetting] = []
    valid, void, taken = set[int](), set[int](), set[tuple[str, int, int]]()
    began = math.inf
    for event in before:
        kind = event["kind"]
        if kind in (kinds.RUN_STARTED, kinds.ROLLED_BACK):
            to = _went_to(event)
            steps = {own: one for own, one in steps.items() if own <= to}
            changes = [one for one in changes if one.step <= to]
            void |= {own for own in valid if own > to}
            valid = {own for own in valid if own <= to}
        elif kind == kinds.STEP:
            steps[event["step"]], began = event, event["time"]
        elif kind == kinds.CHECKPOINT:
            valid.add(event["step"])
            void.discard(event["step"])
        elif kind == kinds.GUARD:
            taken.add(_key(event))
        else:
            changed = ChangedSetting(step=event["step"], key=event["key"], before=event["old"], after=event["new"])
            changes = [one for one in changes if (one.step, one.key) != (changed.step, changed.key)] + [changed]
    lowest, later = math.inf, set[tuple[str, int, int]]()
    for event in after:
        kind = event["kind"]
        if kind in (kinds.RUN_STARTED, kinds.ROLLED_BACK):
            lowest = min(lowest, _went_to(event))
        elif kind == kinds.CHECKPOINT:  # a save in the background may end after the step
            if event["step"] > lowest:
                void.add(event["step"])
            elif math.isinf(lowest):
                void.discard(event["step"])
        elif kind == kinds.GUARD:
            later.add(_key(event))
    return StepAttempt(
        step=step,
        steps={own: one for own, one in steps.items() if own <= step},
        changes=tuple(one for one in changes if one.step < step),
        later_measures=tuple(sorted(later - taken)),
        foreign=frozenset(void),
        began=began,
    )


def _went_to(event: dict) -> int:
    return event["to_step" if event["kind"] == kinds.ROLLED_BACK else "from_step"]


def _key(event: dict) -> tuple[str, int, int]:
    return event["action"], event["first"], event["last"]
