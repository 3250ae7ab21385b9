"""The numbers of a step and of a log line for the recorder (telemetry/recorder.py), from clocks of the host and from
values that the log line has read. Nothing here waits for the device.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.plugins.callback import StepNumbers
from ingot.schema.metrics import METRICS
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.parts import RunParts
from ingot.trainer.resilience.policy import StepResult
from ingot.trainer.telemetry.goodput import Goodput
from ingot.trainer.telemetry.progress import ProgressLine
from ingot.trainer.telemetry.recorder import Recorder, next_lineage
from ingot.trainer.telemetry.usage import ThreadTime, Waits

STALL = "checkpoint/stall_seconds"


def open_recorder(
    config: RunConfig, folder: RunFolder, place: RankInfo, first_step: int, log: Callable[..., None]
) -> Recorder | None:
    """Return the recorder of this rank, if the run wants one. log: writes an event of this rank. Collective."""
    if not config.metrics.record:
        return None
    by_owner = {owner: [one.name for one in METRICS if one.owner == owner] for owner in ("run", "rank")}
    recorder = Recorder(
        folder.metrics,
        rank=place.rank,
        lineage=from_rank_zero(lambda: next_lineage(folder.metrics)),
        attempt=place.attempt,
        first_step=first_step,
        names=by_owner["rank"],
        run_names=by_owner["run"] if place.is_first else (),
        line_steps=config.watch.log_every,
        keep_steps=config.metrics.keep_steps,
        log=log,
    )
    if place.is_first:
        recorder.goodput = Goodput(folder.metrics, folder.events, first_step, time.time())
    return recorder


@dataclass
class Interval:
    """The steps between two log lines, on this rank's clocks. Saving and evaluation are not part of an interval.

    pipeline_before, waited_before: the total seconds that this rank had waited, for pipeline neighbors and for any
    other rank, when the interval began. own: the seconds of each step without its waits for other ranks. data: of
    these, those that it waited for data. counted: the sum of `own`. last: the numbers of the newest step.
    """

    began: ThreadTime
    waits: WaitClock
    pipeline_before: float
    waited_before: float
    own: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    counted: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    _ended: tuple[float, float, float] = (0.0, 0.0, 0.0)  # since the interval began: all time, waits, pipeline waits

    @classmethod
    def begin(cls, trainer: RunParts) -> "Interval":
        waits = trainer.waits
        return cls(ThreadTime.now(), waits, trainer.program.channels.waited_seconds, waits.seconds)

    def add(self, data_wait_seconds: float, pipeline_seconds: float) -> None:
        """Count a step that has ended now. pipeline_seconds: the total of this rank's waits for pipeline neighbors."""
        passed, waited = time.monotonic() - self.began.wall, self.waits.seconds - self.waited_before
        pipeline = pipeline_seconds - self.pipeline_before
        since = passed - waited
        self.own.append(since - self.counted)
        self.counted = since
        self.data.append(data_wait_seconds)
        before, self._ended = self._ended, (passed, waited, pipeline)
        self.last = {
            "perf/step_seconds": passed - before[0],
            "perf/wait_seconds": waited - before[1],
            "perf/pipeline_wait_seconds": pipeline - before[2],
            "data/wait_seconds": data_wait_seconds,
        }

    @property
    def steps(self) -> int:
        return len(self.own)

    @property
    def data_wait_seconds(self) -> float:
        return sum(self.data)

    def add_line(self, waits: Waits, memory_bytes: int, times: Mapping[str, float]) -> None:
        """Add what a log line has measured to the numbers of the newest step. waits, times: seconds of the whole
        interval; times by phase (mesh.step_times.py).

        The wait for the device, which comes here, is a part of the newest step.
        """
        steps = self.steps
        self.last["perf/step_seconds"] += waits.reading
        self.last |= {f"perf/{phase}_seconds": seconds / steps for phase, seconds in times.items()} | {
            "perf/computing_seconds": waits.computing / steps,
            "perf/queued_seconds": waits.queued / steps,
            "perf/reading_seconds": waits.reading / steps,
            "perf/blocked_seconds": waits.blocked / steps,
            "memory/peak_bytes": memory_bytes,
        }


def record_line(
    trainer: RunParts,
    recent: Sequence[StepResult],
    numbers: Sequence[StepNumbers],
    progress: ProgressLine,
    squares: np.ndarray,
) -> None:
    """Record the numbers of the run in the steps of a log line. On rank 0.

    squares: of the norms of weights and update of each rank (optim/update_size.py), [ranks, 2].
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
        "perf/eta_seconds": progress.eta_seconds,
        "run/cost_usd": progress.cost_usd,
        "run/cost_to_come_usd": trainer.cost.usd_of(progress.eta_seconds),
        "experts/load_cv": progress.load_cv,
        "experts/max_load": progress.max_load,
        "experts/dropped": progress.dropped,
        "experts/fallback": progress.fallback,
    }
    if (goodput := trainer.recorder.goodput) is not None:
        goodput.add(progress.step, progress.step_seconds * len(numbers))
        line["run/goodput"] = goodput.share(time.time())
    rows[-1][1].update({name: value for name, value in line.items() if value is not None})
    trainer.recorder.run_steps(rows)
