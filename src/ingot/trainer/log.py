"""The record of a run: events for programs, and one line per interval for people. Only rank 0 writes."""

import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ingot import __version__
from ingot.events import read_events
from ingot.plugins.callback import StepNumbers
from ingot.schema import events
from ingot.schema.alert import described as alert_text
from ingot.schema.guard_record import Measure, RetrainVerdict, described, deviations_text, retrained_text, retried_text
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.step_ranges import steps_text
from ingot.theory.devices import peak_flops, priced_devices
from ingot.theory.flops import model_flops_utilization
from ingot.theory.params import count_parameters
from ingot.trainer.evaluate import evaluate, run_logits, run_nats, sample_prompts, sanity_loss
from ingot.trainer.guard.sanity import SanityJudge
from ingot.trainer.loader.retry import DataTrouble
from ingot.trainer.loss_terms import log_loss_terms
from ingot.trainer.mesh.collectives import gather_from, sum_over_ranks
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.parts import RunParts
from ingot.trainer.record import Interval, record_check, record_layers, record_line
from ingot.trainer.resilience.heartbeat import Phase
from ingot.trainer.resilience.policy import StepResult, read_steps
from ingot.trainer.resilience.start_times import phases_text
from ingot.trainer.retry import RetriedStep, repeated_faults
from ingot.trainer.telemetry.progress import ProgressLine, expert_load, format_line
from ingot.trainer.telemetry.stragglers import Straggler
from ingot.trainer.telemetry.usage import KINDS, ThreadTime, Waits, peak_memory_bytes, summary, summary_by_axis
from ingot.units import counted, format_seconds


def log_interval(
    trainer: RunParts, recent: list[StepResult], interval: Interval, *, saves: bool
) -> tuple[list[StepNumbers], bool]:
    """Write a `step` event for each step, one `progress` event, one line, and the load of experts. Collective.

    The host waits for the device here, and the hashes of the state since the last line are compared. saves: a
    checkpoint follows, so the state is hashed once more, and the load of every expert is written, too.
    Returns the numbers of each step, which the policy has not judged yet, and whether the state of some rank is
    damaged.
    """
    read_at, hashes = time.monotonic(), trainer.hashes
    axes = interval.by_axis()  # before the exchanges of this line
    if hashes is not None:
        if saves:
            hashes.before_save(recent[-1].step)
        hashes.compare()
    numbers = read_steps(recent)
    damaged = hashes is not None and hashes.read()
    elapsed = ThreadTime.now().since(interval.began)
    waited = trainer.waits.seconds - interval.waited_before
    trained = [own for own in numbers if not own.passed]
    newest, step_seconds = trained[-1] if trained else None, elapsed.wall / len(trained) if trained else None
    memory = peak_memory_bytes(trainer.place.device)
    for result, own in zip(recent, numbers, strict=True):
        if not own.passed:
            trainer.log(events.STEP, step=result.step, loss=own.loss, grad_norm=own.grad_norm, lr=result.lr)
    log_findings(trainer, numbers)
    config, step, steps = trainer.config, recent[-1].step, trainer.config.train.steps
    tokens_per_second = config.tokens_per_step / step_seconds if step_seconds else None
    mfu = None
    if trainer.peak_flops is not None and tokens_per_second is not None:
        mfu = model_flops_utilization(tokens_per_second, trainer.flops_per_token, trainer.peak_flops)
    progress = ProgressLine(
        step=step,
        steps=steps,
        loss=newest and newest.loss,
        bpb=newest and newest.loss / math.log(2) * trainer.tokens_per_byte,
        grad_norm=newest and newest.grad_norm,
        lr=recent[-1].lr,
        tokens=step * config.tokens_per_step,
        tokens_per_second=tokens_per_second,
        mfu=mfu,
        data_wait_seconds=interval.data_wait_seconds / len(trained) if trained else None,
        step_seconds=step_seconds,
        eta_seconds=step_seconds and (steps - step) * step_seconds,
        cost_usd=trainer.cost.usd(),
        peak_memory_bytes=memory,
        passed=len(numbers) - len(trained),
        **log_experts(trainer, recent, with_loads=saves),
    )
    trainer.log(events.PROGRESS, **asdict(progress))
    log_loss_terms(trainer, step)
    pipeline = trainer.program.channels.waited_seconds - interval.pipeline_before
    waits = Waits.of(
        elapsed,
        data=interval.data_wait_seconds,
        pipeline=pipeline,
        collectives=waited - pipeline,
        reading=interval.began.wall + elapsed.wall - read_at,
    )
    times = trainer.program.times
    interval.add_line(waits, memory, times.take() if times is not None else {}, axes)
    still = trainer.alerts.unchanged(numbers, recent[-1].lr) if trainer.alerts else (0, 0)
    sizes = trainer.update_size.read() if trainer.update_size is not None else (0.0, 0.0)
    asked = trainer.layer_sizes is not None and trainer.layer_sizes.take_request()
    more = (*sizes, damaged, *still, asked)
    rows = log_waits(trainer, step, interval, waits, axes, more, step_seconds=step_seconds)
    any_damaged, unchanged = bool(rows[:, 2].any()), rows[:, 3:5]
    by_source = sum_over_ranks(trainer.source_loss.take()) if trainer.source_loss is not None else None
    record_line(trainer, recent, numbers, progress, rows[:, :2], by_source)
    layers = record_layers(trainer, asked=bool(rows[:, 5].any()))
    if trained and (phases := trainer.clock.line(elapsed.wall, interval.steps)) is not None:
        log_start_times(trainer, phases)
    trainer.say(format_line(progress))
    if trainer.alerts is not None:
        for alert in trainer.alerts.line(numbers, recent[-1].lr, unchanged, damaged=any_damaged, measured=layers):
            trainer.log(events.ALERT, **asdict(alert))
            trainer.say(f"alert     {alert_text(alert)}")
    return numbers, any_damaged


def log_findings(trainer: RunParts, numbers: Sequence[StepNumbers]) -> None:
    """Write what the guard found in each step, which were computed twice, and which steps changed no weights."""
    log_retries(trainer, trainer.retry.take() if trainer.retry is not None else ())
    for own in numbers:
        if found := own.finding:
            trainer.log(
                events.FINDING,
                step=own.step,
                found=list(found.kinds),
                loss=own.loss,
                grad_norm=own.grad_norm,
                loss_sigmas=found.loss_sigmas,
                norm_sigmas=found.norm_sigmas,
                norm_factor=found.norm_factor,
                skipped=own.skipped,
            )
            sizes = deviations_text(found.kinds, found.loss_sigmas, found.norm_sigmas)
            trainer.say(
                f"finding   step {own.step}: {', '.join(found.kinds)}; loss {own.loss:.4g}{sizes[0]}, "
                f"gradient norm {own.grad_norm:.4g}{sizes[1]}"
            )
    if found := [own for own in numbers if own.finding]:
        trainer.say(f"          why: {explanation(trainer.folder, found[0])}")
    for kind, steps in (
        (events.SKIPPED, [own.step for own in numbers if own.skipped and not own.passed]),
        (events.PASSED, [own.step for own in numbers if own.passed]),
    ):
        if steps:
            trainer.log(kind, steps=steps)
            s = "s" if len(steps) > 1 else ""
            what = "update" if kind == events.SKIPPED else "batch"
            trainer.say(f"{kind:8}  {what}{'es' if s and what == 'batch' else s} of step{s} {steps_text(steps)}")


def log_retries(trainer: RunParts, tried: Sequence[RetriedStep]) -> None:
    """Write which steps were computed twice, and an alert if faults that went away come again and again."""
    for one in tried:
        trainer.log(events.RETRIED, **asdict(one))
        trainer.say(f"retried   {retried_text(asdict(one))}")
    healed = sum(one.healthy for one in tried)
    if healed and trainer.retry is not None and trainer.place.is_first:
        repeated = repeated_faults(trainer.retry.of_all_attempts(trainer.folder, tried), healed)
        if repeated is not None:
            trainer.log(events.ALERT, **asdict(repeated))
            trainer.say(f"alert     {alert_text(repeated)}")


def explanation(folder: RunFolder, own: StepNumbers) -> str:
    """Return the command that explains a step with a finding."""
    return f"ingot explain {'spike' if own.is_finite else 'nan'} {folder.root} --step {own.step}"


def log_measure(log: Callable[..., None], say: Callable[[str], None], measure: Measure) -> None:
    """Write a measure of the guard, and a line."""
    log(events.GUARD, **asdict(measure))
    say(f"guard     {described(measure)}")


def log_retrained(
    log: Callable[..., None], say: Callable[[str], None], measure: Measure, verdict: RetrainVerdict
) -> None:
    """Write what the steps of a measure show that were trained again, and a line."""
    log(events.GUARD_REPLAYED, first=measure.first, last=measure.last, found=measure.found, verdict=verdict)
    say(f"guard     {retrained_text(measure.first, measure.last, verdict)}")


def log_start_times(trainer: RunParts, phases: dict[str, float | None]) -> None:
    """Write the `start_times` event of this attempt, and a line if it follows a fault."""
    total = sum(seconds for seconds in phases.values() if seconds is not None)
    trainer.log(events.START_TIMES, attempt=trainer.place.attempt, seconds=phases, total_seconds=round(total, 4))
    if phases["kill"] is not None:
        trainer.say(f"restart   {format_seconds(total)} in all: {phases_text(phases)}")


def log_waits(
    trainer: RunParts,
    step: int,
    interval: Interval,
    waits: Waits,
    axes: Mapping[str, tuple[float, float]],
    more: Sequence[float],
    *,
    step_seconds: float | None,
) -> np.ndarray:
    """Write one `waits` event with the waits and the communication of all ranks, and one `straggler` event for each
    that is newly slow, or whose machine may be drained now; nothing without a trained step. Returns `more` of all
    ranks, [ranks, len(more)]. Collective: one exchange of a few numbers per rank."""
    typical = np.median([interval.own or [0.0], interval.data or [0.0]], axis=1)
    numbers = [waits.row(), np.ravel([*axes.values()]), typical, more]
    rows = gather_from(range(trainer.place.world_size), np.concatenate(numbers))
    own, by_axis, typical, others = np.split(rows, np.cumsum([len(part) for part in numbers[:-1]]), axis=1)
    if step_seconds is None:
        return others
    found = summary(own, KINDS, interval.steps) | {"axes": summary_by_axis(by_axis, [*axes], interval.steps)}
    trainer.log(events.WAITS, step=step, steps=interval.steps, **found)
    if trainer.stragglers is not None:
        news = trainer.stragglers.take(step, interval.steps, *typical.T)
        if trainer.slow_machines is not None:
            news = trainer.slow_machines.take(step, interval.steps, step_seconds, trainer.stragglers, news)
        for found in news:
            log_straggler(trainer, step, found)
    return others


def log_straggler(trainer: RunParts, step: int, found: Straggler) -> None:
    """Write the `straggler` event of a rank that is slow, or is slow no more, and a line."""
    hosts = {e["rank"]: e["host"] for e in read_events(trainer.folder.events, events.RANK_STARTED)}
    host = str(hosts.get(found.rank, ""))
    slowdown = found.slowdown and round(found.slowdown, 3)
    rounded = {"seconds": round(found.seconds, 6), "factor": round(found.factor, 3), "slowdown": slowdown}
    trainer.log(events.STRAGGLER, step=step, host=host, **vars(found) | rounded)
    if found.ended:
        trainer.say(f"straggler rank {found.rank} on {host} is as fast as its peers again")
    else:
        trainer.say(
            f"straggler rank {found.rank} on {host} takes {found.factor:.1f} times as long as its peers since step "
            f"{found.since} ({found.phase}): all wait {format_seconds(found.seconds)} of a step for it"
            + ("; long enough to drain its machine" if found.slowdown else "")
        )


def log_data_trouble(trainer: RunParts, step: int, trouble: DataTrouble) -> None:
    """Write the `data_trouble` event of this rank, and a line."""
    rank, seconds = trainer.place.rank, round(trouble.seconds, 3)
    trainer.event_log.write(events.DATA_TROUBLE, rank=rank, step=step, **vars(trouble) | {"seconds": seconds})
    tries = counted(trouble.tries, "time")
    line = f"data      {trouble.path}: {trouble.reason}, {tries} in {seconds:.1f} s, before step {step}"
    if trainer.place.is_first:
        trainer.say(line)
    else:
        print(f"rank {rank}: {line}", file=sys.stderr, flush=True)


def log_experts(trainer: RunParts, recent: list[StepResult], *, with_loads: bool) -> dict[str, Any]:
    """Write an `experts` event about all tokens of the steps `recent`, if there are experts. Collective.

    Returns the fields of the progress line about experts.
    """
    tables = [result.experts for result in recent if result.experts is not None]
    if trainer.balance is None or not tables:
        return {}
    moe = trainer.config.model.moe
    found = expert_load(
        torch.stack(tables).sum(0).cpu().numpy(),
        trainer.balance.layers,
        step=recent[-1].step,
        steps=len(tables),
        overflow=moe.overflow if moe.capacity_factor else "",
        with_loads=with_loads,
    )
    trainer.log(events.EXPERTS, **asdict(found))
    beyond = {"dropped": found.dropped, "fallback": found.fallback}
    means = {name: fmean(shares) if shares else None for name, shares in beyond.items()}
    return {"load_cv": fmean(found.load_cv), "max_load": max(found.max_load), **means}


def log_evaluation(trainer: RunParts, step: int) -> None:
    """Score the held-out text, if the run has one. Collective."""
    if trainer.heldout is None:
        return
    began = time.monotonic()
    found = evaluate(
        run_nats(trainer),
        trainer.heldout,
        micro_batch=trainer.config.train.micro_batch,
        device=trainer.place.device,
        part=trainer.mesh.data_rank,
        readers=trainer.readers,
    )
    seconds = round(time.monotonic() - began, 6)
    trainer.heartbeat.learn(Phase.EVALUATE, seconds)
    trainer.log(events.EVALUATION, step=step, **found.facts(), seconds=seconds)
    trainer.say(f"held-out  step {step}  bpb {found.total.bpb:.3f}  unigram {found.total.unigram_bpb:.3f}")


def log_sanity(trainer: RunParts, sanity: SanityJudge, step: int, line: Sequence[StepNumbers]) -> None:
    """Judge the weights by a fixed batch of held-out text before `step` is saved, and report it. Collective.

    line: the numbers of the last steps."""
    with nullcontext() if trainer.route_flips is None else trainer.route_flips.watching():
        loss = sanity_loss(trainer)
    record_check(trainer, step, loss)
    losses = [numbers.loss for numbers in line if not numbers.skipped]
    warning = sanity.judge(step, loss, fmean(losses) if losses else None)
    trainer.log(events.SANITY, step=step, loss=loss, suspect=bool(sanity.reason))
    if warning:
        trainer.say(f"WARNING   {warning}")


def log_samples(trainer: RunParts, step: int) -> None:
    """Continue the prompts of the run file, if it has any. Collective."""
    wanted = trainer.config.evaluate
    if trainer.encoder is None or not wanted.prompts:
        return
    arch = trainer.config.model
    samples = sample_prompts(
        lambda: run_logits(trainer, arch.max_seq_len),
        arch,
        trainer.encoder,
        wanted.prompts,
        max_tokens=wanted.sample_tokens,
        seed=trainer.config.seed,
    )
    for prompt, text in samples:
        trainer.log(events.SAMPLE, step=step, prompt=prompt, text=text)
        trainer.say(f"sample    {prompt!r} {text!r}")


def log_start(trainer: RunParts) -> None:
    """Write the `run_started` event: layout, model size, versions, hardware and the step to start from."""
    config, place, facts = trainer.config, trainer.place, trainer.checkpoint_facts
    on_gpu = place.device.type == "cuda"
    trainer.log(
        events.RUN_STARTED,
        run=config.name,
        attempt=place.attempt,
        world_size=place.world_size,
        layout=trainer.mesh.layout | _extra_layout(trainer.mesh.parallel),
        device=place.device.type,
        precision=config.train.precision,
        parameters=count_parameters(config.model),
        flops_per_token=trainer.flops_per_token,
        peak_flops=trainer.peak_flops,
        versions={
            "ingot": __version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        hardware={
            "device_name": torch.cuda.get_device_name(place.device) if on_gpu else platform.processor() or "cpu",
            "cores": len(os.sched_getaffinity(0)),
            "host": socket.gethostname(),
        },
        from_step=trainer.first_step - 1,
        config_sha256=facts.config_sha256,
        data_fingerprint=facts.data_fingerprint,
    )


def _extra_layout(parallel: Parallel) -> dict[str, int | str]:
    """Return the fields logged with a layout besides its axes: expert degree and form of context parallelism."""
    experts: dict[str, int | str] = {"ep": parallel.ep} if parallel.ep > 1 else {}
    return experts | ({"context": parallel.context_form} if parallel.cp > 1 else {})


def devices_in_use(place: RankInfo) -> int:
    """Return the number of devices that a price per hour counts: GPUs, or machines if the run is on CPUs."""
    machines = place.world_size // place.local_world_size
    return priced_devices(place.world_size, machines, on_gpu=place.device.type == "cuda")


def total_peak(config: RunConfig, place: RankInfo) -> float | None:
    """Return the published peak of all GPUs of the run for its precision, FLOP/s; None on a CPU or an unknown GPU."""
    if place.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(place.device), config.train.precision)
    return peak and peak * place.world_size
