"""The CPU seconds of all that observes and guards a run at the defaults, relative to the same step without it.

In every round two ranks train a step, and do what a run adds to it: the numbers of the step and of a log line (also by
source and layer), the guard and the hashes of the state, the events of a log line, and what a save adds. Each counts as
often as in a run with the defaults (as in metrics.py and guard_cost.py), on both ranks, over the step of both.

Beside the ranks are, once for the job: the launcher with its supervisor, by the kernel's clock of its threads while a
run of two ranks trains, per second of that run; and an evaluation each hour, with as many tokens as the run chooses for
`evaluate.background.share`, by the forward pass of the held-out batch, and the start of its process. A second of a run
is one of two ranks that do nothing but compute, so that waiting ranks would make the share of these smaller.

    python benchmarks/observation.py [--rounds 40] [--models tiny,25m] [--seconds 60]
"""

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from guard_cost import (
    FULL_AN_HOUR,
    HOUR,
    LINE,
    SAVES_AN_HOUR,
    WARM_UP,
    check_hashes,
    heldout_rows,
    judge_step,
    save_hashes,
    timed,
)
from intervals import ratio_in_percent
from metrics import TimedSourceLoss, progress_of, traffic
from record import record, tree_cpu_seconds
from state_hashes import RANKS, model, ranks
from tests.board.bench import Bench, options
from watchdog import heartbeat_seconds

from ingot.events import EventLog
from ingot.plugins.callback import StepNumbers
from ingot.schema import events
from ingot.schema.evaluate import Evaluate, tokens_within
from ingot.schema.guard import Guard
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.theory.params import count_parameters
from ingot.trainer.build import build_parts
from ingot.trainer.evaluate import sanity_loss
from ingot.trainer.guard.alerts import AlertWatch
from ingot.trainer.guard.gradient_range import GradientRange
from ingot.trainer.guard.sanity import SANITY_ROWS
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.mesh.step_times import StepTimes
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.optim.update_size import UpdateSize
from ingot.trainer.record import Interval, open_recorder, record_line
from ingot.trainer.step import train_step
from ingot.trainer.telemetry.layer_sizes import LayerSizes
from ingot.trainer.telemetry.usage import KINDS, CostMeter, ThreadTime, Waits, peak_memory_bytes, summary

SOURCES = ("code", "web")
_BEATS = 4  # heartbeats of a step
_WINDOW_SECONDS = 5.0
_START = "import ingot.trainer.background_eval.process, ingot.trainer.evaluate, ingot.trainer.build"
RECORD = ("rows", "line", "update size", "sources", "recorder")
GUARD = ("judgment", "alerts", "range", "hashes", "saves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--models", default="tiny,25m", help="models, as tiny,25m (default: both)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the launcher is watched (default: 60)")
    args = parser.parse_args()
    launcher = launcher_shares(args.seconds)
    starts = [start_of_evaluation() for _ in range(3)]
    of_axes, beats = traffic(max(args.rounds, 10))["a step"], _BEATS * heartbeat_seconds()
    figures: dict[str, object] = {
        "launcher, share of a core": round(statistics.median(launcher), 6),
        "start of an evaluation, CPU seconds": round(statistics.median(starts), 3),
    }
    print(figures, flush=True)
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as root:
            both = ranks(lambda rank, name=name, root=root: measure(rank, name, args.rounds, Path(root)))
        seconds = {part: [sum(each) for each in zip(*(own[part] for own in both), strict=True)] for part in both[0]}
        seconds["axes"], seconds["heartbeats"] = ([RANKS * each] * args.rounds for each in (of_axes, beats))
        own = shares(seconds, launcher, starts, model(name)[1]) | {"parameters": count_parameters(model(name)[0])}
        figures[name] = own
        print(name, own, flush=True)
    record("observation", figures, ["torch", "numpy"])


def shares(
    seconds: dict[str, list[float]], launcher: list[float], starts: list[float], seq_len: int
) -> dict[str, object]:
    """Return the shares of a step of both ranks, in percent, with their intervals.

    seconds: by part, the CPU seconds in a step of both ranks, of each round. launcher: its share of a core in each of
    some windows. starts: the CPU seconds of each start of an evaluation. seq_len: of a row of the held-out batch."""
    steps = seconds["step"]
    walls = [step / RANKS for step in steps]
    # Both ranks score the batch, each its part: the sum is that of all rows. A run chooses the tokens once.
    of_token = [batch / (SANITY_ROWS * seq_len) for batch in seconds["batch"]]
    start, most, share = statistics.median(starts), Evaluate().max_tokens, Evaluate().background.share
    tokens = tokens_within(share * HOUR * RANKS, start, statistics.median(of_token), most)
    hourly = [
        wall * (starts[at % len(starts)] + tokens * each) / HOUR
        for at, (wall, each) in enumerate(zip(walls, of_token, strict=True))
    ]
    supervisor = [wall * launcher[at % len(launcher)] for at, wall in enumerate(walls)]
    groups = {
        "record": [seconds[part] for part in (*RECORD, "axes")],
        "guard": [seconds[part] for part in GUARD],
        "event log": [seconds["events"]],
        "supervisor": [supervisor, seconds["heartbeats"]],
        "evaluation, hourly": [hourly],
    }
    found: dict[str, object] = {name: ratio_in_percent(parts, steps) for name, parts in groups.items()}
    found["all"] = ratio_in_percent([part for parts in groups.values() for part in parts], steps)
    medians = {part: round(statistics.median(each), 7) for part, each in seconds.items()}
    return found | {"CPU seconds in a step of both ranks": medians, "tokens of an evaluation": tokens}


def measure(rank: int, name: str, rounds: int, root: Path) -> dict[str, list[float]]:
    """Return, by part, the CPU seconds in a step of this rank, of each round; "batch" is that of one score."""
    torch.set_num_threads(1)
    arch, seq_len, batch = model(name)
    own, device = batch // RANKS, torch.device("cpu")
    run = RunConfig(
        name=name,
        model=arch,
        data=Data(tokens="made up"),
        train=Train(steps=10**6, seq_len=seq_len, global_batch=batch, micro_batch=own, precision="fp32"),
        parallel=Parallel(dp_shard=1, dp_replicate=RANKS),
    )
    parts, guard, folder = build_parts(run, device, Path()), Guard(), RunFolder(root)
    judge, parts.step_judge = parts.step_judge, None  # the step is one without any of this
    assert judge is not None
    hashes = StateHashes(parts.state, parts.model.data.published(), parts.mesh, 1)
    shards = parts.model.shards
    place = RankInfo(rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS, attempt=0, device=device)
    measured = GradientRange(shards, arch.num_layers, torch.bfloat16, 1, tied=arch.tied_embeddings)
    watch = AlertWatch(run, shards, measured, None, lambda *_, **__: None, is_first=rank == 0)
    heldout = heldout_rows(arch.vocab_size, seq_len)
    scored = SimpleNamespace(**vars(parts) | {"heldout": heldout, "place": SimpleNamespace(device=device)})

    sizes, waits = UpdateSize(shards, 1), WaitClock()
    layers = LayerSizes(shards, parts.model.stages, arch.num_layers, 0, root / "measure-layers")
    readout = parts.model.stages[0].get_submodule("readout")
    sources = TimedSourceLoss(
        list(SOURCES), np.array([0, 1]), lambda ids: ids % 2, rows=own, tokens=seq_len, readout=readout
    )
    parts.program.observers = [layers, sources]
    parts.program.times = StepTimes(device, waits)
    recorder = open_recorder(run, folder, place, 1, print, sources=SOURCES)
    (root / f"lines-{rank}").mkdir()
    of_lines = open_recorder(run, RunFolder(root / f"lines-{rank}"), place, 1, print, sources=SOURCES)
    assert recorder is not None and recorder._thread.ident is not None
    assert of_lines is not None  # a line has the rows of ten steps, and the thread whose time counts has one of them
    of_lines.goodput = recorder.goodput
    thread = time.pthread_getcpuclockid(recorder._thread.ident)
    log = EventLog(folder.events)
    trainer = SimpleNamespace(
        config=run, place=place, recorder=of_lines, tokens_per_byte=0.25, cost=CostMeter(2.0, 1, folder.events),
        source_loss=sources, log=lambda *_, **__: None,
    )  # fmt: skip
    gc.freeze()  # as the fork server of a run does
    names = ("step", *RECORD, *GUARD, "events", "batch")
    seconds: dict[str, list[float]] = {part: [] for part in names}
    for step in range(1, rounds + WARM_UP + 1):
        ids = torch.randint(0, arch.vocab_size, (1, own, seq_len + 1))
        micro_batches = SimpleNamespace(step=step, inputs=ids[..., :-1], targets=ids[..., 1:], document_ids=None)
        interval, results = Interval(ThreadTime.now(), waits, 0.0, 0.0), []
        written = time.clock_gettime(thread)
        spent = {"step": timed(lambda: results.append(train_step(parts, micro_batches, 1e-4)))}  # noqa: B023
        (result,) = results
        loss, norm = float(result.loss), float(result.grad_norm)
        line = [StepNumbers(LINE * step + i, loss, norm, skipped=False) for i in range(LINE)]
        of_line = [replace(result, step=numbers.step) for numbers in line]
        progress = progress_of(step)

        began = time.thread_time()
        sources.add(step, np.arange(own))
        interval.add(0.0, 0.0)
        recorder.step(step, interval.last, is_open=True)
        rows = time.thread_time()
        sizes.before_update(step)
        sizes.after_update()
        squares = np.array([sizes.read()] * RANKS)
        sized = time.thread_time()
        by_source = sources.take()
        layers.take_request()
        summed = time.thread_time()
        zero = Waits(data=0.0, pipeline=0.0, collectives=0.0, reading=0.0, computing=0.0, queued=0.0, blocked=0.0)
        interval.add_line(zero, peak_memory_bytes(device), parts.program.times.take(), {})
        record_line(trainer, of_line, line, progress, squares, by_source)
        lined = time.thread_time()
        _write_line(log, line, zero) if rank == 0 else None
        logged = time.thread_time()
        spent |= {
            "rows": rows - began,
            "update size": (sized - rows) / LINE,
            "sources": sources.seconds + (summed - sized) / LINE,
            "line": (lined - summed) / LINE,
            "events": (logged - lined) / LINE,
        }

        spent["judgment"] = timed(lambda: judge_step(judge, result))  # noqa: B023
        alerts = timed(lambda: watch.line(line, 1e-4, np.array([watch.unchanged(line, 1e-4)])))  # noqa: B023
        for shard in shards:
            shard.grad = torch.ones_like(shard.value)
        spent |= {"alerts": alerts / LINE, "range": timed(lambda: measured.look(step)) / guard.precision_every}  # noqa: B023
        spent["hashes"] = timed(lambda: check_hashes(hashes, step)) / guard.hash_every  # noqa: B023
        save = timed(lambda: save_hashes(hashes, step))  # noqa: B023
        spent["batch"] = timed(lambda: sanity_loss(scored))
        # An hour is as many steps as fit into it by their CPU seconds.
        spent["saves"] = (SAVES_AN_HOUR * save + FULL_AN_HOUR * spent["batch"]) * spent["step"] / HOUR
        if rank == 0:
            recorder.run_steps([(step, {"train/loss": loss, "train/grad_norm": norm, "train/lr": 1e-4})])
            if step % LINE == 0:
                recorder.extra("sources", step, {f"data/{name}/loss": loss for name in SOURCES})
        spent["recorder"] = time.clock_gettime(thread) - written
        if step > WARM_UP:
            for part, each in spent.items():
                seconds[part].append(each)
    recorder.close()
    of_lines.close()
    seconds["recorder"] = [statistics.fmean(seconds["recorder"])] * rounds  # it wakes up twice a second
    return seconds


def _write_line(log: EventLog, line: list[StepNumbers], waits: Waits) -> None:
    """Write the events of a log line of ten steps: those of steps, of the line, of its waits and of its sources."""
    for own in line:
        log.write(events.STEP, step=own.step, loss=own.loss, grad_norm=own.grad_norm, lr=1e-4)
    log.write(events.PROGRESS, **vars(progress_of(line[-1].step)))
    found = summary(np.array([waits.row()] * RANKS), KINDS, LINE)
    log.write(events.WAITS, step=line[-1].step, steps=LINE, axes={}, **found)
    shares = dict.fromkeys(SOURCES, 0.5)
    log.write(events.SOURCES, step=line[-1].step, loss=shares, share=shares)


def launcher_shares(seconds: float) -> list[float]:
    """Return the share of a core that the launcher of a run of two ranks uses while it trains, by windows of time."""
    found = []
    with Bench() as bench:
        process = bench.start("run", *options(["train.steps=1000000", "checkpoint.every_steps=1000000"]))
        try:
            bench.wait_for_step("run", 50, process)
            for _ in range(max(int(seconds / _WINDOW_SECONDS), 1)):
                before, began = _cpu_seconds(process.pid), time.monotonic()
                time.sleep(_WINDOW_SECONDS)
                found.append((_cpu_seconds(process.pid) - before) / (time.monotonic() - began))
        finally:
            process.terminate()
            bench.ended(process)
    return found


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far; the kernel counts them in nanoseconds."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def start_of_evaluation() -> float:
    """Return the CPU seconds of a process that imports what an evaluation needs."""
    return tree_cpu_seconds(lambda: subprocess.run([sys.executable, "-P", "-c", _START], check=True))[1]


if __name__ == "__main__":
    main()
