"""The training loop. It reads from top to bottom: next batch, step, verdict; now and then log, save, evaluate, stop."""

import time
from collections import Counter
from dataclasses import dataclass, replace

from ingot.errors import RunFailed
from ingot.schema import events
from ingot.trainer.build import Training
from ingot.trainer.log import Interval, log_evaluation, log_interval, log_samples
from ingot.trainer.optim.schedule import learning_rate
from ingot.trainer.reload import reload
from ingot.trainer.resilience.policy import Facts, Reading, Verdict
from ingot.trainer.save import save
from ingot.trainer.step import train_step

ROLL_BACKS_PER_STEP = 3


@dataclass(frozen=True)
class Ending:
    """step: the last one done and saved. stopped: before the end of the run, on request or at `until_step`."""

    step: int
    stopped: bool


def train(run: Training) -> Ending:
    """Train from `run.first_step` to the last step, or to a stop request. What was done is saved when it returns.

    `run.until_step` is a stop that was asked for beforehand. Between two log lines the facts of the steps stay on the
    device, and the host waits for it only if the policy does. Any verdict but "continue" is acted on at once, after
    what led to it was written down. Nothing is saved before the policy has judged the steps up to it.
    """
    config = run.config
    steps, done, stopped = config.train.steps, run.first_step - 1, False
    began = time.monotonic()
    recent: list[Facts] = []
    interval = Interval.begin(run)
    roll_backs: Counter[int] = Counter()

    if run.until_step < run.first_step <= steps:  # it came this far before
        run.log(events.STOPPED, step=done, reason="requested")
        return Ending(done, stopped=True)

    while (batch := next(run.loader, None)) is not None:
        lr = learning_rate(batch.step, steps, config.optim.lr, config.schedule)
        recent.append(train_step(run, batch, lr))
        run.ledger.record(batch.step, batch.sample_ids)
        interval.add(batch.wait_seconds)
        done = batch.step

        save_now = done == run.until_step or done % config.checkpoint.every_steps == 0
        evaluate_now = done < steps and is_due(done, config.evaluate.every_steps)
        line: list[Reading] = []
        if save_now or evaluate_now or is_due(done, config.watch.log_every):
            line = log_interval(run, recent, interval, saves=save_now)
        verdict = run.policy.verdict(replace(recent[-1], line=line))
        if not line:
            if verdict is Verdict.CONTINUE:
                continue
            line = log_interval(run, recent, interval, saves=verdict is Verdict.STOP)
        recent.clear()

        if verdict is Verdict.SKIP:
            require_vetoed(line[-1])
        if verdict is Verdict.ROLL_BACK:
            done = roll_back(run, done, roll_backs)
            interval = Interval.begin(run)
            continue
        stopped = done < steps and (done == run.until_step or verdict is Verdict.STOP)
        if save_now or stopped:
            save(run, done)
        if evaluate_now:  # also before a stop: the run that goes on from here starts after this step
            log_evaluation(run, done)
        if stopped:
            run.log(events.STOPPED, step=done, reason="requested")
            break
        interval = Interval.begin(run)

    if not stopped:  # also when a run that was killed after its last checkpoint comes back
        log_evaluation(run, done)
        log_samples(run, done)
        seconds = round(time.monotonic() - began, 3)
        run.log(events.FINISHED, step=done, tokens=done * config.tokens_per_step, seconds=seconds)
    return Ending(done, stopped)


def is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def require_vetoed(reading: Reading) -> None:
    """Raise RunFailed unless the update of this step was skipped on the device: nothing can take it back now."""
    if not reading.skipped:
        raise RunFailed(
            f"the policy skips step {reading.step}, but its veto had let the update pass",
            rule="an update is skipped before it is made; afterwards a run can only roll back",
            fix="let the policy's veto and verdict agree",
        )


def roll_back(run: Training, step: int, so_far: Counter[int]) -> int:
    """Go back to the newest checkpoint, and say so. Returns its step. Collective.

    so_far: roll-backs by the step that asked for them. Raises RunFailed when this one asks too often.
    """
    so_far[step] += 1
    if so_far[step] > ROLL_BACKS_PER_STEP:
        raise RunFailed(
            f"the policy asked to roll back from step {step} for the {so_far[step]}th time",
            rule=f"a run rolls back {ROLL_BACKS_PER_STEP} times from the same step: more often does not help",
            fix="the losses up to there tell more: ingot report",
        )
    back_at = reload(run)
    run.log(events.ROLLED_BACK, from_step=step, to_step=back_at)
    run.say(f"rolled    back from step {step} to step {back_at}")
    return back_at
