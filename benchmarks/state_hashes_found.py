"""The share of flipped bits that hashes of the state find, and whose rank they name, by layout and `guard.hash_every`.

In real runs of a small model, tests/board/flipped.py flips bit 0, 3, 22 or 30 of a weight of one rank, in a random step
of each stretch of 50, from the first checkpoint on: before the update, after it, or at the log line. A flip counts as
found if the run went back from a check within `hash_every` steps of it, and as named if the steps that were trained
again named its rank and no other one. A flip that was not found stays in the run.

    python benchmarks/state_hashes_found.py [--flips 40] [--seed 0] [--every 1,20]
"""

import argparse
import random
import sys
from pathlib import Path

from record import record

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.board.bench import Bench, options
from tests.board.rows_bits import BITS

from ingot.drill.job import ended
from ingot.events import read_events
from ingot.schema import events

_BOARD = Path(__file__).parents[1] / "tests" / "board"
_STRETCH = 50  # steps with one flip
_DEADLINE_SECONDS = 3600.0
_LAYOUTS = {
    "two copies": (2, ("parallel.dp_shard=1", "parallel.dp_replicate=2")),
    "three copies": (3, ("parallel.dp_shard=1", "parallel.dp_replicate=3", "train.global_batch=12")),
    "shards without copies (ZeRO-3)": (2, ("parallel.zero=3",)),
}
_PLACES = ("gradients", "update", "line")
Flip = tuple[int, int, int, str]  # rank, step, bit, place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=40, help="flips in each run (default: 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", default="1,20", help="values of guard.hash_every (default: 1,20)")
    args = parser.parse_args()
    figures = {}
    for layout, (ranks, settings) in _LAYOUTS.items():
        for every in map(int, args.every.split(",")):
            draw = random.Random(f"{layout} {every} {args.seed}")
            flips = [flip(draw, ranks, number) for number in range(1, 1 + args.flips)]
            name = f"{layout}, hash_every = {every}"
            figures[name] = play(settings, every, flips)
            print(name, figures[name], flush=True)
    record("state_hashes_found", figures, ["torch"])


def flip(draw: random.Random, ranks: int, number: int) -> Flip:
    """Return a flip in the stretch `number`; not in its last steps, so that its check is in the same stretch."""
    step = _STRETCH * number + draw.randrange(2, _STRETCH - 22)
    return draw.randrange(ranks), step, draw.choice(BITS), draw.choice(_PLACES)


def play(settings: tuple[str, ...], every: int, flips: list[Flip]) -> dict[str, object]:
    """Train a run with these flips, and count."""
    own = (
        *settings,
        'plugins.modules=["flipped"]',
        f'plugins.folder="{_BOARD}"',
        "callbacks.flipped={}",
        f"guard.hash_every={every}",
        "guard.max_damages=0",
        f"train.steps={_STRETCH * (1 + len(flips))}",
        f"checkpoint.every_steps={_STRETCH}",
    )
    with Bench() as bench:
        text = ",".join(" ".join(map(str, flip)) for flip in flips)
        result = ended(bench.start("run", *options(own), env={"BOARD_FLIPS": text}), _DEADLINE_SECONDS)
        assert result.code == 0, result.output[-2000:]
        log = list(read_events(bench.folder("run").events, events.STATE_DAMAGED, events.STATE_REPLAYED))
    damaged = [event["step"] for event in log if event["kind"] == events.STATE_DAMAGED]
    replayed = [event for event in log if event["kind"] == events.STATE_REPLAYED]
    found = named = wrong = 0
    for rank, step, _, _ in flips:
        check = next((at for at in damaged if step <= at <= step + every), None)
        found += check is not None
        verdict = next((event for event in replayed if event["step"] == check), None)
        if verdict and verdict["named"]:
            named += verdict["ranks"] == [rank]
            wrong += verdict["ranks"] != [rank]
    return {"flips": len(flips), "found": found, "named": named, "another rank named": wrong}


if __name__ == "__main__":
    main()
