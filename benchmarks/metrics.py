"""The cost of recording the numbers of every rank and step (trainer/record.py), and of opening a million of them.

Cost: the CPU seconds of all that the record adds to a step, relative to those of the step, on one process; medians of
steps in which both are measured. What a log line adds is played on a line of ten steps and counted by the step. The
thread that writes is measured by its own CPU clock, while steps run as they come.

Traffic: the CPU seconds that the communication by axis adds to an exchange, and to a step of the same model on four
ranks, whose exchanges are counted by hand.

Opening: the CPU seconds of a series of 1,000 points of a million steps, and of the newest rows of 1,000 ranks.

    python benchmarks/metrics.py [--rounds 60]
"""

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from intervals import ratio_in_percent
from record import record

from ingot.events import EventLog
from ingot.planner.request.presets import load_model
from ingot.plugins.callback import StepNumbers
from ingot.schema.metric_files import TableWriter, lineage_folder
from ingot.schema.metrics import METRICS, newest_rows, read_series
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.trainer.build import build_parts
from ingot.trainer.mesh.axis_traffic import AxisTraffic
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.mesh.step_times import StepTimes
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.optim.update_size import UpdateSize
from ingot.trainer.record import Interval, open_recorder, record_line
from ingot.trainer.step import train_step
from ingot.trainer.telemetry.layer_sizes import LayerSizes
from ingot.trainer.telemetry.progress import ProgressLine
from ingot.trainer.telemetry.source_loss import SourceLoss
from ingot.trainer.telemetry.usage import CostMeter, ThreadTime, Waits, peak_memory_bytes

_LINE, _FIRST = 10, 6  # the first steps allocate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--parts", default="cost,traffic,opening", help="some of them")
    args = parser.parse_args()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "cost" in args.parts:
            found["cost"] = cost(Path(folder) / "run", args.rounds)
            print(found["cost"])
        if "traffic" in args.parts:
            found["traffic"] = traffic(args.rounds)
            print(found["traffic"])
        if "opening" in args.parts:
            found["opening"] = opening(Path(folder) / "metrics")
            print(found["opening"])
    record("metrics", found, ["torch", "numpy"])


def cost(root: Path, rounds: int) -> dict[str, object]:
    """Return the CPU seconds of a step and of all that the record adds, and their ratio with its interval."""
    root.mkdir()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tiny, device = load_model("tiny"), torch.device("cpu")
    settings = Train(
        steps=10**6,
        seq_len=tiny.train.seq_len,
        global_batch=tiny.train.global_batch,
        micro_batch=tiny.train.global_batch,
        precision="fp32",
    )
    run = RunConfig(name="cost", model=tiny.arch, data=Data(tokens="made up"), train=settings)
    parts = build_parts(run, device, Path())
    sizes, waits = UpdateSize(parts.model.shards, 1), WaitClock()
    layers = LayerSizes(parts.model.shards, parts.model.stages, tiny.arch.num_layers, 0, root / "measure-layers")
    readout, per_step = parts.model.stages[0].get_submodule("readout"), settings.global_batch
    sources = TimedSourceLoss(
        ["code", "web"],
        np.array([0, 1]),
        lambda ids: ids % 2,
        rows=settings.micro_batch,
        tokens=settings.seq_len,
        readout=readout,
    )
    parts.program.observers = [layers, sources]
    parts.program.times = StepTimes(device, waits)  # its clocks count for the step: four readings
    place = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0, device=device)
    recorder = open_recorder(run, RunFolder(root), place, 1, print, sources=sources.names)
    assert recorder is not None and recorder._thread.ident is not None
    cost_meter = CostMeter(2.0, 1, root / "events.jsonl")
    trainer = SimpleNamespace(
        config=run,
        place=place,
        recorder=recorder,
        tokens_per_byte=0.25,
        cost=cost_meter,
        source_loss=sources,
        log=EventLog(root / "events.jsonl").write,
    )
    thread = time.pthread_getcpuclockid(recorder._thread.ident)
    # A full collection of garbage visits all modules of torch, 0.5 s, in whichever thread makes the object that is one
    # too many. In ranks these objects are frozen before the fork (launch/fork_server.py), and so they are here.
    gc.freeze()
    collections = [each["collections"] for each in gc.get_stats()]
    names = ("step", "rows", "line", "update size", "sources", "thread")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for step in range(1, rounds + _FIRST):
        ids = torch.randint(0, tiny.arch.vocab_size, (1, settings.global_batch, settings.seq_len + 1))
        batch = SimpleNamespace(step=step, inputs=ids[..., :-1], targets=ids[..., 1:], document_ids=None)
        interval = Interval(ThreadTime.now(), waits, 0.0, 0.0)
        written = time.clock_gettime(thread)
        began = time.thread_time()
        result = train_step(parts, batch, 1e-4)
        stepped = time.thread_time()
        sources.add(step, np.arange(per_step))
        interval.add(0.0, 0.0)
        recorder.step(step, interval.last, is_open=True)
        row = time.thread_time()
        sizes.before_update(step)
        sizes.after_update()
        squares = np.array([sizes.read()])
        squares_read = time.thread_time() - row
        by_source = sources.take()
        layers.take_request()
        sources_read = time.thread_time() - row - squares_read
        memory = peak_memory_bytes(device)  # the log line has it, and the numbers, without a record, too
        numbers = [StepNumbers(step, float(result.loss), float(result.grad_norm), skipped=False)]
        sized = time.thread_time()
        zero = Waits(data=0.0, pipeline=0.0, collectives=0.0, reading=0.0, computing=0.0, queued=0.0, blocked=0.0)
        interval.add_line(zero, memory, parts.program.times.take(), {})
        record_line(trainer, [result], numbers, progress_of(step), squares, by_source)
        lined = time.thread_time()
        if step >= _FIRST:
            seconds["step"].append(stepped - began)
            seconds["rows"].append(row - stepped)
            seconds["update size"].append(squares_read / _LINE)
            seconds["line"].append(lined - sized)  # a row of the run for each step, and a tenth of the line: rounded up
            seconds["sources"].append(sources.seconds + sources_read / _LINE)
            seconds["thread"].append(time.clock_gettime(thread) - written)
    recorder.close()
    dist.destroy_process_group()
    means = {"thread": statistics.fmean(seconds["thread"])}  # it wakes up twice a second
    added = [seconds[part] for part in ("rows", "line", "update size", "sources")] + [[means["thread"]] * rounds]
    medians = {part: statistics.median(each) for part, each in seconds.items()} | means
    since = [each["collections"] - before for each, before in zip(gc.get_stats(), collections, strict=True)]
    return medians | ratio_in_percent(added, seconds["step"]) | {"collections of garbage": since}


def traffic(rounds: int) -> dict[str, float]:
    """Return the CPU seconds that the division by axis adds to an exchange, the median of `rounds`, and to a step."""
    mesh: Any = SimpleNamespace(size=lambda axis: 2 if axis in ("dp_shard", "tp") else 1, views=())
    groups: list[Any] = [
        SimpleNamespace(size=lambda: 2, group_desc=f"mesh_{axis}", group_name=axis) for axis in ("shard", "tp")
    ]
    works = [_Complete() for _ in range(1000)]

    def seconds(clock: WaitClock) -> float:
        clock.start()
        began = time.thread_time()
        for number, work in enumerate(works):
            clock.begun(work, groups[number % 2])
            clock.time(_Complete.wait, work)
        found = (time.thread_time() - began) / len(works)
        clock.stop()
        return found

    pairs = [(seconds(WaitClock()), seconds(WaitClock(traffic=AxisTraffic(mesh)))) for _ in range(rounds)]
    added = statistics.median(after - before for before, after in pairs)
    # Of each layer: tp gathers and scatters twice forward and twice backward, dp_shard gathers and scatters. Embedding
    # and head together have as many once.
    exchanges = 10 * (load_model("tiny").arch.num_layers + 1)
    return {"an exchange": added, "exchanges of a step": exchanges, "a step": added * exchanges}


class _Complete:
    """An exchange that is complete."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class TimedSourceLoss(SourceLoss):
    """The loss by source, with the CPU seconds that it added to the last step."""

    seconds = 0.0

    def computed(self, micro_batch: int) -> None:
        began = time.thread_time()
        super().computed(micro_batch)
        self.seconds = time.thread_time() - began


def progress_of(step: int) -> ProgressLine:
    return ProgressLine(
        step=step,
        steps=10**6,
        loss=5.0,
        bpb=2.0,
        grad_norm=1.0,
        lr=1e-4,
        tokens=step,
        tokens_per_second=1e4,
        mfu=None,
        data_wait_seconds=0.0,
        step_seconds=1.0,
        eta_seconds=1.0,
        cost_usd=1.0,
        peak_memory_bytes=1,
    )


def opening(metrics: Path, steps: int = 1_000_000, ranks: int = 1000) -> dict[str, float]:
    """Return the CPU seconds of opening the numbers of a long run, and of a wide one."""
    metrics.mkdir()
    names = [metric.name for metric in METRICS if metric.owner == "run" and not metric.table]
    writer = TableWriter(lineage_folder(metrics, 1, 1) / "run", names, {"line_steps": _LINE})
    began = time.process_time()
    for step in range(1, steps + 1):
        writer.add(step, float(step), {"train/loss": 1 / step, "train/lr": 1e-4})
        if step % 100 == 0:
            writer.flush()
    writer.close()
    wrote = time.process_time()
    (series,) = read_series(metrics, None, "train/loss")
    opened = time.process_time()
    read_series(metrics, None, "train/loss", steps // 2, steps // 2 + 900)
    zoomed = time.process_time()
    for rank in range(ranks):
        own = TableWriter(lineage_folder(metrics, 1, 1) / f"rank-{rank:05}", ["perf/step_seconds"], {"line_steps": 10})
        for step in range(1, 20):
            own.add(step, 1.0, {"perf/step_seconds": 1.0})
        own.close()
    before = time.process_time()
    assert len(newest_rows(metrics)) == ranks
    return {
        "write a row": (wrote - began) / steps,
        "open a million steps": opened - wrote,
        "points": len(series.first),
        "zoom to 900 steps": zoomed - opened,
        "newest rows of 1,000 ranks": time.process_time() - before,
    }


if __name__ == "__main__":
    main()
