"""Groups that take parts of axes, and rings, followed through a few ranks."""

from dataclasses import replace

import pytest

from ingot.rehearse.dryrun.mesh_world import Grid, check_world
from ingot.rehearse.dryrun.rendezvous import Call

# Experts over 4 neighbours, half of the 8 x 1 ranks of dp_shard x tp; a ring of 4 with rows of 2 in cp.
EXPERTS = Grid({"pp": 2, "dp_shard": 8, "tp": 1}, cuts=(4,))
RING = Grid({"pp": 2, "dp_shard": 2, "cp": 8}, cuts=(2, 4))


def test_a_group_of_neighbours_moves_as_a_part_of_its_axis():
    assert EXPERTS.axes((4, 5, 6, 7)) == ("dp_shard",)
    assert EXPERTS.moved_group((0, 1, 2, 3), 0, 15) == (12, 13, 14, 15)
    assert EXPERTS.moved_group((3, 7), 7, 8) == (8, 12)
    assert EXPERTS.moved_group(tuple(range(8)), 0, 9) == tuple(range(8, 16))
    assert EXPERTS.coordinates(13) == (1, 5, 0)
    with pytest.raises(ValueError, match="not in the group"):
        Grid(EXPERTS.sizes).moved_group((0, 1, 2, 3), 0, 5)  # without the cut it would be the same four


@pytest.mark.parametrize("cuts", [(3,), (4, 6)])
def test_groups_that_are_no_parts_of_one_another_are_refused(cuts):
    with pytest.raises(ValueError, match="do not nest"):
        Grid({"dp_shard": 12, "cp": 4}, cuts)


def test_corners_are_those_of_the_parts():
    assert EXPERTS.corners("pp") == [0, 3, 4, 7]


def ring_program(rank: int, *, ahead: int = 1, separate: bool = False) -> list[Call]:
    """Passes something `ahead` places on around a ring over every second rank of cp, twice, and sums over the world."""
    pp, dp, cp = RING.coordinates(rank)
    group = tuple(RING.rank((pp, dp, place * 2 + cp % 2)) for place in range(4))
    after, before = (group[(cp // 2 + by) % 4] for by in (ahead, -1))
    message = Call("isend", group, "bfloat16", 8, "ring", after)
    calls = []
    for turn in range(2):
        calls += [message, replace(message, op="irecv", peer=before, joined=not separate)]
        calls += [replace(message, op="sent", ticket=turn), replace(message, op="wait", peer=before, ticket=turn)]
    return [*calls, Call("all_reduce", tuple(range(RING.world_size)), "float32", 1)]


BASES, LASTS = (0, 16), (15, 31)


def test_around_a_ring_all_do_alike_and_meet():
    assert RING.moved(ring_program(15), 15, 0) == ring_program(0)
    assert RING.moved(ring_program(0), 0, 29) == ring_program(29)
    found = check_world({rank: ring_program(rank) for rank in (*BASES, *LASTS)}, RING)
    assert found.fault is None and found.alike and found.followed == 2


def test_all_sending_to_the_wrong_neighbour_is_found():
    found = check_world({rank: ring_program(rank, ahead=2) for rank in (*BASES, *LASTS)}, RING)
    assert found.alike and found.fault and found.fault.kind == "deadlock"
    assert "to rank 4" in found.fault.message and "represented by rank 0" in found.fault.message


def test_one_sending_to_the_wrong_neighbour_is_found():
    programs = {rank: ring_program(rank) for rank in (*BASES, *LASTS)}
    for wrong in (0, 31):
        found = check_world(programs | {wrong: ring_program(wrong, ahead=2)}, RING)
        assert not found.alike and found.fault, wrong


def test_a_ring_in_which_all_send_before_they_receive_waits_forever():
    found = check_world({rank: ring_program(rank, separate=True) for rank in (*BASES, *LASTS)}, RING)
    assert found.fault and found.fault.kind == "deadlock"


def exchange(rank: int, elements: int, own: int) -> list[Call]:
    group = tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))
    name = f"experts of {group[0]}"  # a communicator's name is its line's
    return [Call("all_to_all", group, "bfloat16", elements, name, own=own)]


def test_unequal_parts_of_an_all_to_all_may_have_other_sizes_and_equal_ones_may_not():
    assert check_world({0: exchange(0, 10, 2), 7: exchange(7, 14, 4), 8: exchange(8, 10, 2)}, EXPERTS).fault is None
    found = check_world({0: exchange(0, 10, -1), 7: exchange(7, 14, -1), 8: exchange(8, 10, -1)}, EXPERTS)
    assert not found.alike and found.fault and found.fault.kind == "mismatch"
