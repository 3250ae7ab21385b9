"""The model checker of streams: planted deadlocks, and every answer against a search without its shortcuts."""

import random

import pytest

from ingot.rehearse.dryrun.communicators import Communicator, check_streams, communicators_of, programs_of
from ingot.rehearse.dryrun.queues import (
    KernelStart,
    Undecided,
    all_queues,
    find_stuck,
    least_room,
    one_queue,
    own_queues,
    streams_of,
    way_of,
)
from ingot.rehearse.dryrun.rendezvous import Call

SUM, GATHER = KernelStart("dp", exchanges=("sum",), text="sum"), KernelStart("tp", exchanges=("gather",), text="gather")
OPPOSITE = {0: [SUM, GATHER], 1: [GATHER, SUM]}


def test_two_ranks_that_start_two_collectives_in_opposite_order_lock_where_only_one_can_run():
    assert find_stuck(OPPOSITE, one_queue(OPPOSITE)) is None  # both are resident
    for rules in ({"holds": True}, {"room": 1}):
        stuck = find_stuck(OPPOSITE, one_queue(OPPOSITE), **rules)
        assert stuck is not None and len(stuck.begun) == 2 and len(stuck.circle) == 4
        assert sorted(way_of(stuck, OPPOSITE)) == ["rank 0 begins sum (dp)", "rank 1 begins gather (tp)"]
        assert "rank 1: sum (dp)" in stuck.circle[0]
    assert find_stuck(OPPOSITE, own_queues(OPPOSITE), holds=True) is None  # with two queues they do not wait
    # With room for one and a queue for each, the order in which they begin decides: the search finds the unlucky one.
    assert find_stuck(OPPOSITE, own_queues(OPPOSITE), room=1) is not None
    assert least_room(OPPOSITE, one_queue(OPPOSITE)) == 2


def test_work_that_waits_for_a_message_locks_what_shares_its_queue():
    """Rank 0 waits for a message before it starts the collective that rank 1 waits for before it sends."""
    receive, send = KernelStart("in", exchanges=("message",)), KernelStart("out", (1,), ("message",))
    programs = {
        0: [receive, KernelStart("compute", (0,)), SUM],
        1: [SUM, KernelStart("compute", (0,)), send],
    }
    assert find_stuck(programs, own_queues(programs)) is None  # the sum overtakes the work that waits
    stuck = find_stuck(programs, one_queue(programs))
    assert stuck is not None and least_room(programs, one_queue(programs)) is None
    assert any("rank 0: sum (dp) is in a queue after rank 0: compute" in line for line in stuck.circle)
    with_two = [find_stuck(programs, queues) for queues in all_queues(programs, 2)]
    assert any(with_two) and not all(with_two)  # it depends on which streams share a queue
    in_order = {**programs, 0: [SUM, receive, KernelStart("compute", (1,))]}
    assert find_stuck(in_order, one_queue(in_order), holds=True) is None


def stuck_without_shortcuts(programs, queue_of, room, holds):
    """The number of begins to the nearest stuck state, None if there is none, by plain sets: every order is tried."""
    every = {(rank, i) for rank, program in programs.items() for i in range(len(program))}
    members = {}
    for rank, i in every:
        for key in programs[rank][i].exchanges:
            members.setdefault(key, set()).add((rank, i))

    def ended(begun):
        return {(rank, i) for rank, i in begun if all(members[key] <= begun for key in programs[rank][i].exchanges)}

    def can_begin(rank, i, begun, done):
        program, queues = programs[rank], queue_of[rank]
        start = program[i]
        queue = [j for j in range(i) if queues[program[j].stream] == queues[start.stream]]
        waits = {(rank, j) for j in (*start.after, *(j for j in range(i) if program[j].stream == start.stream))}
        if holds:
            waits |= {(rank, j) for j in queue}
        full = room is not None and start.exchanges and sum(r == rank for r, _ in begun - done) >= room
        return waits <= done and {(rank, j) for j in queue} <= begun and not full

    nearest, seen, left = None, set(), [frozenset()]
    while left:
        begun = left.pop()
        if begun in seen:
            continue
        seen.add(begun)
        done = ended(begun)
        following = [begun | {one} for one in every - begun if can_begin(*one, begun, done)]
        if not following and done != every:
            nearest = len(begun) if nearest is None else min(nearest, len(begun))
        left += following
    return nearest


def drawn(draw):
    """Programs of two or three ranks with up to three exchanges on two streams, and work between them."""
    ranks = draw.choice((2, 2, 3))
    exchanges = {f"e{i}": (draw.sample(range(ranks), draw.randint(2, ranks)), draw.choice("ab")) for i in range(3)}
    programs = {}
    for rank in range(ranks):
        program = []
        own = [name for name, (members, _) in exchanges.items() if rank in members]
        draw.shuffle(own)
        for name in own:
            after = (draw.randrange(len(program)),) if program and draw.random() < 0.5 else ()
            if draw.random() < 0.4:
                program.append(KernelStart("c", after))
            program.append(KernelStart(exchanges[name][1], after, (name,)))
        programs[rank] = program
    return programs


def test_every_answer_is_that_of_a_search_without_shortcuts():
    draw, answers = random.Random(7), set()
    for _ in range(60):
        programs = drawn(draw)
        queue_of = draw.choice([one_queue(programs), own_queues(programs), next(all_queues(programs, 2))])
        room, holds = draw.choice((None, 1, 1, 2)), draw.random() < 0.3
        found = find_stuck(programs, queue_of, room=room, holds=holds)
        expected = stuck_without_shortcuts(programs, queue_of, room, holds)
        assert (None if found is None else len(found.begun)) == expected, (programs, queue_of, room, holds)
        answers.add((room, found is None))
        if room is None and not holds and find_stuck(programs, one_queue(programs)) is None:
            assert found is None  # one queue is the strictest
    assert len(answers) == 6


def test_all_queues_are_tried_and_a_search_that_grows_too_large_says_so():
    programs = {0: [KernelStart(name) for name in "abc"], 1: [KernelStart("a")]}
    assert [len(list(all_queues(programs, k))) for k in (1, 2, 3, 8)] == [1, 3, 1, 1]
    assert streams_of(programs[0]) == ["a", "b", "c"]
    with pytest.raises(Undecided):
        find_stuck(OPPOSITE, own_queues(OPPOSITE), room=1, most_states=1)


# -- from the calls of a trace --

PAIR = (0, 1)


def message(op, peer, ticket=-1, channel="down"):
    return Call(op, PAIR, "bfloat16", 4, channel, peer, ticket=ticket)


def collective(channel, group=PAIR):
    return Call("all_reduce", group, "float32", 8, channel)


def of_pair(*programs):
    calls = dict(enumerate(programs))
    return check_streams(calls, {rank: [] for rank in calls}, 8)


def test_a_receive_that_is_posted_ahead_needs_room_beside_the_exchange_after_it():
    early = of_pair(
        [message("irecv", 1), collective("dp"), message("wait", 1, 0)],
        [collective("dp"), message("isend", 0), message("sent", 0, 0)],
    )
    assert (early.one_by_one, early.room, early.stuck) == (False, 2, None)
    late = of_pair(
        [collective("dp"), message("irecv", 1), message("wait", 1, 0)],
        [collective("dp"), message("isend", 0), message("sent", 0, 0)],
    )
    assert (late.one_by_one, late.room) == (True, 1)
    waits_first = of_pair(
        [message("irecv", 1), message("wait", 1, 0), collective("dp")],
        [collective("dp"), message("isend", 0), message("sent", 0, 0)],
    )
    assert waits_first.room is None and waits_first.stuck is not None
    assert any("work after irecv of 4 bfloat16 from rank 1" in line for line in waits_first.stuck.circle)


def test_a_batch_of_messages_is_one_kernel_and_ranks_that_are_not_played_are_in_time():
    def swap(peer):
        there = Call("irecv", PAIR, "bfloat16", 4, "ring", peer, joined=True)
        return [message("isend", peer, channel="ring"), there, message("wait", peer, 0, "ring")]

    programs = programs_of({0: swap(1), 1: swap(0)})
    assert [len(start.exchanges) for start in programs[0]] == [0, 2, 0]
    assert find_stuck(programs, one_queue(programs), holds=True) is None
    apart = programs_of({0: swap(1), 1: [message("recv", 0, channel="ring"), *swap(0)[:1]]})
    assert find_stuck(apart, one_queue(apart)) is None  # the messages of a batch travel side by side
    in_turn = [message("send", 1, channel="ring"), message("recv", 1, channel="ring")]
    apart = programs_of({0: in_turn, 1: [message("send", 0, channel="ring"), message("recv", 0, channel="ring")]})
    assert find_stuck(apart, one_queue(apart)) is not None
    alone = programs_of({0: [collective("tp", (0, 5)), *swap(1)]})
    assert find_stuck(alone, one_queue(alone), holds=True) is None


def test_communicators_of_a_step_are_counted_by_operation_and_peer():
    step = [collective("tp"), collective("tp"), message("isend", 1), message("sent", 1, 0), message("irecv", 1)]
    made = [("tp", "mesh_tp", PAIR, "tp"), ("down", "pipeline_channel", PAIR, "pp"), ("w", "world", PAIR, "tp")]
    found = communicators_of([*made, ("alone", "mesh_alone", (0,), "")], step)
    assert found == [
        Communicator("mesh_tp", "tp", 2, {"all_reduce": 2}),
        Communicator("pipeline_channel", "pp", 2, {"isend to 1": 1, "irecv from 1": 1}),
        Communicator("world", "tp", 2, {}),
    ]
    checked = check_streams({0: step[:2]}, {0: found}, 2, ["FSDP2 gathers"])
    assert checked.streams == {0: ["compute", "FSDP2 gathers", "mesh_tp tp", "pipeline_channel pp"]}
    assert checked.shared and checked.most == 4 and checked.room == 1
    assert checked.enough == 2 and checked.facts()["queues"] == 2 and checked.facts()["stuck"] is None
