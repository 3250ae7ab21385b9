import pytest

from ingot.errors import CheckpointError
from ingot.trainer.checkpoint.agree import from_all_ranks, from_rank_zero, on_all_ranks


def outcome(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def exercise(rank, ranks):
    def fail_on(bad, error):
        def part():
            if rank in bad:
                raise error
            return rank * 10

        return part

    def refuse(parts):
        raise CheckpointError("E-CKPT-HASH", f"{parts} are refused")

    return [
        outcome(lambda: from_rank_zero(lambda: rank + 5)),
        outcome(lambda: from_rank_zero(fail_on([0], ValueError("no")))),
        outcome(lambda: from_rank_zero(fail_on([0], KeyError("no")))),
        outcome(lambda: from_rank_zero(fail_on([1], KeyError("never called")))),
        outcome(lambda: from_all_ranks(lambda: rank * 10, sum)),
        outcome(lambda: from_all_ranks(lambda: rank * 10, refuse)),
        outcome(lambda: from_all_ranks(fail_on([1, 2], CheckpointError("E-CKPT-HASH", f"by rank {rank}")), sum)),
        outcome(lambda: from_all_ranks(fail_on([2], TypeError("bug")), sum)),
        outcome(lambda: on_all_ranks(fail_on([1], OSError(28, "full")))),
    ], outcome(lambda: on_all_ranks(fail_on([], None)))


def test_all_ranks_hear_the_same(fork_ranks):
    results = fork_ranks(exercise, 3)
    assert [own for _, own in results] == [0, 10, 20]
    same = [
        5,
        "ValueError: no",
        "RankError: rank 0: KeyError: 'no'",
        0,
        30,
        "CheckpointError: [0, 10, 20] are refused",
        "CheckpointError: by rank 1",
        "RankError: rank 2: TypeError: bug",
        "OSError: [Errno 28] full",
    ]
    for shared, _ in results:
        assert shared == same


def test_one_process_needs_no_group():
    assert from_rank_zero(lambda: 3) == 3
    assert from_all_ranks(lambda: 3, sum) == 3
    assert on_all_ranks(lambda: 4) == 4
    with pytest.raises(TypeError, match="bug"):
        on_all_ranks(lambda: (_ for _ in ()).throw(TypeError("bug")))
