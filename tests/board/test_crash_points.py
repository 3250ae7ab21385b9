"""The points of each shape of run at which a planted fault shows (tests/mutants/board.py). `.ci/nightly points` plays
all, python -m tests.board five of each shape per seed."""

import pytest

from ingot.drill.oracles import Verdicts

from .bench import Bench
from .crash_points import DISKS, MEMORY, ONLY_WEIGHTS, Point, Shape, calls_of, crash
from .test_rows import wrong

pytestmark = pytest.mark.slow


def crashed(bench: Bench, shape: Shape, mode: str, who: str, do: str, *numbers: int) -> Verdicts:
    verdicts = Verdicts()
    for k in numbers:
        crash(bench, verdicts, shape, Point(mode=mode, who=who, k=k, do=do))
    assert verdicts.outcomes.total() == len(numbers)
    return verdicts


def number_of(calls: list[tuple[str, str]], name: str, path: str) -> int:
    """Return the number, from 1, of the last of `calls` with this name and a path that ends with `path`."""
    return max(n for n, call in enumerate(calls, 1) if call[0] == name and call[1].endswith(path))


@pytest.mark.row("RS09 disks")
def test_a_loss_of_power_after_the_commit_finds_the_files_of_all_disks(bench: Bench):
    """The manifest is in the run folder, and the file of the second rank on a disk of its own."""
    calls = calls_of(bench, DISKS, "async", "writer:0")
    removed = number_of(calls, "rename", ".removed-step-00000004")  # right after the new checkpoint is durable
    verdicts = crashed(bench, DISKS, "async", "writer:0", "power", removed)
    assert not wrong(verdicts)
    assert [outcome for _, _, outcome in verdicts.outcomes] == ["step 8"]


@pytest.mark.row("RS09 weights")
def test_a_crash_of_a_save_of_the_weights_leaves_a_whole_one(bench: Bench):
    """Right after it has its name."""
    named = number_of(calls_of(bench, ONLY_WEIGHTS, "sync", "rank"), "rename", "/weights/step-00000006")
    verdicts = crashed(bench, ONLY_WEIGHTS, "sync", "rank", "kill", named + 1)
    assert not wrong(verdicts)
    assert [outcome for _, _, outcome in verdicts.outcomes] == ["weights of step 6 whole; step 4"]


@pytest.mark.row("RS09 memory")
def test_a_rank_that_ends_while_it_writes_continues_from_memory(bench: Bench):
    """The checkpoint is not whole, and its samples are in memory alone."""
    calls = calls_of(bench, MEMORY, "async", "writer:1")
    written = number_of(calls, "write", "rank-00001.safetensors")
    verdicts = crashed(bench, MEMORY, "async", "writer:1", "kill", written, written)  # two seeds may draw one point
    assert not wrong(verdicts)
    assert [outcome for _, _, outcome in verdicts.outcomes] == ["step 8 from memory"]
