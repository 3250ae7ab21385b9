"""The step time of a run on CPUs while it is evaluated in the background, as a ratio to the same steps without that.

One run trains on all cores. In turns of `--seconds`, an evaluation of its newest save runs beside it, again and again,
or none does; the order changes from round to round. The figure is the median of the ratios of both medians of a round.
An evaluation once an hour costs the ratio's excess times its duration, over an hour. For an idle machine.

    python benchmarks/evaluation.py RUN_FILE [--rounds 8] [--seconds 30]
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import find_weights
from ingot.trainer.launch.evaluations import _command

SETTINGS = ("evaluate.background.every=", "checkpoint.weights_every=30 s", "watch.log_every=1", "train.steps=100000000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root) / "run")
        words = [word for setting in SETTINGS for word in ("--set", setting)]
        command = [sys.executable, "-m", "ingot.cli.main", "train", str(args.run_file), "--out", str(folder.root)]
        run = subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL)
        try:
            while not any(folder.weights.checkpoints.glob("step-*")):
                if run.poll() is not None:
                    sys.exit("the run ended before its first save")
                time.sleep(1)
            ratios, durations = measure(folder, args.rounds, args.seconds)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()
    ratio, seconds = statistics.median(ratios), statistics.median(durations or [0.0])
    hourly = (ratio - 1) * seconds / 3600
    print(f"step time with an evaluation beside it: {ratio:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})")
    print(f"an evaluation takes {seconds:.1f} s; once an hour it costs {hourly:.3%} of the time")
    record("evaluation", {"ratio": ratio, "ratios": ratios, "evaluation_seconds": seconds, "hourly": hourly}, ["torch"])


def measure(folder: RunFolder, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    """Return the ratio of each round, and the seconds of each evaluation."""
    ratios, durations = [], []
    for number in range(rounds):
        medians = {}
        for beside in (True, False) if number % 2 else (False, True):
            begin = time.time()
            durations += evaluate_until(folder, begin + seconds) if beside else wait_until(begin + seconds)
            steps = [
                event["step_seconds"]
                for event in read_events(folder.events, events.PROGRESS)
                if begin + 1 < event["time"] < begin + seconds
            ]
            medians[beside] = statistics.median(steps)
        ratios.append(medians[True] / medians[False])
    return ratios, durations


def wait_until(end: float) -> list[float]:
    time.sleep(max(end - time.time(), 0))
    return []


def evaluate_until(folder: RunFolder, end: float) -> list[float]:
    """Evaluate the newest save again and again. Returns the seconds of each that ended."""
    durations = []
    while time.time() < end:
        began = time.monotonic()
        save = find_weights(folder.root)[1]
        process = subprocess.Popen(
            _command(folder.root, save, os.cpu_count() or 1, 0, 3600.0), stdout=subprocess.DEVNULL
        )
        try:
            process.wait(max(end - time.time(), 0.1))
            durations.append(time.monotonic() - began)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return durations


if __name__ == "__main__":
    main()
