"""The row of random faults for a long time, and the same for an hour: python -m tests.board.rows_soak 1h 20s."""

import json
import sys

from ingot.drill.faults import FAULTS
from ingot.drill.oracles import Verdicts
from ingot.drill.soak import Soak, soaked
from ingot.drill.trial import DrillOutput, Silence
from ingot.drill.undisturbed import DrillReference
from ingot.units import parse_seconds

from .bench import Bench
from .row import Row

_SECONDS, _EVERY = 60.0, 10.0  # of each seed: five have five minutes
_USEFUL = 0.6
_SETTINGS = (
    "train.steps=1200",
    "checkpoint.every_steps=40",
    'checkpoint.mode="async"',
    "launch.watchdog_seconds=3",
    "launch.max_restarts=10000",
)


class Lines(Silence):
    """Prints what happens, for the hour."""

    def say(self, text: str = "") -> None:
        print(text, flush=True)


def soak(bench: Bench, verdicts: Verdicts, output: DrillOutput, seconds: float, every: float, seed: int) -> dict:
    """Train the bench's run again and again while random faults come. Returns the numbers."""
    reference = DrillReference(bench.drilled(*_SETTINGS), bench.reference(*_SETTINGS), 0.0)
    kinds, reference = soaked(reference, FAULTS, bench.root / f"soak-{seed}", output)
    session = Soak(reference, kinds, output, seconds=seconds, every=every, seed=seed, verdicts=verdicts)
    session.play(bench.root / f"soak-{seed}")
    result = session.result()
    share = result["useful_share"]
    verdicts.judge("o8", "all rounds", "" if share >= _USEFUL else f"{share:.0%} of the time was useful")
    verdicts.numbers |= {"faults": float(session.faults.total()), "useful_share": share}
    if (slope := result["memory_mb_per_minute"]) is not None:
        verdicts.numbers["memory_mb_per_minute"] = slope
    return result


def rs34(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Random faults of all kinds that any run can have, every 10 s on average, for a minute."""
    soak(bench, verdicts, Silence(), _SECONDS, _EVERY, seed)


ROWS = (Row("RS34", "random faults, every 10 s on average, for a minute per seed", rs34),)


if __name__ == "__main__":
    found = Verdicts()
    with Bench() as place:
        result = soak(place, found, Lines(), parse_seconds(sys.argv[1]), parse_seconds(sys.argv[2]), 0)
    print(json.dumps(result | found.as_json("RS34", 0), indent=1))
    sys.exit(1 if found.wrong else 0)
