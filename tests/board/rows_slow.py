"""The row of slow ranks: nothing fails and nothing recovers, but the rank has to be named."""

import shutil
from pathlib import Path

from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import Row, random_of

SLOW_STEP, WITHIN = 10, 10
TRIALS = 4  # per seed: twenty with five seeds
HEALTHY_STEPS = 400  # per seed: 2,000 with five seeds
_WORK_SECONDS = 0.15  # of a step; the model of the bench adds a few milliseconds, or more on a busy machine
_SETTINGS = (
    "parallel.dp_shard=4",
    "checkpoint.every_steps=0",
    'plugins.modules=["slowed"]',
    'plugins.folder="lab"',
    "callbacks.slowed={}",
)


def rs35(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """One rank of four takes twice as long from step 10 on, in its computation or for its data: named within ten steps,
    with its phase, and a factor within 15% of 2. Healthy ranks with a fifth of jitter: none is named."""
    random = random_of("RS35", seed)
    for trial in range(TRIALS):
        kind, rank = ("compute", "data")[trial % 2], random.randrange(4)
        found, problem = _stragglers(bench, f"straggler-{seed}-{trial}", 24, _WORK_SECONDS, 0.05, seed, rank, kind)
        if not problem:
            right = len(found) == 1 and found[0]["rank"] == rank and found[0]["phase"] == kind
            right = right and found[0]["step"] < SLOW_STEP + WITHIN and 1.7 <= found[0]["factor"] <= 2.3
            problem = "" if right else f"found {found}"
        verdicts.judge("o6", f"{kind} of rank {rank}", problem)
    found, problem = _stragglers(bench, f"healthy-{seed}", HEALTHY_STEPS, _WORK_SECONDS / 3, 0.2, seed, -1, "compute")
    verdicts.judge("o6", "healthy ranks", problem or (f"found {found}" if found else ""))


def _stragglers(
    bench: Bench, name: str, steps: int, seconds: float, jitter: float, seed: int, rank: int, kind: str
) -> tuple[list[dict], str]:
    """Train with slowed.py. Returns the events of slow ranks, and what went wrong otherwise."""
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "slowed.py", lab / "slowed.py")
    slow = f"{seconds} {jitter} {seed} {rank} {SLOW_STEP} {kind}"
    ended = bench.train(name, *options((*_SETTINGS, f"train.steps={steps}")), env={"BOARD_SLOW": slow})
    found = list(read_events(bench.folder(name).events, events.STRAGGLER))
    bench.drop(name)
    return found, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}"


ROWS = (Row("RS35", "a slow rank", rs35),)
