"""Tables of pipeline schedules: complete, playable, with the messages that untagged channels need."""

import random
from collections import Counter

import pytest
from tests.expect import refused

from ingot.schema import parallel
from ingot.theory.schedule import (
    NAMES,
    Action,
    Channel,
    Message,
    ScheduleTable,
    build_table,
    channel_order,
    check_table,
    peak_in_flight,
    schedule_problems,
)

PLAYED = parallel.PipelineSchedule.__args__


def tables(name, ranks=range(2, 9), stages=(0, 3)):
    for pp in ranks:
        for micro_batches in {1, 3, pp - 1, pp, 2 * pp, 3 * pp + 1, 4 * pp}:
            for each in stages:
                if not list(schedule_problems(name, pp, micro_batches, each)):
                    yield build_table(name, pp, micro_batches, each)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_can_be_played(name):
    count = 0
    for table in tables(name):
        check_table(table)
        count += 1
    assert count >= 8  # dualpipe wants even ranks and 2 pp micro-batches at least


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_does_forward_and_backward_in_turn(name):
    table = build_table(name, 1, 3)
    assert table.rows == (tuple(Action(kind, 0, m) for m in range(3) for kind in ("F", "B")),)


def test_1f1b_as_megatron_draws_it():
    table = build_table("1f1b", 4, 8)
    short = ["".join(f"{a.kind}{a.micro_batch}" for a in row) for row in table.rows]
    assert short[0] == "F0F1F2F3B0F4B1F5B2F6B3F7B4B5B6B7"
    assert short[3] == "F0B0F1B1F2B2F3B3F4B4F5B5F6B6F7B7"


def test_interleaved_passes_a_group_through_all_stages_first():
    row = build_table("interleaved", 2, 4).rows[1]
    assert [(a.kind, a.stage, a.micro_batch) for a in row[:7]] == [
        ("F", 1, 0), ("F", 1, 1), ("F", 3, 0), ("B", 3, 0), ("F", 3, 1), ("B", 3, 1), ("F", 1, 2),
    ]  # fmt: skip


def test_schema_knows_the_same_schedules():
    assert set(PLAYED) == set(NAMES) - {"zb_h2", "zb_2p", "dualpipe"}
    for name in PLAYED:
        table = build_table(name, 4, 8)
        kinds = {action.kind for row in table.rows for action in row}
        assert ("I" in kinds) == (name in parallel.SPLIT_BACKWARD)
        assert (table.stages == 8) == (name in parallel.TWO_STAGES)
        assert (table.stages_of(1) == (1, 6)) == (name in parallel.V_SHAPED)


def test_bidirectional_dualpipe_has_two_copies_of_the_model():
    table = build_table("dualpipe", 4, 8)
    assert table.copies == 2 and table.rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [table.before(s) for s in (0, 4, 5)] == [None, None, 4]
    assert [table.after(s) for s in (3, 4, 7)] == [None, 5, None]
    assert table.micro_batches_of(3) == range(4) and table.micro_batches_of(4) == range(4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 4, 8), "no pipeline schedule"),
        (("1f1b", 0, 8), "at least 1"),
        (("interleaved", 4, 10), "use 8 or 12"),
        (("interleaved_zb", 4, 3), "use 4$"),
        (("dualpipe_v", 4, 7), "use 8$"),
        (("dualpipe", 4, 9), "use 8 or 10"),
        (("dualpipe", 3, 8), "use 2 or 4"),
        (("gpipe", 4, 8, 2), "use 0 or 1"),
        (("zb_v", 4, 8, 3), "use 0 or 2"),
        (("interleaved", 4, 8, 1), "use 2, or 1f1b"),
        (("1f1b", 1, 8, 2), "no effect with pp=1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_legal_values(arguments, message):
    with refused("E-SCHEDULE-ILLEGAL", schedule=arguments[0], pp=arguments[1], micro_batches=arguments[2]):
        build_table(*arguments)
    (problem,) = schedule_problems(*arguments)
    assert problem.endswith(message[:-1]) if message.endswith("$") else message in problem


@pytest.mark.parametrize("name", NAMES)
def test_nearest_legal_values_are_legal(name):
    for pp in range(2, 9):
        for micro_batches in range(1, 3 * pp):
            for problem in schedule_problems(name, pp, micro_batches):
                key, found = problem.split(":")[0].split("=")
                for value in problem.split("use ")[1].split(" or "):
                    changed = {"pp": pp, "micro_batches": micro_batches, key: int(value)}
                    assert changed[key] != int(found)
                    assert not [p for p in schedule_problems(name, **changed) if p.startswith(key)]


# --- checking ---


def hand_made(rows, stages=2, micro_batches=1, rank_of_stage=(0, 1)):
    rows = tuple(tuple(Action(word[0], int(word[1]), int(word[2])) for word in row.split()) for row in rows)
    return ScheduleTable("hand-made", stages, micro_batches, rank_of_stage, rows)


def test_a_whole_and_a_split_backward_by_hand_are_fine():
    check_table(hand_made(["F00 B00", "F10 I10 W10"]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["F00", "F10 B10"], "has F instead of"),
        (["F00 B00 B00", "F10 B10"], "has FBB instead of"),
        (["F00 I00", "F10 B10"], "has FI instead of"),
        (["F00 I00 W00 B00", "F10 B10"], "has FBIW instead of"),
        (["B00 F00", "F10 B10"], "rank 0: B of micro-batch 0 on stage 0 comes before what it needs"),
        (["F00 W00 I00", "F10 B10"], "W of micro-batch 0 on stage 0 comes before"),
        (["F00 B00 F10", "F10 B10"], "F of micro-batch 0 on stage 1 does not belong to this rank"),
        (["F00 B00 F01 B01", "F10 B10"], "micro-batch 1 on stage 0 does not belong to this rank"),
    ],
)
def test_wrong_rows_are_found(rows, message):
    with refused("E-SCHEDULE-UNPLAYABLE", schedule="hand-made") as error:
        check_table(hand_made(rows))
    assert any(message in problem for problem in error.value.facts["problems"])


def test_stages_of_one_rank_have_an_order():
    check_table(hand_made(["F00 F10 B10 B00"], rank_of_stage=(0, 0)))
    for row in ("F10 F00 B10 B00", "F00 F10 B00 B10"):
        with refused("E-SCHEDULE-UNPLAYABLE"):
            check_table(hand_made([row], rank_of_stage=(0, 0)))


def test_ranks_that_wait_for_each_other_are_found():
    table = hand_made(["F00 B00 F01 B01", "F10 F11 B10 B11"], micro_batches=2)
    with refused("E-SCHEDULE-UNPLAYABLE") as error:
        check_table(table)
    first, second = table.rows[0][1], table.rows[1][1]
    assert error.value.facts["problems"] == [
        f"rank 0 waits forever before {first}", f"rank 1 waits forever before {second}"
    ]  # fmt: skip


# --- messages ---


def test_channels_of_a_v():
    order = channel_order(build_table("zb_v", 2, 2))
    assert set(order) == {Channel(kind, *way) for kind in ("activation", "gradient") for way in ((0, 1), (1, 0))}
    assert order[Channel("activation", 0, 1)] == (Message(1, 0), Message(1, 1))
    assert order[Channel("activation", 1, 0)] == (Message(3, 0), Message(3, 1))
    assert order[Channel("gradient", 0, 1)] == (Message(2, 0), Message(2, 1))


def test_order_is_the_senders():
    table = hand_made(["F00 F01 B01 B00", "F11 F10 B11 B10"], micro_batches=2)
    check_table(table)
    order = channel_order(table)
    assert order[Channel("activation", 0, 1)] == (Message(1, 0), Message(1, 1))
    assert order[Channel("gradient", 1, 0)] == (Message(0, 1), Message(0, 0))


@pytest.mark.parametrize("name", NAMES)
def test_each_stage_boundary_is_crossed_once_each_way(name):
    table = build_table(name, 4, 8)
    expected = Counter()
    for stage in range(table.stages):
        after = table.after(stage)
        if after is not None and table.rank_of_stage[after] != table.rank_of_stage[stage]:
            here, there = table.rank_of_stage[stage], table.rank_of_stage[after]
            for m in table.micro_batches_of(stage):
                expected[Channel("activation", here, there), Message(after, m)] += 1
                expected[Channel("gradient", there, here), Message(stage, m)] += 1
    assert Counter((c, m) for c, messages in channel_order(table).items() for m in messages) == expected


def play_lazily(table, rng):
    """Play the ranks in random order and return (whether all ranks finish, the most receives posted ahead of need).

    Sends never wait; before an action, receives are posted in the sender's order up to the message that the action
    needs; only messages that were posted and sent are available.
    """
    order = channel_order(table)
    sent = dict.fromkeys(order, 0)
    posted = dict.fromkeys(order, 0)
    used = dict.fromkeys(order, 0)
    position, early = [0] * table.ranks, 0
    running = list(range(table.ranks))
    while running:
        rng.shuffle(running)
        moved = False
        for rank in running:
            action = table.rows[rank][position[rank]]
            source = table.source_of(action)
            if source is not None and table.rank_of_stage[source] != rank:
                kind = "activation" if action.kind == "F" else "gradient"
                channel = Channel(kind, table.rank_of_stage[source], rank)
                place = order[channel].index(Message(action.stage, action.micro_batch))
                early = max(early, place - used[channel])
                posted[channel] = max(posted[channel], place + 1)
                if sent[channel] <= place:
                    continue
                used[channel] += 1
            reader = {"F": table.after, "W": lambda stage: None}.get(action.kind, table.before)(action.stage)
            if reader is not None and table.rank_of_stage[reader] != rank:
                kind = "activation" if action.kind == "F" else "gradient"
                channel = Channel(kind, rank, table.rank_of_stage[reader])
                assert order[channel][sent[channel]] == Message(reader, action.micro_batch)
                sent[channel] += 1
            position[rank] += 1
            moved = True
        if not moved:
            return False, early
        running = [rank for rank in running if position[rank] < len(table.rows[rank])]
    assert sent == posted == used == {channel: len(messages) for channel, messages in order.items()}
    return True, early


@pytest.mark.parametrize("name", NAMES)
def test_lazy_receives_never_wait_for_ever_and_come_in_the_order_of_use(name):
    rng = random.Random(0)
    for table in tables(name, ranks=(2, 3, 4, 5, 8)):
        assert play_lazily(table, rng) == (True, 0)


def test_the_lazy_player_sees_a_deadlock():
    table = hand_made(["F00 B00 F01 B01", "F10 F11 B10 B11"], micro_batches=2)
    assert play_lazily(table, random.Random(0))[0] is False


# --- memory ---


def test_activations_in_flight_are_those_of_the_papers():
    # In units of one stage and one micro-batch; P = 4, 16 micro-batches.
    peaks = {name: peak_in_flight(build_table(name, 4, 16)) for name in NAMES}
    assert peaks["gpipe"] == (16,) * 4
    assert peaks["1f1b"] == (4, 3, 2, 1)
    assert peaks["interleaved"] == (11, 9, 7, 5)  # 2(P-r-1) + (v-1)P + 1
    assert peaks["zb_h1"] == (4,) * 4  # P: not above 1F1B's first rank
    assert peaks["zb_h2"] == (7,) * 4  # 2P-1
    assert peaks["zb_v"] == (8,) * 4  # 2P halves: as 1F1B's first rank
    assert peaks["dualpipe_v"] == (9,) * 4  # stages + 1
    assert peaks["dualpipe"] == (5,) * 4  # P + 1
