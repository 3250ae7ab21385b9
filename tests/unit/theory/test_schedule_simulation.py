"""Simulated tables against published bubbles."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import calls_of, refused

from ingot.theory.schedule import (
    NAMES,
    PUBLISHED,
    Action,
    Chain,
    ScheduleTable,
    build_table,
    pair_seconds,
    schedule_problems,
    simulate,
    timeline_text,
    turns,
)

LEGAL = [(2, 4), (3, 6), (4, 8), (4, 16), (6, 12), (8, 32)]


def run(name, pp, micro_batches, f, i, w, each=0, **options):
    table = build_table(name, pp, micro_batches, each)
    return simulate(table, forward=f, backward_input=i, backward_weight=w, **options)


def bubble(timeline, of="step"):
    """Idle time of a rank; all have the same work."""
    assert max(timeline.busy) == pytest.approx(min(timeline.busy))
    return (timeline.step_time if of == "step" else timeline.span) - timeline.busy[0]


times = st.floats(0.25, 4.0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved", "looped_bfs"]), st.sampled_from(LEGAL), times, times, times)
def test_whole_backward_formulas_are_exact(name, shape, f, i, w):
    pp, micro_batches = shape
    for each in (0, 4) if name in ("interleaved", "looped_bfs") else (0,):
        timeline = run(name, pp, micro_batches, f, i, w, each)
        assert bubble(timeline) == pytest.approx(PUBLISHED[name].bubble(pp, f, i, w, f + i + w))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_their_bubble_is_the_same_with_few_micro_batches(name, micro_batches):
    assert bubble(run(name, 4, micro_batches, 1, 1, 1)) == 9
    assert bubble(run("looped_bfs", 4, micro_batches, 1, 1, 1)) > 9


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["zb_h1", "zb_h2", "interleaved_zb"]), st.sampled_from(LEGAL), times, times, times)
def test_zero_bubble_formulas_are_exact_where_they_say_so_and_bounds_elsewhere(name, shape, f, i, w):
    # interleaved_zb has no published bubble; counted from the table it is ZB-H1's, of one of the v stages.
    pp, micro_batches = shape
    published = PUBLISHED["zb_h1" if name == "interleaved_zb" else name]
    formula = published.bubble(pp, f, i, w, f + i + w)
    measured = bubble(run(name, pp, micro_batches, f, i, w), published.of)
    if w <= f and (name != "zb_h2" or 2 * w <= f + i):
        assert measured == pytest.approx(formula, abs=1e-9)
    assert measured >= max(formula, 0) - 1e-9


@pytest.mark.parametrize(("pp", "micro_batches"), LEGAL)
def test_zero_bubbles_are_zero_within_a_rank_and_one_pass_of_forwards_over_the_step(pp, micro_batches):
    for name in ("zb_v", "zb_h2"):
        enough = max(micro_batches, 2 * pp - 1)
        timeline = run(name, pp, enough, 1, 1, 1)
        assert bubble(timeline, "span") == PUBLISHED[name].bubble(pp, 1, 1, 1, 3) == 0
        # Ranks start one after the other and all wait for the last before the optimizer step.
        assert bubble(timeline) == pp - 1
    assert bubble(run("zb_v", pp, 2 * pp, 1, 1.5, 0.5), "span") > 0


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 16), (6, 24), (8, 32)])
def test_dualpipe_formula_is_exact_with_equal_times_and_a_bound_for_faster_pairs(name, pp, micro_batches):
    published = PUBLISHED[name]
    assert bubble(run(name, pp, micro_batches, 1, 1, 1, overlapped=3)) == published.bubble(pp, 1, 1, 1, 3)
    for pair in (2.0, 2.4, 2.8):
        timeline = run(name, pp, micro_batches, 1, 1, 1, overlapped=pair)
        assert timeline.step_time - max(timeline.busy) <= published.bubble(pp, 1, 1, 1, pair) + 1e-9
    # One after the other, a pair's forward is sent on before its backward starts.
    assert (
        run(name, pp, micro_batches, 1, 1, 1).step_time <= run(name, pp, micro_batches, 1, 1, 1, overlapped=3).step_time
    )


def layer_chains(layers, attention, experts, exchange):
    """A forward of layers with experts, and its backward, which takes twice as long between the same exchanges."""
    parts = [attention, experts] * layers + [0.0]
    exchanges = [exchange] * (2 * layers)
    return Chain(parts, exchanges), Chain([2 * part for part in reversed(parts)], exchanges)


def test_pairs_alternate_at_exchanges_and_the_longer_one_goes_on_alone():
    assert list(turns(2, 2)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert list(turns(0, 2)) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert list(turns(2, 0)) == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_the_time_of_a_pair_by_hand():
    forward, backward = layer_chains(1, 4, 2, 1)
    assert (forward.seconds, backward.seconds) == (8, 14)
    # F attention 0-4, rows 4-5; B has nothing to compute before its first exchange, 5-6, so F waits for its rows.
    # F experts 5-7, results 7-8; B experts 7-11, gradients 11-12; F ends at 11; B attention 12-20.
    assert pair_seconds(forward, backward) == 20
    # Long exchanges are one after the other on the link.
    assert pair_seconds(Chain([1, 1], [10]), Chain([1, 1], [10])) == 1 + 10 + 1 + 9 + 1
    assert pair_seconds(Chain([3], []), Chain([2], [])) == 5


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), times, times, times, st.booleans())
def test_a_pair_hides_exchanges_and_nothing_else(layers, attention, experts, exchange, dense):
    forward, backward = layer_chains(layers, attention, experts, exchange)
    forward = Chain([sum(forward.computes)], []) if dense else forward
    found, computes = pair_seconds(forward, backward), sum(forward.computes) + sum(backward.computes)
    sent = sum(forward.exchanges) + sum(backward.exchanges)
    least = max(computes, sent, forward.seconds, backward.seconds)
    assert least - 1e-9 <= found <= forward.seconds + backward.seconds + 1e-9
    if not dense and exchange <= min(attention, experts):
        # All exchanges have a part of the other beside them, but the first and the last of the backward.
        assert found <= computes + 2 * exchange + 1e-9


def test_the_simulation_takes_the_time_of_each_pair():
    chains = [layer_chains(layers, 1.0, 0.5, 0.75) for layers in (1, 1, 1, 2, 2, 1, 1, 1)]
    f, b = ([chain.seconds for chain in way] for way in zip(*chains, strict=True))
    table = build_table("dualpipe_v", 4, 16)

    def together(forward, backward):
        return pair_seconds(chains[forward.stage][0], chains[backward.stage][1])

    halves = {"forward": f, "backward_input": [x / 2 for x in b], "backward_weight": [x / 2 for x in b]}
    apart, paired = (simulate(table, **halves, overlapped=how) for how in (None, together))
    assert paired.step_time < 0.85 * apart.step_time
    for rank, positions in enumerate(table.overlaps):
        for i in positions:
            expected = together(*table.rows[rank][i : i + 2])
            assert paired.ends[rank][i] - paired.starts[rank][i] == pytest.approx(expected)
            assert paired.starts[rank][i] == paired.starts[rank][i + 1]


def test_order_of_the_schedules_at_4_ranks_and_8_micro_batches():
    # The same layers on a rank: half the time for each of two stages.
    step = {}
    for name in NAMES:
        t = 0.5 if build_table(name, 4, 8).stages == 8 and name != "dualpipe" else 1.0
        step[name] = run(name, 4, 8, t, t, t).bubble_fraction
    assert step["gpipe"] == step["1f1b"] == pytest.approx(9 / 33)
    assert step["interleaved"] == step["looped_bfs"] == pytest.approx(4.5 / 28.5)
    assert step["zb_h1"] == step["zb_h2"] == pytest.approx(3 / 27)
    assert step["interleaved_zb"] == step["zb_v"] == step["dualpipe_v"] == pytest.approx(1.5 / 25.5)
    assert step["1f1b"] > step["interleaved"] > step["zb_h1"] > step["zb_v"]


def test_interleaving_divides_the_bubble_by_the_stages():
    whole = bubble(run("1f1b", 4, 8, 1.2, 1.2, 1.2))
    for each in (2, 3, 4):
        t = 1.2 / each
        assert bubble(run("interleaved", 4, 8, t, t, t, each)) == pytest.approx(whole / each)


def test_timeline_of_two_ranks_by_hand():
    timeline = run("1f1b", 2, 2, 1, 1, 1)
    assert timeline.starts == ((0, 1, 4, 7), (1, 2, 4, 5))
    assert timeline.ends == ((1, 2, 6, 9), (2, 4, 5, 7))
    assert (timeline.step_time, timeline.span, timeline.busy) == (9, 9, (6, 6))
    assert timeline.bubble_fraction == pytest.approx(1 / 3)
    assert timeline.peak_in_flight == (2, 1)


def test_sends_delay_the_reader_and_without_overlap_the_sender():
    beside = run("1f1b", 2, 2, 1, 1, 1, send=0.25)
    assert beside.starts == ((0, 1, 4.5, 7.5), (1.25, 2.25, 4.25, 5.25))
    waiting = run("1f1b", 2, 2, 1, 1, 1, send=0.25, overlap_sends=False)
    assert waiting.starts == ((0, 1.25, 4.5, 7.75), (1.25, 2.25, 4.5, 5.5))
    assert waiting.busy == beside.busy == (6, 6)
    one_rank = ScheduleTable(
        "v", 2, 1, (0, 0), ((*(Action("F", s, 0) for s in (0, 1)), *(Action("B", s, 0) for s in (1, 0))),)
    )
    assert simulate(one_rank, forward=1, backward_input=1, backward_weight=1, send=9).step_time == 6


def test_stages_can_take_different_times():
    table = build_table("gpipe", 2, 4)
    timeline = simulate(table, forward=[1, 2], backward_input=[1, 2], backward_weight=[1, 3])
    assert timeline.busy == (12, 28)
    assert timeline.step_time == 1 + 28 + 2  # the slow rank never waits once it has begun
    with refused("E-SCHEDULE-TIMES", times=1, stages=2):
        simulate(table, forward=[1], backward_input=1, backward_weight=1)


def test_what_cannot_be_played_is_an_error():
    f, b = (lambda s, m: Action("F", s, m)), (lambda s, m: Action("B", s, m))
    rows = ((f(0, 0), b(0, 0)), (f(1, 0), b(1, 0)))
    stuck = ScheduleTable("stuck", 2, 1, (0, 1), (rows[0][::-1], rows[1]))
    with refused("E-SCHEDULE-UNPLAYABLE", schedule="stuck"):
        simulate(stuck, forward=1, backward_input=1, backward_weight=1)
    paired = ScheduleTable("paired", 2, 1, (0, 1), rows, overlaps=((0,), ()))
    assert simulate(paired, forward=1, backward_input=1, backward_weight=1).step_time == 6
    with refused("E-SCHEDULE-OVERLAP", schedule="paired"):
        simulate(paired, forward=1, backward_input=1, backward_weight=1, overlapped=2)


@pytest.mark.parametrize("name", ["interleaved", "zb_v", "dualpipe_v"])
def test_large_tables_take_time_in_proportion(name):
    small, large = (calls_of(lambda m=m: run(name, 16, m, 1, 1, 1)) for m in (32, 128))
    assert large < 1.2 * (128 / 32) * small


# --- text ---


def test_a_timeline_can_be_read():
    assert timeline_text(build_table("1f1b", 2, 3), 60).splitlines() == [
        "rank 0 F0--F1--........B0------F2--B1------....B2------",
        "rank 1 ....F0--B0------F1--B1------F2--B2------........",
    ]


def test_second_stages_are_in_lower_case_and_pairs_are_joined():
    timeline = run("dualpipe_v", 2, 4, 1, 1, 1, overlapped=2.5)
    lines = timeline_text(timeline, 120).splitlines()
    assert "F2&b0" not in lines[1] and "f2&B0" in lines[1]
    assert lines[0].count("&") == len(timeline.table.overlaps[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [20, 100, 160])
def test_lines_fit_and_are_plain(name, width):
    for pp, micro_batches in ((2, 4), (4, 8), (8, 64)):
        if not list(schedule_problems(name, pp, micro_batches)):
            text = timeline_text(build_table(name, pp, micro_batches), width)
            assert text.isascii() and len(text.splitlines()) == pp
            assert max(map(len, text.splitlines())) <= width


def test_busy_columns_are_busy_times():
    timeline = run("zb_h1", 4, 8, 1, 1, 1)
    line = timeline_text(timeline, 7 + 27 * 4).splitlines()[0][7:]
    assert len(line) == 27 * 4 and line.count(".") == 4 * 3
    for label in ("F7--", "I7--", "W7--"):
        assert line.count(label) == 1
