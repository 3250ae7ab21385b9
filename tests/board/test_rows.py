"""A sample of the board: `.ci/nightly board` plays all rows, and all crash points."""

import os
import signal

import pytest

from ingot.drill.oracles import Verdicts

from . import ALL, killpoints
from .bench import Bench
from .crash_points import calls_of_a_save, crash_points
from .row import MODES, carry_out, newest_valid, random_of

pytestmark = pytest.mark.slow
SAMPLED = ("RS29", "RS30 zombie")
POINTS = 5


def wrong(verdicts: Verdicts) -> list[str]:
    assert verdicts.asked
    return [f"{oracle}: {one}" for oracle, found in verdicts.wrong.items() for one in found]


@pytest.mark.row("RS09")
def test_a_loss_of_power_after_any_rename_costs_no_checkpoint(bench: Bench):
    """Whatever has a new name must be on the disk by then, with its folder."""
    numbers = killpoints.after_renames(calls_of_a_save(bench, "sync"))
    verdicts = Verdicts()
    crash_points(bench, verdicts, {"sync": numbers}, ("power",))
    assert not wrong(verdicts)
    assert len(numbers) == 5  # samples, manifest, the new checkpoint, the old one, and the last call


@pytest.mark.row("RS09")
@pytest.mark.parametrize("mode", MODES)
def test_a_crash_at_random_calls_of_a_save(bench: Bench, mode: str):
    count, verdicts = len(calls_of_a_save(bench, mode)), Verdicts()
    seed = int(os.environ.get("INGOT_BOARD_SEED", "0"))
    numbers = sorted(random_of(f"crash {mode}", seed).sample(range(1, count + 1), POINTS))
    crash_points(bench, verdicts, {mode: numbers[::2]}, ("power",))
    crash_points(bench, verdicts, {mode: numbers[1::2]}, ("kill",))
    assert not wrong(verdicts)


def test_a_wrong_bit_on_its_way_to_the_disk_is_noticed(bench: Bench):
    name = "wrong-bit"
    folder = bench.copy(bench.base(4), name)
    data = [
        n for n, (call, path) in enumerate(calls_of_a_save(bench, "sync"), 1) if call == "write" and "rank-" in path
    ]
    fault = killpoints.fault(folder, "flip", data[len(data) // 2], who="rank")
    ended = bench.attempt(name, until=8, env=fault)
    assert ended.code not in (0, 10, -signal.SIGKILL) and "E-CKPT-READ-BACK" in ended.output
    assert newest_valid(folder) == (4, "")


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.id, marks=pytest.mark.row(row.id)) for row in ALL if row.id in SAMPLED]
)
def test_a_row(bench: Bench, row):
    verdicts = Verdicts()
    carry_out(bench, row, 0, verdicts)
    assert not wrong(verdicts)
