"""Full and partial restarts side by side: the seconds of each phase after a SIGKILL of one rank.

    python benchmarks/restarts.py [--rounds 5] [--runs copies replicas] [--kills 5]

Every round trains the run of the board once with each way, in turn, and kills a rank near step 15. Two runs:

    copies    two ranks, the state from a checkpoint
    replicas  four ranks, two replicas of a model that two ranks divide; the state from memory

The clock of a restart is that of rank 0, so a partial restart takes its turn twice: rank 0 is a rank that keeps its
process, or the one that was lost. Their difference shows whether healthy ranks wait for more than the lost one needs.
Afterwards one run loses rank 1 again and again, with partial restarts: the memory [MiB], threads and open files of rank
0, which keeps its process.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record
from tests.board.bench import Bench, options

from ingot.drill.oracles import recovery
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.start_times import PHASES

_STEPS = ("train.steps=30", "train.global_batch=64")  # of some hundredths of a second
RUNS = {
    "copies": ((), 2),
    "replicas": (
        ("parallel.dp_replicate=2", "parallel.dp_shard=2", 'checkpoint.mode="async"', "checkpoint.replicas=1"),
        4,
    ),
}
# The way to restart, and whether rank 0 is the one that is lost.
WAYS = {"full": ("full", False), "partial, kept": ("partial", False), "partial, lost": ("partial", True)}
_KILLED_AT, _APART = 15, 8
_MIB = 1 << 20


def main() -> None:
    """Measure, print a table for each run, and write results/restarts.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--kills", type=int, default=5, help="partial restarts of the run whose rank 0 is looked at")
    args = parser.parse_args()
    found: dict[str, object] = {"load_before": round(os.getloadavg()[0], 1)}
    with Bench() as bench:
        for run in args.runs:
            rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
            for number, (way, (restart, first)) in itertools.product(range(args.rounds), WAYS.items()):
                rounds[way].append(_restart(bench, f"{run}-{way}-{number}", run, restart, first))
            found[run] = {way: _medians(measured) for way, measured in rounds.items()}
            print(_table(run, {way: _medians(measured)["median"] for way, measured in rounds.items()}))
        found["kept_rank"] = _kept(bench, args.kills)
    print(json.dumps(found["kept_rank"]))
    print(record("restarts", found, packages=["torch"]))


def _restart(bench: Bench, name: str, run: str, restart: str, first: bool) -> dict[str, float]:
    """Train, kill rank 0 if `first` and the last one otherwise, and return the seconds of each phase of the restart,
    and from the kill to the first step that had not been trained."""
    settings, ranks = RUNS[run]
    folder = bench.folder(name)
    process = bench.start(name, *options([*_STEPS, *settings, f'launch.restart="{restart}"']))
    bench.wait_for_step(name, _KILLED_AT, process)
    injected = time.time()
    os.kill(_pids(folder)[0 if first else ranks - 1], signal.SIGKILL)
    ended = bench.ended(process)
    assert ended.code == 0, ended.output
    kept = [event["kept"] for event in read_events(folder.events, events.RESTART)]
    assert kept == [ranks - 1 if restart == "partial" else 0], kept
    *_, newest = read_events(folder.events, events.START_TIMES)
    phases = newest["seconds"]
    recovered = recovery(folder, injected).recovered
    assert recovered is not None
    bench.drop(name)
    return {phase: phases[phase] or 0.0 for phase in PHASES} | {"to a new step": recovered}


def _kept(bench: Bench, kills: int) -> dict[str, list[int]]:
    """Return what rank 0 holds before each of `kills` partial restarts, and before the end."""
    found: dict[str, list[int]] = {"resident_mib": [], "threads": [], "files": []}
    steps = _KILLED_AT + _APART * (kills + 1)
    settings = (f"train.steps={steps}", _STEPS[1], 'launch.restart="partial"', f"launch.max_restarts={kills}")
    process = bench.start("kept", *options(settings))
    folder = bench.folder("kept")
    for number in range(kills + 1):
        bench.wait_for_step("kept", _KILLED_AT + _APART * number, process)
        pids = _pids(folder)
        of_rank = Path(f"/proc/{pids[0]}")
        pages = int((of_rank / "statm").read_text().split()[1])
        found["resident_mib"].append(round(pages * os.sysconf("SC_PAGE_SIZE") / _MIB))
        found["threads"].append(len(list((of_rank / "task").iterdir())))
        found["files"].append(len(list((of_rank / "fd").iterdir())))
        if number < kills:
            os.kill(pids[1], signal.SIGKILL)
    ended = bench.ended(process)
    assert ended.code == 0, ended.output
    return found


def _pids(folder: RunFolder) -> dict[int, int]:
    """Return the process of each rank in its newest attempt."""
    return {event["rank"]: event["pid"] for event in read_events(folder.events, events.RANK_STARTED)}


def _medians(measured: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    values = {phase: [one[phase] for one in measured] for phase in measured[0]}
    return {
        "median": {phase: round(statistics.median(found), 3) for phase, found in values.items()},
        "most": {phase: round(max(found), 3) for phase, found in values.items()},
    }


def _table(run: str, medians: dict[str, dict[str, float]]) -> str:
    """Return the medians as a table of Markdown. Seconds."""
    lines = [f"| {run} | {' | '.join(medians)} |", f"|---{'|---:' * len(medians)}|"]
    for phase in next(iter(medians.values())):
        lines.append(f"| {phase} | {' | '.join(f'{of[phase]:.2f}' for of in medians.values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
