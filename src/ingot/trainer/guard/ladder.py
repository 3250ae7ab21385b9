"""The measures against rows of skipped steps, one after the other: train the steps again, pass their data, pass them
from one step earlier, lower the learning rate as well, accept the new level; or stop.

A single bad batch costs its own update and no more. Several in a row, or a large share of many steps, may come from
weights that were harmed before, by a fault of the hardware, by data, or by a learning rate that is too high; the
measures separate these, from the cheapest on. An update that harms the weights shows in the step after it, so the
third measure passes the step before the trouble, too, and the fourth has a lower learning rate and limit of the
gradient norm for some time. After `calm_steps` without new trouble, the next one begins with the first measure, and so
does one with another learning rate than the last measure had. All
ranks decide alike, because they read the same numbers; what was decided is recorded before it takes effect, so that a
run that is killed then takes the same way.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from itertools import chain

from ingot.errors import RunFailed
from ingot.plugins.callback import StepNumbers, Verdict
from ingot.schema.accepted import command_with_rate, rate_to_try
from ingot.schema.guard import Guard
from ingot.schema.guard_record import (
    ACCEPT,
    AGAIN,
    EARLIER,
    FAILED,
    LOWER,
    PASS,
    STOP,
    Action,
    GuardState,
    Measure,
    RetrainVerdict,
    proven_to,
    with_those_of,
)
from ingot.schema.run_folder import RunFolder
from ingot.trainer.guard.step_judge import NOT_FINITE, StepJudge
from ingot.units import counted

MEASURES: dict[str, tuple[Action, ...]] = {
    "guard": (AGAIN, PASS, EARLIER, LOWER, ACCEPT, STOP),
    "strict": (AGAIN, PASS, STOP),
}


class Ladder:
    """The rows of skipped steps of a run, and its measures.

    folder: of the run. measures: those of its record. judge: gets a new window when a level is accepted. record: called
    on every rank with all measures after each new one, before it takes effect. report: called with each new one. lr:
    optim.lr of the run. ask: asks a person for the measure in place of one that stops the run, or returns None if the
    run is to stop otherwise. retrained: called with a measure that let steps be trained again, and what they show:
    "data" if they hurt again, "hardware" if not.
    """

    def __init__(
        self,
        guard: Guard,
        folder: RunFolder,
        judge: StepJudge,
        measures: Sequence[Measure],
        record: Callable[[Sequence[Measure]], None],
        report: Callable[[Measure], None],
        lr: float = 0.0,
    ):
        self.guard, self.folder, self.measures, self.lr = guard, folder, list(measures), lr
        self._changed_after = 0
        self._judge, self._record, self._report = judge, record, report
        self.ask: Callable[[Measure], Action | None] | None = None
        self.retrained: Callable[[Measure, RetrainVerdict], None] | None = None
        self._sound_again: Measure | None = None  # the last measure whose steps were sound when trained again
        self._row: list[int] = []
        self._found: set[str] = set()
        self._skipped: dict[int, tuple[str, ...]] = {}  # the last skipped steps, and what was found in each
        self._due: Measure | None = None
        self._begin_windows()

    def look(self, line: Sequence[StepNumbers]) -> None:
        """Take in the steps of a log line, in order. One whose data were passed ends a row. Trouble is the first
        `in_a_row` skipped steps of a row, or `most_skipped` of the last `calm_steps`."""
        for numbers in line:
            self._age(numbers.step)
            self._judge_again(numbers)
            if not (numbers.skipped and numbers.finding):
                self._row, self._found = [], set()
                continue
            self._row.append(numbers.step)
            self._found.update(numbers.finding.kinds)
            self._skipped[numbers.step] = numbers.finding.kinds
            if self._due is not None:
                continue
            if len(self._row) >= self.guard.in_a_row:  # at once, wherever the log line ends
                self._due = self._next_measure(self._row, self._found)
            elif len(self._skipped) >= self.guard.most_skipped:
                self._due = self._next_measure(list(self._skipped), {*chain(*self._skipped.values())})

    def _judge_again(self, numbers: StepNumbers) -> None:
        """Report the last measure if it let steps be trained again, of which this is the last one, and all were
        sound."""
        taken = self.measures[-1] if self.measures else None
        if taken is None or taken.action != AGAIN or numbers.step != taken.last or taken is self._sound_again:
            return
        if not numbers.skipped and not self._hurt(taken):
            self._sound_again = taken
            self._report_again(taken, "hardware")

    def _hurt(self, taken: Measure) -> bool:
        """Return whether an update of the steps of a measure was skipped lately."""
        return any(taken.first <= step <= taken.last for step in self._skipped)

    def _report_again(self, taken: Measure, verdict: RetrainVerdict) -> None:
        if self.retrained is not None:
            self.retrained(taken, verdict)

    def _age(self, step: int) -> None:
        """Forget the skipped steps that are `calm_steps` before `step`."""
        self._skipped = {at: found for at, found in self._skipped.items() if at > step - self.guard.calm_steps}

    def verdict(self) -> Verdict:
        """Take the measure that is due, and return how to continue. Raises RunFailed if it is to stop."""
        if (measure := self._due) is None:
            return Verdict.CONTINUE
        if measure.action == STOP and self.ask is not None:
            if (action := self.ask(measure)) is None:
                return Verdict.CONTINUE
            measure = self._measure(action, measure.first, measure.last, measure.found, measure.skipped)
        self._take(measure)
        if measure.action == STOP:
            raise self._stopped(measure)
        return Verdict.ROLL_BACK

    def answer(self, action: Action) -> None:
        """Take the measure that a person chose in place of the last one, which stopped the run."""
        question = self.measures[-1]
        self._take(self._measure(action, question.first, question.last, question.found, question.skipped))

    def _take(self, measure: Measure) -> None:
        taken = self.measures[-1] if self.measures else None
        if taken is not None and taken.action == AGAIN and taken is not self._sound_again and self._hurt(taken):
            self._report_again(taken, "data")  # else the skipped steps are before and after them
        self.measures.append(measure)
        self._record(self.measures)
        self._report(measure)
        self._row, self._found, self._skipped, self._due = [], set(), {}, None
        self._begin_windows()

    def _begin_windows(self) -> None:
        self._judge.begins = frozenset(one.first for one in self.measures if one.action == ACCEPT)

    def _next_measure(self, steps: Sequence[int], kinds: Set[str]) -> Measure:
        """Return the measure against the skipped `steps`, in which `kinds` were found."""
        first, last, found = steps[0], steps[-1], tuple(sorted(kinds))
        skipped = len(steps) if len(steps) <= last - first else 0
        actions = MEASURES[self.guard.preset]
        taken = next((one for one in reversed(self.measures) if one.action != FAILED), None)
        again = taken is not None and taken.action in actions and abs(first - taken.last) <= self.guard.calm_steps
        again = again and taken is not None and taken.is_of(self.lr)
        action = actions[min(actions.index(taken.action) + 1, len(actions) - 1)] if taken and again else actions[0]
        # There is no level to accept, or the level is the work of a change that a person can take back.
        after_change = 0 < self._changed_after >= first - self.guard.calm_steps
        if action == ACCEPT and (kinds <= NOT_FINITE or after_change):
            action = STOP
        return self._measure(action, first, last, found, skipped)

    def _measure(self, action: Action, first: int, last: int, found: tuple[str, ...], skipped: int) -> Measure:
        """Return a measure against the trouble in the steps first..last."""
        proven_to = self._proven_to(first)
        if action in (EARLIER, LOWER):
            began = self._began(first, last, skipped)
            if skipped and began - 1 > first:  # the trouble began before that of the measures so far
                skipped = sum(step >= began - 1 for step in self._skipped) or skipped
            proven_to = min(proven_to, self._proven_to(began))
            first = max(began - 1, 1)
        measure = Measure(
            action=action, first=first, last=last, found=found, skipped=skipped, proven_to=proven_to, lr=self.lr
        )
        if action != LOWER:
            return measure
        guard = self.guard
        lr_last = last + guard.lr_steps
        return replace(measure, lr_factor=guard.lr_factor, clip_factor=guard.clip_factor, lr_last=lr_last)

    def _proven_to(self, first: int) -> int:
        return proven_to(first, self.guard.proven_steps, self._changed_after)

    def _began(self, first: int, last: int, skipped: int) -> int:
        """Return the first step of trouble whose last steps are first..last: that of its measures so far. skipped: as
        in Measure.

        After the run went back, a row can come before that of the first measure. It belongs to the trouble; of a share,
        whose steps may be far apart, only what comes before all of the trouble does.
        """
        firsts: list[int] = []
        for one in reversed([one for one in self.measures if one.action != FAILED]):
            firsts.append(one.first + 1 if one.action in (EARLIER, LOWER) else one.first)
            if one.action == AGAIN:
                break
        began = min(firsts, default=first)
        return min(began, first) if not skipped or began - 1 > last else began

    def _stopped(self, measure: Measure) -> RunFailed:
        steps = f"{measure.first} to {measure.last}"
        of_them = counted(measure.skipped, "update") if measure.skipped else "the updates"
        return RunFailed(
            "E-GUARD-STOPPED",
            f"{of_them} of the steps {steps} had to be skipped ({', '.join(measure.found)}), also after the run went "
            "back, trained them again and passed their data",
            rule="the guard takes each measure once before it stops for a person; weights of these steps are in doubt",
            fix=f"look for the cause: {explanation(self.folder, measure)}. If it is the learning rate: "
            f"{self._lower_rate()}. Otherwise choose the next measure, as in `ingot guard {self.folder.root} --take "
            "lower` (or pass, earlier, accept), and run the same command. Both continue from a checkpoint, or begin "
            "again if there is none",
            step=measure.first,
            last_step=measure.last,
            found=list(measure.found),
        )

    def _lower_rate(self) -> str:
        return command_with_rate(self.folder.root, rate_to_try(self.folder.accepted, self.lr))

    def state(self) -> GuardState:
        """Return what a checkpoint of the last step keeps. The host waits for the device."""
        losses, norms = self._judge.values()
        return GuardState(
            measures=tuple(self.measures),
            row=tuple(self._row),
            row_found=tuple(sorted(self._found)),
            skipped=tuple(self._skipped.items()),
            losses=losses,
            norms=norms,
        )

    def restore(self, state: GuardState, *, changed: bool, new_window: bool, changed_after: int = 0) -> None:
        """Go on as after the step whose checkpoint has `state`. The rest as in Policy."""
        self._changed_after = changed_after
        missing = [one for one in state.measures if one not in self.measures]
        self.measures = with_those_of(self.measures, state.measures)
        if missing:  # the checkpoint came from elsewhere, without the record of the folder
            self._record(self.measures)
        # Skipped steps from before a change of settings do not count: a measure would go back to before the change.
        self._row, self._found = ([], set()) if changed else (list(state.row), set(state.row_found))
        self._due = None
        # Those that a later measure is an answer to are trained again, or passed.
        later = (one.first for one in self.measures if one not in state.measures)
        first = 0 if changed else min(later, default=math.inf)
        self._skipped = {step: found for step, found in state.skipped if step < first}
        self._begin_windows()
        self._judge.restore(state.losses, state.norms)
        if new_window:
            self._judge.forget()


def explanation(folder: RunFolder, measure: Measure) -> str:
    """Return the command that explains the first step of a measure."""
    topic = "nan" if NOT_FINITE & {*measure.found} else "spike"
    return f"ingot explain {topic} {folder.root} --step {measure.first}"
