"""Rows of partial restarts: ranks that lose a peer keep their processes."""

import itertools
import os
import shutil
import signal
import time
from contextlib import suppress

from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.keeper import keeper_name

from .bench import Bench, options
from .row import INTERVAL, Row, judge_recovered, random_of
from .rows_job import SLOW_STEPS, stopped_between_snapshots
from .rows_launchers import Launchers
from .rows_node import keeper_at, remove_tensors
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


def rs07_partial(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Lose a node, with its disk, memory and the tensors of all checkpoints: a spare takes its place, with the state
    that the other node has in memory, and the ranks of that node keep their processes. The lost node has one of two
    shards of a model, with odd seeds the last stage of a pipeline, of two shards."""
    random, name, each = random_of("RS07 partial", seed), f"peer-{seed}", 1 + seed % 2
    folder, layout = bench.folder(name), _STAGES if each == 2 else ()
    disks = [bench.root / f"{name}-disk-{number}" for number in range(2)]
    settings = (
        *(*SLOW_STEPS, *layout, *_IN_MEMORY, 'launch.restart="partial"', "launch.nodes=2"),
        f'checkpoint.disks=["{bench.root}/{name}-disk-{{node}}"]',
    )
    for disk in disks:
        disk.mkdir()
    with Launchers(bench, name, settings) as nodes:
        nodes.start(3)
        kept, before = stopped_between_snapshots(bench, name, INTERVAL * random.randrange(2, 10), nodes.started[0])
        where = f"{each} ranks a node, after the snapshot of step {kept}"
        lost = nodes.started[1]
        keeper, processes = keeper_at(keeper_name(lost.pid, folder.root)), nodes.of_node(lost)
        verdicts.judge("o6", where, "" if keeper else "the node that is lost has no keeper of snapshots")
        injected = time.time()
        for pid in (*processes, *filter(None, [keeper])):
            with suppress(ProcessLookupError):  # a process that writes checkpoints ends with its rank
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(disks[1])
        disks[1].mkdir()
        for tensors in (folder.checkpoints, disks[0]):
            remove_tensors(tensors)
        for rank in range(each):
            os.kill(before[rank], signal.SIGCONT)
        codes = nodes.ends(without=1)
    verdicts.judge("o6", where, f"exit codes {codes}" if any(codes) else "")
    found = [(event["rank"], event["failure"]) for event in read_events(folder.events, events.FAULT)]
    verdicts.judge("o6", where, "" if found == [(each, "node")] else f"faults {found}")
    after = _pids(folder)
    changed = [rank for rank in sorted(before) if before[rank] != after[rank]]
    expected = list(range(each, 2 * each))
    verdicts.judge("o6", where, "" if changed == expected else f"ranks {changed} got new processes, not {expected}")
    tiers = read_events(
        folder.events,
        events.SNAPSHOT_RESTORED,
        events.CHECKPOINT_LOADED,
        events.CHECKPOINT_FETCHED,
        events.CHECKPOINT_REFUSED,
    )
    read = [(e["kind"], e["step"], e.get("own_bytes", 0) > 0, e.get("peer_bytes", 0) > 0) for e in tiers]
    from_peer = [(events.SNAPSHOT_RESTORED, kept, True, True)]
    verdicts.judge("o6", where, "" if read == from_peer else f"the state was read from {read}, not {from_peer}")
    verdicts.time(folder, injected)
    judge_recovered(bench, verdicts, name, where, bench.reference(*SLOW_STEPS, *layout))


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
    Row(
        "RS07 partial",
        "a node is lost with its disk and memory; the ranks of the other one keep their processes and have its state",
        rs07_partial,
    ),
)
