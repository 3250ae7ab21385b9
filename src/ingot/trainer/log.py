"""What a run tells the world: events for machines, one line per interval for people. Only rank 0 writes."""

import math
import time
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from ingot.schema import events
from ingot.theory.flops import model_flops_utilization
from ingot.trainer.build import Training
from ingot.trainer.evaluate import evaluate, sample_prompts
from ingot.trainer.forward import run_logits, run_nats
from ingot.trainer.mesh.collectives import gather_from
from ingot.trainer.resilience.policy import Facts, Reading, read_steps
from ingot.trainer.telemetry.experts import expert_load
from ingot.trainer.telemetry.line import Progress, format_line
from ingot.trainer.telemetry.memory import peak_memory_bytes
from ingot.trainer.telemetry.waits import ThreadTime, Waits, summary


@dataclass
class Interval:
    """What passed between two log lines, on this rank's clocks. Saving and evaluating lie outside of it.

    pipeline_before: how long this rank had waited for neighbours in the pipeline when it began.
    """

    began: ThreadTime
    pipeline_before: float
    steps: int = 0
    data_wait_seconds: float = 0.0

    @classmethod
    def begin(cls, run: Training) -> "Interval":
        return cls(ThreadTime.now(), run.program.channels.waited_seconds)

    def add(self, data_wait_seconds: float) -> None:
        self.steps += 1
        self.data_wait_seconds += data_wait_seconds


def log_interval(run: Training, recent: list[Facts], interval: Interval, *, saves: bool) -> list[Reading]:
    """A `step` event for each step, one `progress` event and the line; for experts, how they were used. Collective.

    Here the host waits for the device. saves: a checkpoint follows, so the load of every expert is written, too.
    Returns the numbers of the steps, which a policy has not judged yet.
    """
    reading_began = time.monotonic()
    readings = read_steps(recent)
    passed = ThreadTime.now().since(interval.began)
    step_seconds = passed.wall / interval.steps
    for facts, reading in zip(recent, readings, strict=True):
        run.log(events.STEP, step=facts.step, loss=reading.loss, grad_norm=reading.grad_norm, lr=facts.lr)
    if skipped := [reading.step for reading in readings if reading.skipped]:
        run.log(events.SKIPPED, steps=skipped)
        run.say(f"skipped   the update of step {', '.join(map(str, skipped))}")
    config, step, steps = run.config, recent[-1].step, run.config.train.steps
    tokens_per_second = config.tokens_per_step / step_seconds
    mfu = None
    if run.peak_flops is not None:
        mfu = model_flops_utilization(tokens_per_second, run.flops_per_token, run.peak_flops)
    progress = Progress(
        step=step,
        steps=steps,
        loss=readings[-1].loss,
        bpb=readings[-1].loss / math.log(2) * run.tokens_per_byte,
        grad_norm=readings[-1].grad_norm,
        lr=recent[-1].lr,
        tokens=step * config.tokens_per_step,
        tokens_per_second=tokens_per_second,
        mfu=mfu,
        data_wait_seconds=interval.data_wait_seconds / interval.steps,
        step_seconds=step_seconds,
        eta_seconds=(steps - step) * step_seconds,
        cost_usd=run.cost.usd(),
        peak_memory_bytes=peak_memory_bytes(run.place.device),
        **log_experts(run, recent, with_loads=saves),
    )
    run.log(events.PROGRESS, **asdict(progress))
    waits = Waits.of(
        passed,
        data=interval.data_wait_seconds,
        pipeline=run.program.channels.waited_seconds - interval.pipeline_before,
        reading=interval.began.wall + passed.wall - reading_began,
    )
    log_waits(run, step, interval.steps, waits)
    run.say(format_line(progress))
    return readings


def log_waits(run: Training, step: int, steps: int, mine: Waits) -> None:
    """One `waits` event, of all ranks. Collective."""
    rows = gather_from(range(run.place.world_size), mine.row())
    run.log(events.WAITS, step=step, steps=steps, **summary(rows, steps))


def log_experts(run: Training, recent: list[Facts], *, with_loads: bool) -> dict[str, Any]:
    """An `experts` event, if there are any, over all tokens of `recent`. Returns what a progress line says of it."""
    tables = [facts.experts for facts in recent if facts.experts is not None]
    if run.balance is None or not tables:
        return {}
    moe = run.config.model.moe
    found = expert_load(
        torch.stack(tables).sum(0).cpu().numpy(),
        run.balance.layers,
        step=recent[-1].step,
        steps=len(tables),
        overflow=moe.overflow if moe.capacity_factor else "",
        with_loads=with_loads,
    )
    run.log(events.EXPERTS, **asdict(found))
    beyond = {"dropped": found.dropped, "fallback": found.fallback}
    means = {name: fmean(shares) if shares else None for name, shares in beyond.items()}
    return {"load_cv": fmean(found.load_cv), "max_load": max(found.max_load), **means}


def log_evaluation(run: Training, step: int) -> None:
    """Score the held-out text, if the run has one. Collective."""
    if run.heldout is None:
        return
    began = time.monotonic()
    found = evaluate(
        run_nats(run),
        run.heldout,
        micro_batch=run.config.train.micro_batch,
        device=run.place.device,
        part=run.mesh.data_rank,
        readers=run.readers,
    )
    seconds = round(time.monotonic() - began, 6)
    run.log(events.EVALUATION, step=step, **found.facts(), seconds=seconds)
    run.say(f"held-out  step {step}  bpb {found.total.bpb:.3f}  unigram {found.total.unigram_bpb:.3f}")


def log_samples(run: Training, step: int) -> None:
    """Continue the prompts of the run file, if it has any. Collective."""
    wanted = run.config.evaluate
    if run.encoder is None or not wanted.prompts:
        return
    arch = run.config.model
    samples = sample_prompts(
        lambda: run_logits(run, arch.max_seq_len),
        arch,
        run.encoder,
        wanted.prompts,
        max_tokens=wanted.sample_tokens,
        seed=run.config.seed,
    )
    for prompt, text in samples:
        run.log(events.SAMPLE, step=step, prompt=prompt, text=text)
        run.say(f"sample    {prompt!r} {text!r}")
