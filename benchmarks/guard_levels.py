"""The figures of the guard on the logs of healthy runs: how far apart steps are, by the guard's own judgment.

Each log is played through the judge of steps with other values of `guard.level`, from `guard.settle_steps` after the
warm-up on. For each: the largest deviations of loss and gradient norm, the steps beyond `guard.sigmas`, how many of
them came one after the other, and the deviations that one nat more would have been, at least: a level from long ago
hides a jump of a loss that falls. For the default also the noise between two steps, without the smallest deviations:
its median and the share of steps in which `guard.loss_spread` and `guard.norm_spread` are larger.

    ingot train run.toml --out runs/first
    python benchmarks/guard_levels.py runs/first [runs/second ...]
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from record import record

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.guard import Guard
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.trainer.guard.step_judge import StepJudge

LEVELS = (1, 4, 8, 16, 32, 128)
TINY = 1e-9  # in place of the smallest deviations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of healthy runs")
    found = {}
    for run in parser.parse_args().runs:
        folder = RunFolder(run)
        config = recorded_run(folder.config)
        steps = {e["step"]: (e["loss"], e["grad_norm"]) for e in read_events(folder.events, events.STEP)}
        numbers = [steps[step] for step in sorted(steps)]
        settled_after = config.schedule.warmup_steps + config.guard.settle_steps
        found[config.name] = {
            "steps": len(numbers),
            "levels": {level: played(numbers, Guard(level=level), settled_after) for level in LEVELS},
            "noise": noise(numbers, settled_after),
        }
        print(config.name, found[config.name])
    record("guard_levels", found, ["torch"])


def judged(
    numbers: list[tuple[float, float]], guard: Guard, settled_after: int, *, jump: float = 0.0
) -> list[list[float]]:
    """Return (kinds, deviations of the loss, of the norm, norm in units of its median) of each settled step, had its
    loss been `jump` nats larger."""
    judge, rows = StepJudge(guard, "cpu", settled_after), []
    for step, one in enumerate(numbers, 1):
        loss, norm = (torch.tensor(value, dtype=torch.float64) for value in one)
        row = judge.judge(loss + jump, norm, settled=step > settled_after)
        judge.add(loss, norm, (row[0] > 0) & (jump == 0))
        if step > settled_after:
            rows.append(row.tolist())
    return rows


def played(numbers: list[tuple[float, float]], guard: Guard, settled_after: int) -> dict[str, float]:
    """Return the largest deviations, the number of steps with a finding, and the most of them in a row."""
    rows, jumps = judged(numbers, guard, settled_after), judged(numbers, guard, settled_after, jump=1.0)
    most = row = 0
    for kinds, *_ in rows:
        row = row + 1 if kinds else 0
        most = max(most, row)
    return {
        "loss": round(max(row[1] for row in rows), 1),
        "norm": round(max(row[2] for row in rows), 1),
        "found": sum(row[0] > 0 for row in rows),
        "in a row": most,
        "one nat": round(min(row[1] for row in jumps), 1),
    }


def noise(numbers: list[tuple[float, float]], settled_after: int) -> dict[str, tuple[float, float]]:
    """Return, for loss and norm, the median of the noise between two steps, and the share of steps in which the
    smallest deviation is larger than it."""
    # With tiny smallest deviations, a step that is one unit further away has one deviation more per noise.
    guard = Guard()
    bare = replace(guard, loss_spread=TINY, norm_spread=TINY, sigmas=1e12, corruption_factor=1e12)
    judge, spreads = StepJudge(bare, "cpu", settled_after), ([], [])
    for step, one in enumerate(numbers, 1):
        loss, norm = (torch.tensor(value, dtype=torch.float64) for value in one)
        near = judge.judge(loss, norm)
        far = judge.judge(loss + 1.0, norm * torch.e)
        if step > settled_after:
            for place, spread in enumerate(spreads, 1):
                spread.append(1.0 / float(far[place] - near[place]))
        judge.add(loss, norm, torch.tensor(False))
    floors = guard.loss_spread, guard.norm_spread
    return {
        name: (round(statistics.median(own), 4), round(sum(floor > one for one in own) / len(own), 3))
        for name, own, floor in zip(("loss", "norm"), spreads, floors, strict=True)
    }


if __name__ == "__main__":
    main()
