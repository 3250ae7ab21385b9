"""The time of a step beside uploads to a store: the same run with a store and without one, in turn.

    python benchmarks/uploads.py [--rounds 5] [--ranks 1 2] [--stores folder s3 ceph] [--steps 60]

Both runs save 40 MB every 5 steps in the background; uploading_share is the share of the time in which an upload was
in progress. The limit of the ratios is 1.05. Stores: a folder, an S3 server of one process (tests/s3_server.py), and a
Ceph object gateway if its programs are there (tests/ceph.py). The servers run on the same machine and take time of its
cores, which a real store does not: with one rank of two cores, a core is left for them. Steps count from the first save
on. The mean has the stalls of saves in it.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record
from tests import ceph, s3_server
from tests.board.bench import Bench, options

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

EVERY = 5
MODEL = ("model.d_model=128", "model.num_heads=16", "model.d_ffn=1024", "model.num_layers=8", "train.global_batch=16")
SAVES = (f"checkpoint.every_steps={EVERY}", 'checkpoint.mode="async"', 'checkpoint.weights_every=""')
NONE = "none"


def main() -> None:
    """Measure, print a line for each store, and write results/uploads.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--stores",
        nargs="*",
        choices=[name for name in STORES if name != NONE],
        default=["folder", "s3"] + ["ceph"] * (not ceph.missing()),
    )
    args = parser.parse_args()
    found: dict[str, object] = {"load_before": round(os.getloadavg()[0], 1), "rounds": args.rounds}
    with Bench() as bench:
        for ranks in args.ranks:
            rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
            for number in range(args.rounds):
                names = [NONE, *args.stores]
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    run = f"{name}-{ranks}-{number}"
                    with STORES[name](bench) as (url, variables):  # a new one for each run: they keep objects in memory
                        rounds[name].append(_run(bench, run, ranks, args.steps, url and f"{url}/{run}", variables))
            of_ranks = {name: _against(rounds[name], rounds[NONE]) for name in args.stores}
            of_ranks[NONE] = {key: statistics.median(one[key] for one in rounds[NONE]) for key in ("median", "mean")}
            found[f"ranks {ranks}"] = of_ranks
            for name, figures in of_ranks.items():
                print(f"{ranks} ranks  {name:7}", "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    print(record("uploads", found, packages=["torch", "obstore"]))


def _run(bench: Bench, name: str, ranks: int, steps: int, url: str, variables: dict[str, str]) -> dict[str, float]:
    """Train once. Returns the median and the mean time of a step from the first save on, the uploads that ended before
    the last step, and their share of that time. Seconds."""
    store = (f'checkpoint.remote.url="{url}"',) if url else ()
    if url.startswith("file:"):
        Path(url.removeprefix("file://")).mkdir(parents=True)
    settings = (f"train.steps={steps}", f"parallel.dp_shard={ranks}", *MODEL, *SAVES, *store)
    ended = bench.train(name, *options(settings), env=variables)
    assert ended.code == 0, ended.output
    folder = bench.folder(name)
    times = [event["time"] for event in read_events(folder.events, events.STEP) if event["step"] >= EVERY]
    steps_seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    uploads = [e for e in _uploads(folder) if e["time"] <= times[-1]]
    assert uploads or not url, "no upload ended while the run trained: give more --steps"
    busy = sum(event["seconds"] for event in uploads) / (times[-1] - times[0])
    bench.drop(name)
    return {
        "median": statistics.median(steps_seconds),
        "mean": statistics.mean(steps_seconds),
        "uploads": float(len(uploads)),
        "uploading_share": busy,
    }


def _uploads(folder: RunFolder) -> list[dict]:
    return list(read_events(folder.events, events.CHECKPOINT_STORED))


def _against(own: list[dict[str, float]], none: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the rounds: of the ratios to the run of the same round without a store, and the rest."""
    ratios = {
        f"{key}_ratio": statistics.median(one[key] / other[key] for one, other in zip(own, none, strict=True))
        for key in ("median", "mean")
    }
    return ratios | {key: statistics.median(one[key] for one in own) for key in own[0]}


@contextlib.contextmanager
def _none(bench: Bench) -> Iterator[tuple[str, dict[str, str]]]:
    yield "", {}


@contextlib.contextmanager
def _folder(bench: Bench) -> Iterator[tuple[str, dict[str, str]]]:
    yield f"file://{bench.root}/stored", {}


@contextlib.contextmanager
def _s3(bench: Bench) -> Iterator[tuple[str, dict[str, str]]]:
    with s3_server.S3Server() as server:
        yield f"s3://{s3_server.BUCKET}", server.environment


@contextlib.contextmanager
def _ceph(bench: Bench) -> Iterator[tuple[str, dict[str, str]]]:
    with ceph.CephGateway() as gateway:
        yield f"s3://{ceph.BUCKET}", gateway.environment


STORES = {NONE: _none, "folder": _folder, "s3": _s3, "ceph": _ceph}


if __name__ == "__main__":
    main()
