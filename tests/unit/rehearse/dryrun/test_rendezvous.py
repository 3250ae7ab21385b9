"""Sequences of collectives that match, and planted faults that do not."""

import random
from dataclasses import replace
from typing import Any

import pytest

from ingot.rehearse.dryrun.mesh_world import Grid, check_world
from ingot.rehearse.dryrun.rendezvous import Call, first_fault

PAIR = (0, 1)


def all_reduce(group, elements=8, label="", dtype="float32", channel=""):
    return Call("all_reduce", tuple(group), dtype, elements, channel, label=label)


def send(peer, group=PAIR, elements=4, channel="down"):
    return Call("send", tuple(group), "bfloat16", elements, channel, peer)


def recv(peer, group=PAIR, elements=4, channel="down"):
    return Call("recv", tuple(group), "bfloat16", elements, channel, peer)


def test_equal_sequences_meet_and_order_between_groups_may_differ_by_rank():
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    programs = {rank: [all_reduce(rows[rank // 2]), all_reduce(columns[rank % 2])] for rank in range(4)}
    assert first_fault(programs) is None
    assert first_fault({0: [send(1), send(1)], 1: [recv(0), recv(0)]}) is None
    assert first_fault({0: [], 1: []}) is None


def test_a_skipped_collective_is_missed_at_the_end():
    fault = first_fault({0: [all_reduce(PAIR, label="step 1"), all_reduce(PAIR)], 1: [all_reduce(PAIR)]}, {1: "tail"})
    assert fault and fault.kind == "missing"
    assert "rank 1 (tail), which has ended after 1 calls" in fault.message
    assert fault.positions == {0: 1, 1: 1}


def test_a_skipped_collective_before_another_size_is_a_mismatch():
    whole = [all_reduce(PAIR, 8, "blocks.0"), all_reduce(PAIR, 16, "blocks.1")]
    fault = first_fault({0: whole, 1: whole[1:]}, {0: "first", 1: "second"})
    assert fault and fault.kind == "mismatch" and fault.positions == {0: 0, 1: 0}
    assert "all_reduce of 8 float32 [blocks.0]" in fault.message
    assert "rank 1 (second): all_reduce of 16 float32" in fault.message


@pytest.mark.parametrize(
    "other", [all_reduce(PAIR, 9), all_reduce(PAIR, dtype="bfloat16"), Call("all_gather", PAIR, "float32", 8)]
)
def test_another_size_dtype_or_operation_is_a_mismatch(other):
    fault = first_fault({0: [all_reduce(PAIR)], 1: [other]})
    assert fault and fault.kind == "mismatch"


def test_swapped_order_on_one_group_is_a_mismatch():
    first, second = all_reduce(PAIR, 8), all_reduce(PAIR, 16)
    fault = first_fault({0: [first, second], 1: [second, first]})
    assert fault and fault.kind == "mismatch"


def test_swapped_order_over_two_groups_is_a_deadlock():
    one, two = all_reduce(PAIR, channel="a"), all_reduce(PAIR, channel="b")
    fault = first_fault({0: [one, two], 1: [two, one]})
    assert fault and fault.kind == "deadlock" and fault.positions == {0: 0, 1: 0}


def test_a_circle_over_three_groups_is_a_deadlock_and_names_its_ranks_only():
    groups = ((0, 1), (1, 2), (2, 0))
    programs = {
        0: [all_reduce(groups[0]), all_reduce(groups[2])],
        1: [all_reduce(groups[1]), all_reduce(groups[0])],
        2: [all_reduce(groups[2]), all_reduce(groups[1])],
        3: [],
    }
    fault = first_fault(programs)
    assert fault and fault.kind == "deadlock" and set(fault.positions) == {0, 1, 2}


def test_two_ranks_that_receive_first_are_a_deadlock():
    fault = first_fault({0: [recv(1), send(1)], 1: [recv(0), send(0)]})
    assert fault and fault.kind == "deadlock"


@pytest.mark.parametrize("posted", [False, True])
def test_a_message_waits_for_its_receiver_and_later_calls_wait_for_the_message(posted):
    sends = isend if posted else send
    fault = first_fault({0: [sends(1), recv(1)], 1: [sends(0), recv(0)]})
    assert fault and fault.kind == "deadlock" and set(fault.positions) == {0, 1}
    reduced = all_reduce(PAIR, channel="down")
    fault = first_fault({0: [sends(1), reduced], 1: [reduced, recv(0)]})
    assert fault and fault.kind == "deadlock"
    if posted:
        assert "all_reduce" in fault.message and "queued after isend of 4 bfloat16 to rank 1" in fault.message


def test_a_posted_send_holds_its_channel_and_not_its_rank():
    first, second = dict[str, Any](channel="a"), dict[str, Any](channel="b")
    assert first_fault({0: [isend(1, **first), recv(1, **second)], 1: [isend(0, **second), recv(0, **first)]}) is None
    fault = first_fault({0: [send(1, **first), recv(1, **second)], 1: [send(0, **second), recv(0, **first)]})
    assert fault and fault.kind == "deadlock"
    waits = [isend(1, **first), replace(send(1, **first), op="sent", ticket=0), recv(1, **second)]
    fault = first_fault({0: waits, 1: [isend(0, **second), recv(0, **first)]})
    assert fault is None
    fault = first_fault({0: waits, 1: [send(0, **second), recv(0, **first)]})
    assert fault and fault.kind == "deadlock" and fault.positions == {0: 1, 1: 0}


def test_messages_of_one_batch_leave_side_by_side():
    swap = {rank: [isend(1 - rank), replace(irecv(1 - rank), joined=True), wait(1 - rank, 0)] for rank in PAIR}
    assert first_fault(swap) is None
    fault = first_fault({rank: [replace(call, joined=False) for call in calls] for rank, calls in swap.items()})
    assert fault and fault.kind == "deadlock"


def test_messages_arrive_in_the_order_they_were_sent():
    fault = first_fault({0: [send(1, elements=4), send(1, elements=6)], 1: [recv(0, elements=6), recv(0, elements=4)]})
    assert fault and fault.kind == "mismatch" and "send of 4" in fault.message
    other_channel = {0: [isend(1, channel="a"), send(1, elements=6)], 1: [recv(0, elements=6), recv(0, channel="a")]}
    assert first_fault(other_channel) is None


def isend(peer, **options):
    return replace(send(peer, **options), op="isend")


def irecv(peer, **options):
    return replace(recv(peer, **options), op="irecv")


def wait(peer, ticket, **options):
    return replace(recv(peer, **options), op="wait", ticket=ticket)


def test_a_posted_receive_does_not_hold_its_rank_and_a_wait_does():
    back = dict[str, Any](channel="back")
    ahead = {0: [irecv(1, **back), send(1), wait(1, 0, **back)], 1: [irecv(0), wait(0, 0), send(0, **back)]}
    assert first_fault(ahead) is None
    both_wait = {0: [irecv(1), wait(1, 0), send(1)], 1: [irecv(0), wait(0, 0), send(0)]}
    fault = first_fault(both_wait)
    assert fault and fault.kind == "deadlock" and fault.positions == {0: 1, 1: 1}


def test_waits_may_come_in_another_order_than_receives_but_find_their_own_message():
    sends = [send(1, elements=4), send(1, elements=6)]
    posts = [irecv(0, elements=4), irecv(0, elements=6)]
    assert first_fault({0: sends, 1: [*posts, wait(0, 1), wait(0, 0)]}) is None
    fault = first_fault({0: sends, 1: [*posts[::-1], wait(0, 0), wait(0, 1)]})
    assert fault and fault.kind == "mismatch" and "irecv of 6" in fault.message


def test_a_receive_that_nobody_answers_is_missed():
    fault = first_fault({0: [send(1)], 1: [irecv(0), irecv(0), wait(0, 0)]})
    assert fault and fault.kind == "missing" and "without sending" in fault.message


def test_a_message_that_nobody_receives_is_missed():
    fault = first_fault({0: [isend(1)], 1: []})
    assert fault and fault.kind == "missing" and "without receiving" in fault.message
    fault = first_fault({0: [send(1)], 1: []})
    assert fault and fault.kind == "missing" and "waits for rank 1, which has ended" in fault.message


GRID = Grid({"pp": 4, "dp": 8, "tp": 2})


def pipeline(rank: int, micro_batches: int = 3) -> list[Call]:
    """Forward pipeline with a tp all-reduce per micro-batch, a dp reduction and a norm over the world at the end."""
    pp, dp, tp = GRID.coordinates(rank)
    line = tuple(GRID.rank((p, dp, tp)) for p in range(4))
    calls = []
    for m in range(micro_batches):
        if pp > 0:
            calls.append(recv(line[pp - 1], line))
        calls.append(all_reduce([GRID.rank((pp, dp, t)) for t in range(2)], 8, f"F{m}"))
        if pp < 3:
            calls.append(send(line[pp + 1], line))
    calls.append(all_reduce([GRID.rank((pp, d, tp)) for d in range(8)], 100 + pp, "reduce"))
    if pp in (0, 3):
        calls.append(all_reduce((line[0], line[3]), 50, "tied embedding", channel="tied"))
    return [*calls, all_reduce(range(64), 1, "norm")]


def test_the_grid_knows_places_and_spanned_axes():
    assert GRID.coordinates(GRID.rank((3, 5, 1))) == (3, 5, 1) and GRID.world_size == 64
    assert GRID.axes((0, 1)) == ("tp",) and GRID.axes(range(64)) == ("pp", "dp", "tp")
    assert GRID.moved_group((0, 1), 0, 2) == (2, 3)
    assert GRID.moved_group((0, 48), 0, 49) == (1, 49)  # first and last stage, for another tp rank of the last
    with pytest.raises(ValueError, match="not in the group"):
        GRID.moved_group((0, 48), 0, 16)


def test_every_program_moves_to_every_rank_of_its_stage():
    for station in range(4):
        base = GRID.rank((station, 0, 0))
        for there in (GRID.rank((station, 7, 1)), GRID.rank((station, 3, 0))):
            assert GRID.moved(pipeline(base), base, there) == pipeline(there)


def test_a_few_ranks_stand_for_the_world():
    programs = {rank: pipeline(rank) for rank in (0, 16, 32, 48, 15, 63)}
    found = check_world(programs, GRID)
    assert found.fault is None and found.alike and found.followed == 4
    assert first_fault({rank: pipeline(rank) for rank in range(64)}) is None  # as the whole world says


def test_a_skipped_collective_on_one_stage_is_found_through_representatives():
    programs = {rank: pipeline(rank) for rank in (0, 16, 32, 48)}
    programs[32] = [call for call in programs[32] if call.op != "send"]
    found = check_world(programs, GRID)
    assert found.fault and found.fault.kind in ("missing", "deadlock")


def test_a_skip_on_the_last_coordinate_only_is_found_by_following_the_corners():
    programs = {rank: pipeline(rank) for rank in (0, 16, 32, 48)}
    last = GRID.rank((2, 7, 0))
    programs[last] = [call for call in pipeline(last) if call.label != "reduce"]
    found = check_world(programs, GRID)
    assert found.fault and not found.alike and found.followed == 16
    whole = {rank: pipeline(rank) for rank in range(64)} | {last: programs[last]}
    assert first_fault(whole)  # as the whole world says


def test_random_worlds_through_representatives_agree_with_the_whole():
    """Plant a fault at the same place on all ranks of one stage: both views see it, or neither."""
    random.seed(1)
    for _ in range(40):
        stage, drop = random.randrange(4), random.randrange(8)

        def planted(rank, stage=stage, drop=drop):
            calls = pipeline(rank)
            if GRID.coordinates(rank)[0] == stage and drop < len(calls):
                del calls[drop]
            return calls

        whole = first_fault({rank: planted(rank) for rank in range(64)})
        few = check_world({rank: planted(rank) for rank in (0, 16, 32, 48)}, GRID).fault
        assert (whole is None) == (few is None), (stage, drop, whole, few)


def test_large_worlds_are_fast():
    """16,384 ranks as 16 programs of 30,000 calls."""
    grid = Grid({"pp": 16, "dp": 128, "tp": 8})

    def program(pp):
        rank = grid.rank((pp, 0, 0))
        tp = tuple(range(rank, rank + 8))
        line = tuple(grid.rank((p, 0, 0)) for p in range(16))
        calls = []
        for _ in range(3000):
            calls += (
                [recv(line[pp - 1], line)] * (pp > 0)
                + [all_reduce(tp)] * 8
                + [send(line[(pp + 1) % 16], line)] * (pp < 15)
            )
        return [*calls, all_reduce(range(grid.world_size), 1)]

    assert check_world({grid.rank((pp, 0, 0)): program(pp) for pp in range(16)}, grid).fault is None
