"""The program of one rank of a profile: warm-up, plain steps, profiled steps, a step whose reads are counted.

job.py starts it with the environment of a training job. It writes its part of the profile to the folder of the profile.
"""

import contextlib
import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ingot.errors import IngotError
from ingot.rehearse.profile.analysis import analyze
from ingot.rehearse.profile.copied import ProfilePlan
from ingot.rehearse.profile.host_reads import HostReads
from ingot.rehearse.profile.ranges import ObservedWaits, Ranges, on_clock_of, ranged
from ingot.rehearse.profile.trace import DATA, RANGE, STEP, WINDOW, Interval
from ingot.storage import write_json
from ingot.trainer.collector import collected_between_steps
from ingot.trainer.given import NOTHING_GIVEN
from ingot.trainer.launch.own_loop import open_run
from ingot.trainer.launch.prepare import RunRequest
from ingot.trainer.loop import RunLoop
from ingot.trainer.parallel.apply import should_compile
from ingot.trainer.step import train_step
from ingot.trainer.telemetry.usage import ThreadTime, peak_memory_bytes

_TRACK = 1_000_000  # thread numbers of the tracks of exchanges in a trace, above all thread ids of a kernel


class ProfiledRank:
    """The loop of one rank and what was measured of it so far. collect: collects garbage after a step."""

    def __init__(self, loop: RunLoop, plan: ProfilePlan, collect: Callable[[int], None]):
        self.loop, self.plan, self.trainer, self.collect = loop, plan, loop.trainer, collect
        self.place, self.device = loop.trainer.place, loop.trainer.place.device
        self.ranges = Ranges(plan.nvtx)
        self.log_lines = 0
        self.began: list[float] = []  # of each step with ranges, on the clock of time.perf_counter

    def plain(self, count: int) -> tuple[float, float]:
        """Train `count` steps without ranges. Returns the seconds of a step, and those of its thread without a core."""
        self._together()
        before = ThreadTime.now()
        for _ in range(count):
            self._step(_nothing)
        self._finish()
        passed = ThreadTime.now().since(before)
        return passed.wall / count, passed.queued / count

    def ranged(self, count: int, observed: ObservedWaits) -> None:
        """Train `count` steps with ranges, in a range of their own that ends when the device has finished."""
        self._together()
        observed.forget()
        self.began.clear()
        self.log_lines = 0
        with self.ranges.range(WINDOW):
            for _ in range(count):
                with self.ranges.range(f"{STEP}{self.loop.done + 1}"):
                    self.began.append(time.perf_counter())
                    self._step(self.ranges.range)
            self._finish()

    def read_values(self) -> list[dict[str, Any]]:
        """Train a step, and return where the host reads values of tensors: the most frequent first."""
        config, parallel, reads = self.trainer.config, self.trainer.mesh.parallel, HostReads(self.device)
        is_compiled = should_compile(config.train, self.device, parallel.splits_backward)
        # A mode sees no operation of compiled code.
        with torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext(), reads:
            self._step(_nothing)
        return [{"operation": name, "line": line, "count": n} for (name, line), n in reads.found.most_common()]

    def _step(self, named: Callable[[str], contextlib.AbstractContextManager]) -> None:
        """Train one step as `ingot train` does, except that nothing is saved."""
        loop = self.loop
        with named(DATA):
            batch = loop.next_batch()
        assert batch is not None, "the copy has more steps than a profile"
        with named(f"{RANGE}train"):
            result = train_step(self.trainer, batch, loop.learning_rate(batch.step))
        with named(f"{RANGE}judge"):
            loop.judge(batch, result)
            self.log_lines += bool(loop.line)
            loop.finish_step()
            self.collect(batch.step)
        print(f"{STEP}{batch.step}", flush=True)  # a sign of life

    def _together(self) -> None:
        """Wait until the device has finished and all ranks are here."""
        self._finish()
        dist.barrier()
        self._finish()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _nothing(name: str) -> Iterator[None]:
    yield


def profile_rank(loop: RunLoop, plan: ProfilePlan, collect: Callable[[int], None]) -> None:
    """Profile the steps of a run that was opened for it, and write trace and values of this rank. Collective."""
    rank = ProfiledRank(loop, plan, collect)
    rank.plain(plan.warmup)
    seconds, queued = rank.plain(plan.steps)
    if plan.nvtx:
        _for_nsight(rank, plan)
        return
    with ranged(rank.trainer, rank.ranges) as observed:
        trace, profiled = _traced(rank, observed, plan.steps)
    with gzip.open(plan.trace(rank.place.rank), "wt", compresslevel=3, encoding="utf-8") as file:
        json.dump(trace, file)
    waits = [
        {"axis": axis, "line": line, "count": count / plan.steps, "seconds": total / plan.steps}
        for (axis, line), (count, total) in sorted(observed.seconds.items(), key=lambda item: -item[1][1])
    ]
    facts = {
        "rank": rank.place.rank,
        "device": rank.device.type,
        "device_name": torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "",
        "torch": torch.__version__,
        "steps": plan.steps,
        "first_step": loop.done - plan.steps + 1,
        "step_seconds": seconds,
        "without_core_seconds": queued,
        "log_lines": rank.log_lines,
        "peak_memory_bytes": peak_memory_bytes(rank.device),
        "waits": waits,
    }
    write_json(
        plan.part(rank.place.rank), facts | profiled | {"reads": rank.read_values(), "reads_log_line": bool(loop.line)}
    )


def _for_nsight(rank: ProfiledRank, plan: ProfilePlan) -> None:
    """Train steps with NVTX ranges, between the start and the stop of a profiler outside of this process."""
    with ranged(rank.trainer, rank.ranges) as observed:
        torch.cuda.profiler.start()
        rank.ranged(plan.steps, observed)
        torch.cuda.profiler.stop()


def _traced(rank: ProfiledRank, observed: ObservedWaits, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trace of `steps` steps, and what it shows. A step before them warms the profiler up."""
    on_gpu = rank.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    path = rank.plan.part(rank.place.rank).with_suffix(".trace")
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(
        activities=kinds,
        schedule=schedule,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        rank.ranged(1, observed)
        profiler.step()
        rank.ranged(steps, observed)
        profiler.step()
    trace = json.loads(path.read_text("utf-8"))
    path.unlink()
    exchanges = _add_exchanges(trace, rank.began, {} if on_gpu else observed.flights)
    return trace, analyze(trace["traceEvents"], steps=steps, on_gpu=on_gpu, exchanges=exchanges, axes=observed.groups)


def _add_exchanges(
    trace: dict[str, Any], began: list[float], flights: dict[str, list[Interval]]
) -> dict[str, list[Interval]]:
    """Add the exchanges in flight to the trace, one track for each axis. Returns them on its clock."""
    events = trace["traceEvents"]
    steps = [e["ts"] for e in events if e.get("ph") == "X" and str(e.get("name")).startswith(STEP)]
    if len(steps) < len(began):  # `analyze` reports a trace without steps
        return {}
    clock = on_clock_of(sorted(steps)[-len(began) :], began)
    found = {axis: [(clock(a), clock(b)) for a, b in own] for axis, own in flights.items()}
    for number, (axis, own) in enumerate(found.items()):
        track = {"pid": os.getpid(), "tid": _TRACK + number}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": f"exchanges of {axis}"}, **track})
        for begin, end in own:
            facts = {"ph": "X", "cat": "exchange", "name": f"exchange {axis}", "ts": begin, "dur": end - begin}
            events.append(facts | track)
    return found


def main() -> int:
    plan = ProfilePlan.of_words(sys.argv[1:])
    try:
        with contextlib.ExitStack() as stack:
            loop = open_run(RunRequest(plan.run_file, plan.run), NOTHING_GIVEN, print, stack)
            assert loop is not None, "the folder of a profile is new"
            profile_rank(loop, plan, stack.enter_context(collected_between_steps()))
            del loop
            dist.barrier()  # no rank leaves while another one needs it
    except IngotError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
