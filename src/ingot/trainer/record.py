"""The numbers of a step and of a log line for the recorder (telemetry/recorder.py), from clocks of the host and from
values that the log line has read. Nothing here waits for the device.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ingot.plugins.callback import StepNumbers
from ingot.schema import events
from ingot.schema.metric_files import EXTRA_TABLES
from ingot.schema.metrics import METRICS
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.guard.alerts import LOW_PRECISION
from ingot.trainer.loader.reader import Windows
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.mesh.step_times import StepTimes
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.optim.update_size import UpdateSize
from ingot.trainer.parts import RunParts
from ingot.trainer.resilience.policy import StepResult
from ingot.trainer.telemetry.device_watch import DeviceWatch
from ingot.trainer.telemetry.goodput import TRAINED, Goodput
from ingot.trainer.telemetry.layer_sizes import OTHER, LayerSizes
from ingot.trainer.telemetry.progress import ProgressLine
from ingot.trainer.telemetry.recorder import LineageKey, Recorder, next_lineage
from ingot.trainer.telemetry.route_flips import RouteFlips
from ingot.trainer.telemetry.source_loss import SourceLoss, recorded_sources
from ingot.trainer.telemetry.usage import ThreadTime, Waits

STALL = "checkpoint/stall_seconds"
_FLIPS = "experts/route_flips"
# The numbers of a log line that no event but `measured` has.
_MEASURED = ("train/param_norm", "train/update_ratio", "run/goodput", "run/cost_to_come_usd")


def open_recorder(
    config: RunConfig,
    folder: RunFolder,
    place: RankInfo,
    first_step: int,
    log: Callable[..., None],
    *,
    epoch: int = 0,
    sources: Sequence[str] = (),
    axes: Sequence[str] = (),
) -> Recorder | None:
    """Return the recorder of this rank, if the run wants one. Collective.

    log: writes an event of this rank. epoch: of the lease of the run (checkpoint/fence.py). sources: the names under
    which the loss of data sources is recorded. axes: those whose communication is (mesh/axis_traffic.py).
    """
    if not config.metrics.record:
        return None
    by_table: dict[str, list[str]] = {table: [] for table in ("run", "rank", *EXTRA_TABLES)}
    words = {"source": sources, "layer": [*range(config.model.num_layers), OTHER], "axis": axes}
    for one in METRICS:
        word = next((word for word in words if f"{{{word}}}" in one.name), "")
        own = [one.name.replace(f"{{{word}}}", str(name)) for name in words[word]] if word else [one.name]
        by_table[one.table or one.owner] += own
    recorder = Recorder(
        folder.metrics,
        rank=place.rank,
        ranks=place.world_size,
        lineage=LineageKey(*from_rank_zero(lambda: next_lineage(folder.metrics, epoch, first_step))),
        attempt=place.attempt,
        names=by_table["rank"],
        run_names=by_table["run"] if place.is_first else (),
        extra_names={table: by_table[table] for table in EXTRA_TABLES if place.is_first},
        line_steps=config.watch.log_every,
        keep_steps=config.metrics.keep_steps,
        log=log,
    )
    if place.is_first:
        recorder.goodput = Goodput(folder.metrics, folder.events, first_step, time.time())
    if (uuid := device_uuid(place.device)) is not None:
        recorder.device = DeviceWatch(uuid)
    return recorder


def device_uuid(device: torch.device) -> str | None:
    """Return the identity of a GPU, as NVML knows it; None for other devices."""
    if device.type != "cuda":
        return None
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if found is None else f"GPU-{found}"


def open_measurements(trainer: RunParts, manifest: TokenManifest) -> None:
    """Add to a run what measures its steps for the recorder. manifest: of its tokens."""
    config, place = trainer.config, trainer.place
    shards, stages = trainer.model.shards, trainer.model.stages
    trainer.program.times = StepTimes(place.device, trainer.waits)
    trainer.update_size = UpdateSize(shards, config.watch.log_every, device=place.device)
    request = trainer.folder.measure_layers if place.is_first else None
    dtype = LOW_PRECISION.get(config.train.precision)
    range_every = config.guard.precision_every if config.guard.watches else 0
    layers, every = config.model.num_layers, config.metrics.layers_every
    trainer.layer_sizes = LayerSizes(shards, stages, layers, every, request, dtype, range_every)
    trainer.program.observers = [trainer.layer_sizes]
    sources, source_of_shard = recorded_sources(manifest)
    if sources:
        last = stages.get(len(trainer.program.table.rank_of_stage) - 1) if trainer.loss_share else None
        windows = Windows(manifest, config.train.seq_len)
        trainer.source_loss = SourceLoss(
            sources,
            source_of_shard,
            lambda ids: windows.locate(ids)[0],
            rows=config.train.micro_batch,
            tokens=config.train.seq_len // trainer.mesh.size("cp"),
            readout=last and last.get_submodule("readout"),
        )
        trainer.program.observers.append(trainer.source_loss)
    if trainer.balance is not None and trainer.sanity is not None:
        trainer.route_flips = RouteFlips(stages)


@dataclass
class Interval:
    """The steps between two log lines, on this rank's clocks. Saving and evaluation are not part of an interval.

    pipeline_before, waited_before: the total seconds that this rank had waited, for pipeline neighbors and for any
    other rank, when the interval began. own: the seconds of each trained step without its waits for other ranks.
    data: of these, those that it waited for data. counted: the seconds so far without waits. last: the numbers of the
    newest step. axes_before: the seconds of communication by axis when the interval began (WaitClock.by_axis).
    """

    began: ThreadTime
    waits: WaitClock
    pipeline_before: float
    waited_before: float
    axes_before: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    own: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    counted: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    _ended: tuple[float, float, float] = (0.0, 0.0, 0.0)  # since the interval began: all time, waits, pipeline waits

    @classmethod
    def begin(cls, trainer: RunParts) -> "Interval":
        waits = trainer.waits
        pipeline = trainer.program.channels.waited_seconds
        return cls(ThreadTime.now(), waits, pipeline, waits.seconds, waits.by_axis())

    def add(self, data_wait_seconds: float, pipeline_seconds: float, *, passed: bool = False) -> None:
        """Count a step that has ended now. pipeline_seconds: the total of this rank's waits for pipeline neighbors.
        passed: its data were passed, so that it is none of the trained steps."""
        elapsed, waited = time.monotonic() - self.began.wall, self.waits.seconds - self.waited_before
        pipeline = pipeline_seconds - self.pipeline_before
        since = elapsed - waited
        if not passed:
            self.own.append(since - self.counted)
            self.data.append(data_wait_seconds)
        self.counted = since
        before, self._ended = self._ended, (elapsed, waited, pipeline)
        self.last = {
            "perf/step_seconds": elapsed - before[0],
            "perf/wait_seconds": waited - before[1],
            "perf/pipeline_wait_seconds": pipeline - before[2],
            "data/wait_seconds": data_wait_seconds,
        }

    @property
    def steps(self) -> int:
        """The number of trained steps."""
        return len(self.own)

    @property
    def data_wait_seconds(self) -> float:
        return sum(self.data)

    def by_axis(self) -> dict[str, tuple[float, float]]:
        """Return axis -> (exposed, hidden) seconds of communication since the interval began, NaN where not known."""
        found = self.waits.by_axis()
        return {
            axis: (found[axis][0] - exposed, found[axis][1] - hidden)
            for axis, (exposed, hidden) in self.axes_before.items()
        }

    def add_line(
        self,
        waits: Waits,
        memory_bytes: int,
        times: Mapping[str, float],
        axes: Mapping[str, tuple[float, float]],
    ) -> None:
        """Add what a log line has measured to the numbers of the newest step. waits, times, axes: seconds of the whole
        interval; times by phase (mesh.step_times.py), axes as `by_axis` returns them.

        The wait for the device, which comes here, is a part of the newest step.
        """
        steps = max(self.steps, 1)
        self.last["perf/step_seconds"] += waits.reading
        self.last |= {f"perf/{phase}_seconds": seconds / steps for phase, seconds in times.items()} | {
            "perf/computing_seconds": waits.computing / steps,
            "perf/queued_seconds": waits.queued / steps,
            "perf/reading_seconds": waits.reading / steps,
            "perf/blocked_seconds": waits.blocked / steps,
            "memory/peak_bytes": memory_bytes,
        }
        for axis, (exposed, hidden) in axes.items():
            self.last[f"perf/{axis}/exposed_seconds"] = exposed / steps
            if not math.isnan(hidden):
                self.last[f"perf/{axis}/hidden_seconds"] = hidden / steps


def record_line(
    trainer: RunParts,
    recent: Sequence[StepResult],
    numbers: Sequence[StepNumbers],
    progress: ProgressLine,
    squares: np.ndarray,
    by_source: np.ndarray | None = None,
) -> None:
    """Record the numbers of the run in the steps of a log line. On rank 0.

    squares: of the norms of weights and update of each rank (optim/update_size.py), [ranks, 2]. by_source: the sums
    of all ranks by data source (telemetry/source_loss.py).
    """
    if trainer.recorder is None or not trainer.place.is_first:
        return
    per_byte, tokens_per_step = trainer.tokens_per_byte / math.log(2), trainer.config.tokens_per_step
    rows: list[tuple[int, dict[str, float]]] = []
    for result, own in zip(recent, numbers, strict=True):
        values = {"train/lr": result.lr, "train/tokens": result.step * tokens_per_step, "train/skipped": own.skipped}
        if not own.passed:
            values |= {
                "train/loss": own.loss,
                "train/bpb": own.loss * per_byte,
                "train/grad_norm": own.grad_norm,
            }
        rows.append((result.step, values))
    weights, update = np.sqrt(squares.sum(0))
    line = {
        "train/param_norm": weights,
        "train/update_ratio": None if math.isnan(update) else update / weights,
        "perf/tokens_per_second": progress.tokens_per_second,
        "perf/mfu": progress.mfu,
        "run/eta_seconds": progress.eta_seconds,
        "run/cost_usd": progress.cost_usd,
        "run/cost_to_come_usd": eta if (eta := progress.eta_seconds) is None else trainer.cost.usd_of(eta),
        "experts/load_cv": progress.load_cv,
        "experts/max_load": progress.max_load,
        "experts/dropped": progress.dropped,
        "experts/fallback": progress.fallback,
    }
    if (goodput := trainer.recorder.goodput) is not None:
        goodput.add(progress.step, (progress.step_seconds or 0.0) * (len(numbers) - progress.passed))
        line |= {TRAINED: goodput.trained_seconds, "run/goodput": goodput.share(time.time())}
    found = {name: float(value) for name, value in line.items() if value is not None}
    rows[-1][1].update(found)
    _log_measured(trainer, progress.step, {name: found[name] for name in _MEASURED if name in found})
    trainer.recorder.run_steps(rows)
    if trainer.source_loss is not None and by_source is not None:
        losses, shares = trainer.source_loss.means(by_source)
        if losses:
            trainer.log(events.SOURCES, step=progress.step, loss=losses, share=shares)
        of_sources = {f"data/{name}/loss": loss for name, loss in losses.items()}
        of_sources |= {f"data/{name}/share": share for name, share in shares.items()}
        trainer.recorder.extra("sources", progress.step, of_sources)


def record_layers(trainer: RunParts, *, asked: bool) -> list[tuple[int, dict[str, float]]]:
    """Record what was measured of each layer since the last log line, and return it as (step, its numbers by name).
    asked: somebody asks for the next step, too. Collective."""
    if trainer.layer_sizes is None or trainer.recorder is None:
        return []
    measured = trainer.layer_sizes.read()
    for step, values in measured:
        trainer.recorder.extra("layers", step, values)
        _log_measured(trainer, step, values)
    if asked:
        trainer.layer_sizes.ask()
    return measured


def record_check(trainer: RunParts, step: int, loss: float) -> None:
    """Record what the fixed batch of held-out text shows before a save. loss: of it. Collective."""
    if trainer.recorder is None:
        return
    values = {"eval/sanity_loss": loss}
    if trainer.route_flips is not None and (share := trainer.route_flips.share()) is not None:
        values[_FLIPS] = share
        _log_measured(trainer, step, {_FLIPS: share})
    trainer.recorder.extra("checks", step, values)


def _log_measured(trainer: RunParts, step: int, values: Mapping[str, float]) -> None:
    """Write a `measured` event: sinks and pages read the log, not the files of the recorder."""
    if values:
        trainer.log(events.MEASURED, step=step, values=dict(values))
