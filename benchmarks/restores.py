"""The time from the moment at which the ranks are up until they have the state of the run: from the memory of another
node, and from a store.

    python benchmarks/restores.py [--rounds 5] [--sources memory store]

The run is that of the board, with one rank on each of two nodes, which are launchers of this machine. memory: node 1 is
lost with all its processes, and a spare takes its place, whose rank gets its snapshot from node 0. store: all processes
and the run folder are lost, and the same command fetches the newest checkpoint from an S3 server of one process.

read: what the event names (snapshot_restored, checkpoint_fetched). load: from the model's being built until the state
is there. up: from the process groups' being there until the first step can begin: `load`, and the building of the model
and the opening of the data around it; also `read`, if the launcher has fetched before it started the ranks. Seconds.
"""

import argparse
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record
from tests.board.bench import Bench, options
from tests.board.rows_launchers import Launchers
from tests.s3_server import BUCKET, S3Server

from ingot.drill.job import gone_within, marked_processes, send
from ingot.events import read_events
from ingot.schema import events

_STEPS = ("train.global_batch=64", 'checkpoint.mode="async"', "checkpoint.every_steps=10")
_MEMORY = (*_STEPS, "train.steps=90", "launch.nodes=2", "launch.node_seconds=3", "checkpoint.replicas=1")
_LOST_AT = 25  # a save began at step 20, and its copies have arrived


def main() -> None:
    """Measure, print a line for each source, and write results/restores.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sources", nargs="*", choices=SOURCES, default=list(SOURCES))
    args = parser.parse_args()
    found: dict[str, object] = {"load_before": round(os.getloadavg()[0], 1), "rounds": args.rounds}
    with Bench() as bench:
        for source in args.sources:
            measured = [SOURCES[source](bench, f"{source}-{number}") for number in range(args.rounds)]
            found[source] = {
                key: {
                    "median": round(statistics.median(one[key] for one in measured), 3),
                    "most": round(max(one[key] for one in measured), 3),
                }
                for key in measured[0]
            }
            print(source, found[source])
    print(record("restores", found, packages=["torch", "obstore"]))


def _from_memory(bench: Bench, name: str) -> dict[str, float]:
    with Launchers(bench, name, _MEMORY) as nodes:
        nodes.start(3)
        nodes.wait_for_step(_LOST_AT)
        send(signal.SIGKILL, nodes.of_node(nodes.started[1]))
        for launcher in (nodes.started[0], nodes.started[2]):
            ended = bench.ended(launcher)
            assert ended.code == 0, ended.output
        (restored,) = read_events(nodes.folder.events, events.SNAPSHOT_RESTORED)
        assert restored["peer_bytes"], restored
        return _seconds(bench, name, restored)


def _from_store(bench: Bench, name: str) -> dict[str, float]:
    folder, settings = (
        bench.folder(name),
        options([*_STEPS, "train.steps=90", f'checkpoint.remote.url="s3://{BUCKET}/r"']),
    )
    with S3Server() as server:
        process = bench.start(name, *settings, env=server.environment)
        while process.poll() is None and not list(read_events(folder.events, events.CHECKPOINT_STORED)):
            time.sleep(0.02)
        send(signal.SIGKILL, [process.pid, *marked_processes(folder.root)])
        bench.ended(process)
        gone_within(5, lambda: marked_processes(folder.root))
        shutil.rmtree(folder.root)
        ended = bench.train(name, *settings, env=server.environment)
        assert ended.code == 0, ended.output
        (fetched,) = read_events(folder.events, events.CHECKPOINT_FETCHED)
        return _seconds(bench, name, fetched)


def _seconds(bench: Bench, name: str, got: dict) -> dict[str, float]:
    """Return the seconds of the newest start of the run `name`, which is removed. got: the event of what it read."""
    log = bench.folder(name).events
    *_, newest = read_events(log, events.START_TIMES)
    *_, rank = read_events(log, events.RANK_STARTED)
    phases, read = newest["seconds"], got["seconds"]
    bench.drop(name)
    before = read if got["time"] < rank["time"] else 0.0
    return {"up": before + phases["build"] + phases["load"], "load": phases["load"], "read": read}


SOURCES: dict[str, Callable[[Bench, str], dict[str, float]]] = {"memory": _from_memory, "store": _from_store}


if __name__ == "__main__":
    main()
