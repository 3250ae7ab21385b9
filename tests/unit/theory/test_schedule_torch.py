"""Our tables against those of torch.distributed.pipelining, where it has the same schedule."""

from types import SimpleNamespace

import pytest

from ingot.theory.schedule import Action, ScheduleTable, build_table, check_table, simulate

# Not 1F1B: its order is printed with forwards of micro-batches 1 to M on the last rank (torch 2.13).
SAME = {
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


@pytest.fixture(scope="module")
def get_schedule_class():
    pytest.importorskip("torch")
    try:
        from torch.distributed.pipelining.schedules import get_schedule_class
    except ImportError:
        pytest.skip("torch's pipeline schedules are not where they were")
    return get_schedule_class


def torch_table(get_schedule_class, name, ours: ScheduleTable):
    """torch's table of the same shape. Its constructor reads a few attributes of the stages only."""
    stages = [
        SimpleNamespace(num_stages=ours.stages, group_size=ours.ranks, group_rank=0, stage_index=s, submod=None,
                        has_backward=True, is_first=s == 0, is_last=s == ours.stages - 1)
        for s in ours.stages_of(0)
    ]  # fmt: skip
    order = get_schedule_class(SAME[name])(stages, ours.micro_batches, loss_fn=None).pipeline_order
    rows, overlaps = [], []
    for rank in range(ours.ranks):
        row, pairs = [], []
        for entry in order[rank]:
            parts = [] if entry is None else entry.sub_actions or [entry]
            if len(parts) > 1:
                pairs.append(len(row))
            row += [
                Action(part.computation_type.value, part.stage_index, part.microbatch_index)
                for part in parts
                if part.computation_type.value in "FBIW"
            ]
        rows.append(tuple(row))
        overlaps.append(tuple(pairs))
    return ScheduleTable(
        name, ours.stages, ours.micro_batches, ours.rank_of_stage, tuple(rows), overlaps=tuple(overlaps)
    )


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_same_actions_and_the_same_step_time(get_schedule_class, name, pp, micro_batches):
    ours = build_table(name, pp, micro_batches)
    theirs = torch_table(get_schedule_class, name, ours)
    check_table(theirs)
    for mine, other in zip(ours.rows, theirs.rows, strict=True):
        assert len(mine) == len(other) and set(mine) == set(other)
    assert ours.overlaps in ((), theirs.overlaps)
    for f, i, w in ((1, 1, 1), (1, 1.25, 0.75), (1, 0.75, 1.25)):
        for options in ({}, {"send": 0.125}, {"overlapped": 0.875 * (f + i + w)}):
            times = {"forward": f, "backward_input": i, "backward_weight": w, **options}
            assert simulate(ours, **times).step_time == pytest.approx(simulate(theirs, **times).step_time), times


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "interleaved_zb"])
def test_three_stages_on_a_rank(get_schedule_class, name):
    ours = build_table(name, 4, 8, 3)
    theirs = torch_table(get_schedule_class, name, ours)
    assert [set(row) for row in ours.rows] == [set(row) for row in theirs.rows]
    times = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    assert simulate(ours, **times).step_time == simulate(theirs, **times).step_time
