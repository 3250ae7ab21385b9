"""The training loop: next batch, step, verdict of the policy; at intervals log, save, evaluate, stop."""

import time
from collections import Counter
from dataclasses import dataclass, replace

from ingot.errors import RunFailed
from ingot.plugins.callback import StepNumbers, Verdict
from ingot.schema import events
from ingot.trainer.log import Interval, log_evaluation, log_interval, log_samples
from ingot.trainer.optim.schedule import learning_rate
from ingot.trainer.parts import Trainer
from ingot.trainer.resilience.policy import StepResult
from ingot.trainer.save import reload, save
from ingot.trainer.step import train_step

ROLL_BACKS_PER_STEP = 3


@dataclass(frozen=True)
class Ending:
    """The end of training. step: the last step, which is saved. stopped: the run stopped early, on request or at
    `until_step`."""

    step: int
    stopped: bool


def train(trainer: Trainer) -> Ending:
    """Train from `trainer.first_step` to the last step or a stop request, and save the last completed step. Collective.

    `trainer.until_step` is a stop requested in advance. Between two log lines the results of the steps stay on the
    device, and the host waits for it only if the policy does. Any verdict except CONTINUE takes effect at once, after
    the steps so far are logged. A step is saved only after the policy has judged all steps up to it.
    """
    config = trainer.config
    steps, done, stopped = config.train.steps, trainer.first_step - 1, False
    rate = learning_rate(steps, config.optim.lr, config.schedule)
    began = time.monotonic()
    recent: list[StepResult] = []
    interval = Interval.begin(trainer)
    roll_backs: Counter[int] = Counter()

    if trainer.until_step < trainer.first_step <= steps:  # an earlier attempt reached until_step
        trainer.log(events.STOPPED, step=done, reason="requested")
        return Ending(done, stopped=True)

    while (batch := next(trainer.loader, None)) is not None:
        recent.append(train_step(trainer, batch, rate(batch.step)))
        trainer.ledger.record(batch.step, batch.sample_ids)
        interval.add(batch.wait_seconds)
        done = batch.step

        save_now = done == trainer.until_step or done % config.checkpoint.every_steps == 0
        evaluate_now = done < steps and is_due(done, config.evaluate.every_steps)
        line: list[StepNumbers] = []
        if save_now or evaluate_now or is_due(done, config.watch.log_every):
            line = log_interval(trainer, recent, interval, saves=save_now)
        verdict = trainer.policy.verdict(replace(recent[-1], line=line))
        if line:
            verdict = later(verdict, trainer.callbacks.line(line, trainer.log))
        else:
            if verdict is Verdict.CONTINUE:
                continue
            line = log_interval(trainer, recent, interval, saves=verdict is Verdict.STOP)
            if verdict is Verdict.STOP:
                trainer.policy.judge(line)
        recent.clear()

        if verdict is Verdict.SKIP:
            require_vetoed(line[-1])
        if verdict is Verdict.ROLL_BACK:
            done = roll_back(trainer, done, roll_backs)
            interval = Interval.begin(trainer)
            continue
        stopped = done < steps and (done == trainer.until_step or verdict is Verdict.STOP)
        if save_now or stopped:
            save(trainer, done)
        if evaluate_now:  # also before a stop: a later attempt continues after this step
            log_evaluation(trainer, done)
        if stopped:
            trainer.log(events.STOPPED, step=done, reason="requested")
            break
        interval = Interval.begin(trainer)

    if not stopped:  # even if the loop had no steps left: an earlier attempt was killed after the last checkpoint
        log_evaluation(trainer, done)
        log_samples(trainer, done)
        seconds = round(time.monotonic() - began, 3)
        trainer.log(events.FINISHED, step=done, tokens=done * config.tokens_per_step, seconds=seconds)
    return Ending(done, stopped)


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


def roll_back(trainer: Trainer, step: int, so_far: Counter[int]) -> int:
    """Load the newest checkpoint, report the roll-back, and return the checkpoint's step. Collective.

    so_far: step -> the number of roll-backs from there. Raises RunFailed after too many roll-backs from `step`.
    """
    so_far[step] += 1
    if so_far[step] > ROLL_BACKS_PER_STEP:
        raise RunFailed(
            "E-ROLLBACK-LIMIT",
            f"the policy asked {so_far[step]} times to roll back from step {step}",
            rule=f"a run rolls back at most {ROLL_BACKS_PER_STEP} times from the same step",
            fix=f"look at the losses up to this step: ingot report {trainer.folder.root}",
            step=step,
            times=so_far[step],
        )
    back_at = reload(trainer)
    trainer.log(events.ROLLED_BACK, from_step=step, to_step=back_at)
    trainer.say(f"rollback  from step {step} to step {back_at}")
    return back_at
