"""The training loop: next batch, step, verdict; then save, evaluate, go back or stop.

`train` is the loop of `ingot train`. `RunLoop` has what happens between two steps, for this loop and for loops of
research programs (ingot.Trainer).
"""

import time
from collections import Counter
from dataclasses import dataclass, replace

from ingot.errors import EXIT_OK, EXIT_PREEMPTED, CheckpointError, RunFailed
from ingot.plugins.callback import StepNumbers, Verdict
from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS, SaveKind
from ingot.schema.guard_record import Measure, lr_factor
from ingot.trainer.collector import collected_between_steps
from ingot.trainer.damage import judge_replayed, look_closer, replace_damaged
from ingot.trainer.damaged_data import next_batch
from ingot.trainer.integrity.watch import STATE_CHANGED
from ingot.trainer.loader.loader import Batch
from ingot.trainer.log import (
    log_data_trouble,
    log_evaluation,
    log_interval,
    log_samples,
    log_sanity,
    log_start_times,
)
from ingot.trainer.mesh.collectives import any_rank
from ingot.trainer.optim.schedule import learning_rate
from ingot.trainer.parts import RunParts
from ingot.trainer.record import STALL, Interval
from ingot.trainer.resilience.heartbeat import Phase
from ingot.trainer.resilience.policy import StepResult, passed_step
from ingot.trainer.resilience.stop_requests import PLANNED, REQUESTED, RESTART, StopRequest
from ingot.trainer.save import finish_uploads, fits, last_saved, reload, report_ended, report_roll_back, save, settle
from ingot.trainer.step import train_step

ROLL_BACKS_PER_STEP = 6  # the guard takes five measures; a callback, or damage that comes again, would never end


@dataclass(frozen=True)
class Ending:
    """The end of training. step: the last step, which is saved. stopped: the run stopped early, on request or at
    `until_step`. again: it stopped because its supervisor will start it again."""

    step: int
    stopped: bool
    again: bool = False

    @property
    def exit_code(self) -> int:
        return EXIT_PREEMPTED if self.stopped else EXIT_OK


def train(trainer: RunParts) -> Ending:
    """Train from `trainer.first_step` to the last step or a stop request, and save the last completed step. Collective.

    `trainer.until_step` is a stop requested in advance.
    """
    loop = RunLoop(trainer)
    with collected_between_steps() as collect:
        while (batch := loop.next_batch()) is not None:
            result = train_step(trainer, batch, loop.learning_rate(batch.step))
            loop.judge(batch, result)
            if loop.save_is_due:
                loop.save()
            loop.finish_step()
            collect(batch.step)
    return loop.end()


class RunLoop:
    """The loop of a run between its steps. All methods are collective.

    Between two log lines the results of the steps stay on the device, and the host waits for it only if the policy
    does. Any verdict except CONTINUE takes effect at once, after the steps so far are logged. A step is saved only
    after the policy has judged all steps up to it, and the hashes of its state were compared (integrity/watch.py).

    done: the last completed step. saved: the step of the newest checkpoint, even if it is still being written. line:
    the numbers of the steps since the previous log line, if the last step wrote one. verdict: the verdict on the last
    step. save_is_due: the last step has to be saved. stopped: the run stops early after the last step, or has stopped.
    """

    def __init__(self, trainer: RunParts):
        config = trainer.config
        self.trainer, self.steps = trainer, config.train.steps
        self._schedule = learning_rate(self.steps, config.optim.lr, config.schedule)
        self.done = self.saved = trainer.first_step - 1
        self.line: list[StepNumbers] = []
        self.verdict = Verdict.CONTINUE
        self._request = StopRequest(REQUESTED)  # until_step, a callback or the policy may also stop the run
        self.save_is_due = self._weights_alone = self._evaluation_is_due = self._is_damaged = False
        self.stopped = trainer.until_step <= self.done < self.steps  # an earlier attempt reached until_step
        self._is_new = True  # no step of this attempt was trained
        self._began = time.monotonic()
        self._recent: list[StepResult] = []
        self._interval = Interval.begin(trainer)
        self._roll_backs: Counter[int] = Counter()
        self._measures = len(trainer.policy.measures())  # known before this attempt, or before the last return

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`: that of the schedule, times the factor of the guard's measures."""
        return self._schedule(step) * lr_factor(self.trainer.policy.measures(), step, self.trainer.config.optim.lr)

    def next_batch(self) -> Batch | None:
        """Return the batch of the next step that is trained; None after the last step or a stop. Steps whose data are
        passed are completed on the way."""
        batch = self._next_batch()
        while batch is not None and batch.passed:
            self.judge(batch, passed_step(batch.step, self.learning_rate(batch.step), self.trainer.place.device))
            if self.save_is_due:
                self.save()
            self.finish_step()
            batch = self._next_batch()
        return batch

    def _next_batch(self) -> Batch | None:
        if self.stopped:
            return None
        self.trainer.heartbeat.enter(Phase.DATA, self.done + 1)
        if self.trainer.recorder is not None:
            self.trainer.recorder.release()
        batch = next_batch(self.trainer)
        self.trainer.heartbeat.enter(Phase.COMPILE if self._is_new else Phase.STEP, self.done + 1)
        self._is_new = self._is_new and batch is not None and batch.passed
        for trouble in batch.troubles if batch else ():
            log_data_trouble(self.trainer, self.done + 1, trouble)
        return batch

    def judge(self, batch: Batch, result: StepResult) -> None:
        """Record the samples of a completed step, write the log line if one is due, and decide how to continue."""
        try:
            self._judge(batch, result)
        finally:  # a step that ends the run, too
            if self.trainer.recorder is not None:  # a step without a line may still get one, from `stop`
                self.trainer.recorder.step(batch.step, self._interval.last, is_open=not self.line)

    def _judge(self, batch: Batch, result: StepResult) -> None:
        trainer, config, step = self.trainer, self.trainer.config, batch.step
        self._recent.append(result)
        trainer.ledger.record(step, batch.sample_ids)
        if trainer.source_loss is not None:
            trainer.source_loss.add(step, batch.sample_ids)
        self._interval.add(batch.wait_seconds, trainer.program.channels.waited_seconds, passed=batch.passed)
        self.done, self.line = step, []

        due_save = FULL if step == trainer.until_step else trainer.schedule.take(step)
        self._evaluation_is_due = step < self.steps and is_due(step, config.evaluate.every_steps)
        is_suspected = trainer.gradients is not None and trainer.gradients.compared_after == step
        if due_save or self._evaluation_is_due or is_suspected or is_due(step, config.watch.log_every):
            self._write_line(saves=bool(due_save))
        if self._is_damaged:  # the numbers of these steps are of no use, to the policy neither
            self._go_back()
            return
        self.verdict = trainer.policy.verdict(replace(result, line=self.line))
        vote = trainer.schedule.vote(trainer.background is not None and trainer.background.is_writing)
        request, due = trainer.stop_vote.after_step(at_line=bool(self.line), due=vote)
        trainer.schedule.agree(due)
        if request is not None and self.verdict is Verdict.CONTINUE:  # otherwise the next vote has it again
            self.verdict, self._request = Verdict.STOP, request
        if self.line:
            judge_replayed(trainer, step)
            self._ask_callbacks()
        elif self.verdict is not Verdict.CONTINUE:
            self._write_line(saves=self.verdict is Verdict.STOP)
            if self._is_damaged:
                self._go_back()
                return
            self._ask_callbacks()
            # A measure that is due now would be due no more when the run goes on; the next vote has the request again.
            if self.verdict is Verdict.STOP and self._is_roll_back(result):
                self.verdict = Verdict.ROLL_BACK

        if self.verdict is Verdict.SKIP:
            require_vetoed(self.line[-1])
        back = self.verdict is Verdict.ROLL_BACK
        self.stopped = not back and step < self.steps and (step == trainer.until_step or self.verdict is Verdict.STOP)
        self.save_is_due = not back and (bool(due_save) or self.stopped)
        self._weights_alone = due_save == WEIGHTS and not self.stopped
        self._evaluation_is_due = self._evaluation_is_due and not back

    def _is_roll_back(self, result: StepResult) -> bool:
        return self.trainer.policy.verdict(replace(result, line=self.line)) is Verdict.ROLL_BACK

    def _write_line(self, *, saves: bool) -> None:
        self.line, self._is_damaged = log_interval(self.trainer, self._recent, self._interval, saves=saves)
        self._recent.clear()
        for numbers in self.line:
            if numbers.skipped:
                self.trainer.ledger.mark_untrained(numbers.step)
        self._is_damaged = self._is_damaged or look_closer(self.trainer, self.line)

    def _go_back(self) -> None:
        """Let the run go back because its state is damaged: a stop has to wait, because nothing damaged is saved."""
        self._is_damaged, self.stopped = True, False
        self.verdict, self._evaluation_is_due = Verdict.ROLL_BACK, False

    def _ask_callbacks(self) -> None:
        self.trainer.heartbeat.enter(Phase.CALLBACK, self.done)
        verdict = self.trainer.callbacks.line(self.line, self.trainer.log)
        if verdict is Verdict.STOP and self._request.reason in PLANNED:
            self._request = StopRequest(REQUESTED)  # the run stops, and does not start again
        if self.verdict is not Verdict.ROLL_BACK:  # the policy's: what it found may not be saved by a stop
            self.verdict = later(self.verdict, verdict)

    def save(self) -> None:
        """Save the checkpoint of the last completed step, or its weights alone if no more is due. Before the run stops
        or ends, wait until it is verified.

        A stop before the end of `launch.grace` begins no save that would not end in time.
        """
        self.trainer.heartbeat.enter(Phase.SAVE, self.done)
        began = time.monotonic()
        if self._weights_alone:
            self._save(WEIGHTS)
        elif self.stopped and not fits(self.trainer, self.done, self._request.deadline):
            self.saved = last_saved(self.trainer)
        elif self._save(FULL, last=self.stopped or self.done == self.steps):
            self.saved = self.done
        self.save_is_due = self._weights_alone = False
        if self.trainer.recorder is not None:
            self.trainer.recorder.note(STALL, time.monotonic() - began)

    def _save(self, kind: SaveKind, *, last: bool = False) -> bool:
        """Save, and return whether a save was made or began. If the state is damaged, or changed while it was copied,
        the run goes back, and does not stop yet."""
        hashes = self.trainer.hashes
        if hashes is not None and not hashes.hashed_to_save(self.done):  # a program may save at any log line
            hashes.before_save(self.done)
            hashes.compare()
            if any_rank(hashes.read()):
                self._go_back()
                return False
        sanity = self.trainer.sanity if kind == FULL else None
        if sanity is not None and sanity.due(self.done) and settle(self.trainer, wait=last):  # else nothing is saved
            self.trainer.heartbeat.enter(Phase.EVALUATE, self.done)
            log_sanity(self.trainer, sanity, self.done, self.line)
            self.trainer.heartbeat.enter(Phase.SAVE, self.done)
        try:
            return save(self.trainer, self.done, kind, last=last)
        except CheckpointError as error:  # the same on every rank
            if error.code != STATE_CHANGED or hashes is None:
                raise
            hashes.compare()
            hashes.read()
            self._go_back()
            return False
        finally:
            if hashes is not None:
                hashes.end_save()

    def finish_step(self) -> None:
        """Do what is due after a step, besides saving: go back, evaluate, begin another interval."""
        if self.verdict is Verdict.ROLL_BACK:
            self.trainer.heartbeat.enter(Phase.START, self.done)
            require_progress(self.trainer, self.done, self._roll_backs)
            measures, known = self.trainer.policy.measures(), self._measures
            self._measures = len(measures)
            if self._is_damaged:
                self.done = self.saved = replace_damaged(self.trainer, self.done)
            else:
                self.done = self.saved = roll_back(self.trainer, self.done, measures[-1] if measures[known:] else None)
            if self.trainer.recorder is not None:
                self.trainer.recorder.went_back(self.done + 1)
            if self.trainer.route_flips is not None:
                self.trainer.route_flips.went_back()
            self._is_damaged = False
        elif self._evaluation_is_due:  # also before a stop: a later attempt continues after this step
            self.trainer.heartbeat.enter(Phase.EVALUATE, self.done)
            log_evaluation(self.trainer, self.done)
        report_ended(self.trainer)
        if self.line:
            self._interval = Interval.begin(self.trainer)
        self.verdict, self._evaluation_is_due = Verdict.CONTINUE, False

    def stop(self) -> None:
        """Stop after the last completed step, as on request: it is judged, and saved if it is not."""
        if self._recent:
            result = self._recent[-1]
            self._write_line(saves=True)
            if self.trainer.recorder is not None:
                self.trainer.recorder.amend(self._interval.last)
                self.trainer.recorder.release()
            if self._is_damaged:
                self._go_back()
            else:
                self._ask_callbacks()
                if self._is_roll_back(result):
                    self.verdict = Verdict.ROLL_BACK
        self.trainer.heartbeat.enter(Phase.SAVE, self.done)
        settle(self.trainer, wait=True)
        is_new = self.verdict is not Verdict.ROLL_BACK and self.done > last_saved(self.trainer)
        if is_new and self._save(FULL, last=True):
            self.saved = self.done
        self.finish_step()
        self.stopped = self.done < self.steps

    def end(self) -> Ending:
        """Write how the run ended; a finished run is evaluated before that."""
        trainer, done = self.trainer, self.done
        if (phases := trainer.clock.report()) is not None:  # the attempt had fewer than two log lines
            log_start_times(trainer, phases)
        if self.stopped:
            trainer.log(events.STOPPED, step=done, reason=self._request.reason, saved_step=last_saved(trainer))
        else:  # even if the loop had no steps left: an earlier attempt was killed after the last checkpoint
            trainer.heartbeat.enter(Phase.EVALUATE, done)
            log_evaluation(trainer, done)
            trainer.heartbeat.enter(Phase.SAMPLE, done)
            log_samples(trainer, done)
            seconds = round(time.monotonic() - self._began, 3)
            trainer.log(events.FINISHED, step=done, tokens=done * trainer.config.tokens_per_step, seconds=seconds)
        trainer.heartbeat.enter(Phase.END, done)
        if not self.stopped or self._request.reason != RESTART:  # the ranks that start again go on with the uploads
            finish_uploads(trainer, self._request.deadline, stopped=self.stopped)
        return Ending(done, self.stopped, self.stopped and self._request.reason in PLANNED)


def later(first: Verdict, second: Verdict) -> Verdict:
    """Return the more urgent of two verdicts: a stop before a roll-back, a roll-back before going on."""
    return first if list(Verdict).index(first) >= list(Verdict).index(second) else second


def is_due(step: int, every_steps: int) -> bool:
    """Return whether an action that happens every `every_steps` steps is due after `step`; 0 means never."""
    return every_steps > 0 and step % every_steps == 0


def require_vetoed(numbers: StepNumbers) -> None:
    """Raise RunFailed unless the update of this step was skipped on the device: it cannot be undone afterwards."""
    if not numbers.skipped:
        raise RunFailed(
            "E-POLICY-SKIP",
            f"the policy's verdict skips step {numbers.step}, but its veto did not prevent the update",
            rule="an update can only be skipped before it is made; afterwards a run can only roll back",
            fix="change the policy so that `veto` and `verdict` agree",
            step=numbers.step,
        )


def require_progress(trainer: RunParts, step: int, so_far: Counter[int]) -> None:
    """Count a roll-back from `step`. Raises RunFailed if there were too many. so_far: step -> their number."""
    so_far[step] += 1
    if so_far[step] > ROLL_BACKS_PER_STEP:
        raise RunFailed(
            "E-ROLLBACK-LIMIT",
            f"the run had to roll back {so_far[step]} times from step {step}",
            rule=f"a run rolls back at most {ROLL_BACKS_PER_STEP} times from the same step",
            fix=f"look at the losses up to this step: ingot report {trainer.folder.root}",
            step=step,
            times=so_far[step],
        )


def roll_back(trainer: RunParts, step: int, measure: Measure | None = None) -> int:
    """Load the newest checkpoint, report the roll-back, and return the checkpoint's step. Collective. measure: the
    guard's, because of which the run goes back; None: a callback asked for it."""
    back_at = reload(trainer, measure)
    if trainer.hashes is not None:
        trainer.hashes.went_back(back_at)
    report_roll_back(trainer, step, back_at, "guard")
    return back_at
