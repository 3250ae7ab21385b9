"""The work in flight on a rank, for memory: fewer micro-batches and states than there are, and the same peaks."""

import pytest

from ingot.planner.predict.memory.in_flight import full_history, history_of, micro_batches_that_matter
from ingot.theory.schedule import build_table, peak_in_flight

SCHEDULES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("looped_bfs", 2), ("zb_h1", 1),
    ("interleaved_zb", 2), ("zb_v", 2), ("dualpipe_v", 2), ("zb_h2", 1),
]  # fmt: skip


def most(row) -> float:
    return (row.alive + row.left).sum(1).max()


@pytest.mark.parametrize(("name", "each"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_further_micro_batches_do_not_change_the_peaks(name, each, pp):
    """The peaks of the counted micro-batches equal those of many more, by stage and in total."""
    many = 16 * pp
    assert micro_batches_that_matter(name, pp, many) in (4 * pp, many)
    for rank in range(pp):
        whole = full_history(name, pp, many, each, rank)
        counted = history_of(name, pp, many, each, rank)
        assert most(counted) == most(whole)
        assert set(counted.situations) >= {s for s in whole.situations if sum(s.alive + s.left) == most(whole)}


@pytest.mark.parametrize(("name", "each"), SCHEDULES)
def test_what_is_left_out_is_smaller_than_something_kept(name, each):
    table = build_table(name, 4, 16, each)
    assert tuple(most(history_of(name, 4, 16, each, rank)) for rank in range(4)) == peak_in_flight(table)


def test_ranks_that_hold_fewer_gradients_are_not_taken_for_larger_ones():
    """A first backward has all micro-batches but no gradients, the second one fewer, and gradients: both stay."""
    row = history_of("gpipe", 4, 8, 1, 0)
    backwards = [(s.doing.first, s.alive) for s in row.situations if s.doing.kind == "B"]
    assert (True, (8,)) in backwards and (False, (7,)) in backwards
