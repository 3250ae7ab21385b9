"""The training loop. It reads from top to bottom: next batch, step, facts; now and then log, save, evaluate, stop."""

import time
from dataclasses import dataclass

from ingot.optim.schedule import learning_rate
from ingot.schema import events
from ingot.train.build import Training
from ingot.train.log import Interval, log_evaluation, log_interval, log_samples
from ingot.train.save import save
from ingot.train.step import StepFacts, train_step


@dataclass(frozen=True)
class Ending:
    """step: the last one done and saved. stopped: before the end of the run, on request or at `until_step`."""

    step: int
    stopped: bool


def train(run: Training) -> Ending:
    """Train from `run.first_step` to the last step, or to a stop request. What was done is saved when it returns.

    `run.until_step` is a stop that was asked for beforehand. Between two log lines the facts of the steps stay on the
    device, and the host never waits for it. Whether to stop is asked at every log line. Nothing is saved before the
    losses up to it were seen to be finite.
    """
    config = run.config
    steps, done, stopped = config.train.steps, run.first_step - 1, False
    began = time.monotonic()
    recent: list[StepFacts] = []
    interval = Interval.begin()

    if run.until_step < run.first_step <= steps:  # it came this far before
        run.log(events.STOPPED, step=done, reason="requested")
        return Ending(done, stopped=True)

    for batch in run.loader:
        lr = learning_rate(batch.step, steps, config.optim.lr, config.schedule)
        recent.append(train_step(run.model, run.optimizer, batch, lr, config.optim.clip_norm))
        run.ledger.record(batch.step, batch.sample_ids)
        interval.add(batch.wait_seconds)
        done = batch.step

        save_now = done == run.until_step or done % config.checkpoint.every_steps == 0
        evaluate_now = done < steps and is_due(done, config.evaluate.every_steps)
        if not (save_now or evaluate_now or is_due(done, config.watch.log_every)):
            continue

        log_interval(run, recent, interval)
        recent.clear()
        stopped = done < steps and (done == run.until_step or run.verdict.stop_requested())
        if save_now or stopped:
            save(run, done)
        if evaluate_now:  # also before a stop: the run that goes on from here starts after this step
            log_evaluation(run, done)
        if stopped:
            run.log(events.STOPPED, step=done, reason="requested")
            break
        interval = Interval.begin()

    if not stopped:  # also when a run that was killed after its last checkpoint comes back
        log_evaluation(run, done)
        log_samples(run, done)
        seconds = round(time.monotonic() - began, 3)
        run.log(events.FINISHED, step=done, tokens=done * config.tokens_per_step, seconds=seconds)
    return Ending(done, stopped)


def is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0
