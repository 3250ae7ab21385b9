import time

import pytest

from ingot.errors import ConfigError
from ingot.trainer.resilience.collective_calls import (
    MOST_CALLS,
    CollectiveCall,
    as_json,
    find_blame,
    from_json,
    newest_calls,
)


def call(
    number=12, *, group="dp", ranks=(0, 1), operation="all_reduce", size=8, finished=False, p2p=False
) -> CollectiveCall:
    return CollectiveCall(
        group=group,
        ranks=tuple(ranks),
        number=number,
        operation=operation,
        sizes=((size,),),
        dtype="Float",
        finished=finished,
        point_to_point=p2p,
    )


def record(number, *, group="dp", done=True, p2p=False):
    return {
        "process_group": [group, "undefined"],
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[8, 2]],
        "input_dtypes": ["Float"],
        "retired": done,
        "is_p2p": p2p,
    }


def test_the_newest_calls_are_those_that_wait_and_the_last_of_each_group():
    records = [record(1, done=False), *(record(n) for n in range(2, 9)), record(1, group="tp"), record(2, p2p=True)]
    kept = newest_calls(records, {"dp": [0, 1]})
    assert [(c.group, c.number) for c in kept] == [("dp", 1), *(("dp", n) for n in range(5, 9)), ("tp", 1)]
    assert kept[0].words() == "all_reduce [8, 2] Float, number 1 of group dp (ranks 0, 1)"
    assert len(newest_calls([record(n, done=False) for n in range(500)], {})) == MOST_CALLS
    assert from_json(as_json(kept)) == kept
    with pytest.raises(ConfigError):
        from_json([{"group": 1}])


def test_calls_of_one_number_that_differ_are_a_bug():
    blame = find_blame({0: [call(), call(13)], 1: [call(size=9), call(13, size=7)]})
    assert blame is not None and blame.mismatch and blame.ranks == (0, 1)
    assert "rank 0 called all_reduce [8] Float, number 12" in blame.words
    assert "rank 1 called all_reduce [9] Float, number 12" in blame.words
    other = find_blame({0: [call(finished=True)], 1: [call(operation="broadcast", finished=True)]})
    assert other is not None and other.mismatch  # nobody has to wait for that


@pytest.mark.parametrize("operation", ["all_to_all", "gather", "scatter"])
def test_parts_of_different_sizes_are_no_bug_where_they_are_allowed(operation):
    reports = {0: [call(operation=operation)], 1: [call(operation=operation, size=9)]}
    assert find_blame(reports) is None  # all came: the collective itself hangs


def test_the_rank_that_others_wait_for_is_blamed():
    """Rank 3 computes for ever; rank 2 waits for it, and so does rank 0, by way of rank 2."""
    reports = {
        0: [call(5, group="a", ranks=(0, 2))],
        1: [call(5, group="b", ranks=(1, 3), finished=True)],
        2: [call(8, group="c", ranks=(2, 3)), call(4, group="a", ranks=(0, 2), finished=True)],
        3: [call(7, group="c", ranks=(2, 3), finished=True)],
    }
    blame = find_blame(reports)
    assert blame is not None and not blame.mismatch and blame.ranks == (3,)
    assert blame.words == "rank 2 waits for rank 3 in all_reduce [8] Float, number 8 of group c (ranks 2, 3)"


def test_a_call_to_which_all_ranks_came_is_not_the_one_that_is_waited_for():
    blame = find_blame({0: [call(12), call(13)], 1: [call(12, finished=True)]})
    assert blame is not None and blame.ranks == (1,) and "number 13" in blame.words


def test_a_rank_that_does_not_answer_may_be_blamed():
    blame = find_blame({0: [call()], 1: None})
    assert blame is not None and blame.ranks == (1,)


def test_a_circle_names_all_its_ranks_and_is_no_proof_of_a_bug():
    reports = {0: [call(5, group="a")], 1: [call(5, group="b")]}
    blame = find_blame(reports)
    assert blame is not None and blame.ranks == (0, 1) and not blame.mismatch
    assert "rank 0 waits in" in blame.words and "of group a" in blame.words


def test_a_receive_waits_for_its_sender_whatever_that_one_sent_before():
    """Numbers of sends and receives are not those of collectives."""
    blame = find_blame({0: [call(3, p2p=True, operation="recv")], 1: [call(9, finished=True)]})
    assert blame is not None and blame.ranks == (1,) and not blame.mismatch


def test_nothing_is_said_where_nobody_waits():
    assert find_blame({0: [call(finished=True)], 1: [], 2: None}) is None


def test_a_rank_knows_what_it_called(fork_ranks, monkeypatch):
    """torch's flight recorder on real ranks: rank 1 does not call the last collective of its group."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "64")  # as worker_environment has it
    reports = dict(enumerate(fork_ranks(_one_stays_away, 2)))
    blame = find_blame(reports)
    assert blame is not None and blame.ranks == (1,) and not blame.mismatch
    assert "all_reduce [3] Float, number 2 of group pairs (ranks 0, 1)" in blame.words


def _one_stays_away(rank, world):
    import torch
    import torch.distributed as dist

    from ingot.trainer.resilience.reports import calls_of_this_process

    group = dist.new_group([0, 1], group_desc="pairs")
    dist.all_reduce(torch.ones(2), group=group)
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    calls, deadline = calls_of_this_process(), time.monotonic() + 30
    while any(one.number == 1 and not one.finished for one in calls):  # a thread of torch marks it
        assert time.monotonic() < deadline
        calls = calls_of_this_process()
    dist.barrier()
    if rank == 1:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    return calls
