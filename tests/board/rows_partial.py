"""Rows of partial restarts: ranks that lose a peer keep their processes."""

import itertools
import os
import signal
import time

from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from .bench import Bench, options
from .row import Row, judge_recovered, random_of
from .rows_job import SLOW_STEPS, stopped_between_snapshots
from .times import WARM

_PARTIAL = ('launch.restart="partial"', "launch.watchdog_seconds=3")
_IN_MEMORY = ('checkpoint.mode="async"', "checkpoint.replicas=1")
_STAGES = ("parallel.pp=2", "parallel.dp_shard=2")
_REPLICAS = ("parallel.dp_replicate=2", "parallel.dp_shard=2", *_IN_MEMORY)
_CASES = {"copies": ((), 2), "stages": (_STAGES, 4), "memory": (_IN_MEMORY, 2), "replicas": (_REPLICAS, 4)}


def rs01_partial(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill a rank and later stop another one, of two copies, and of two pipeline stages or two replicas with two ranks
    each. The others keep their processes; the state comes from a checkpoint, or from memory."""
    for layout, (settings, ranks) in _CASES.items():
        random, name = random_of(f"RS01 partial {layout}", seed), f"partial-{layout}-{seed}"
        folder = bench.folder(name)
        process = bench.start(name, *options([*SLOW_STEPS, *settings, *_PARTIAL]))
        victims = random.sample(range(ranks), 2)
        steps = (random.randrange(5, 20), random.randrange(30, 50))
        where = f"{layout}, rank {victims[0]} near step {steps[0]}, rank {victims[1]} near step {steps[1]}"
        before, in_memory = [], set(_IN_MEMORY) <= set(settings)
        for victim, step, number in zip(victims, steps, (signal.SIGKILL, signal.SIGSTOP), strict=True):
            if in_memory and number == signal.SIGKILL:  # all ranks are stopped
                snapshot, _ = stopped_between_snapshots(bench, name, step, process)
            else:
                bench.wait_for_step(name, step, process)
                time.sleep(random.uniform(0, 0.03))
            before.append(_pids(folder))
            injected = time.time()
            os.kill(before[-1][victim], number)
            if number == signal.SIGKILL:
                killed = injected
                for rank in before[-1].keys() - {victim}:
                    os.kill(before[-1][rank], signal.SIGCONT)
        ended = bench.ended(process)
        verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
        pids = [*before, _pids(folder)]
        changed = [[rank for rank in range(ranks) if a[rank] != b[rank]] for a, b in itertools.pairwise(pids)]
        expected = [[victim] for victim in victims]
        verdicts.judge("o6", where, "" if changed == expected else f"ranks {changed} got new processes, not {expected}")
        if in_memory:
            restored = [event["step"] for event in read_events(folder.events, events.SNAPSHOT_RESTORED)]
            from_memory = restored[:1] == [snapshot]
            verdicts.judge("o6", where, "" if from_memory else f"restored {restored} from memory, not {snapshot} first")
        verdicts.time(folder, killed)
        judge_recovered(bench, verdicts, name, where, bench.reference(*SLOW_STEPS, *settings), faults=2)


def _pids(folder: RunFolder) -> dict[int, int]:
    """Return the process of each rank in its newest attempt."""
    return {event["rank"]: event["pid"] for event in read_events(folder.events, events.RANK_STARTED)}


ROWS = (
    Row(
        "RS01 partial",
        "SIGKILL of a rank and SIGSTOP of another; the others keep their processes",
        rs01_partial,
        limits=WARM,
    ),
)
