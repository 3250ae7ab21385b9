"""FLOPs of kernels that PyTorch counts otherwise or not at all, and all-to-alls as calls."""

import pytest

torch = pytest.importorskip("torch")

from ingot.rehearse.dryrun.fake import FakeProgram  # noqa: E402
from ingot.rehearse.dryrun.tracker import Tracker  # noqa: E402

aten = torch.ops.aten
PAIRS = 2 * 4 * 32 * 32  # batch, heads, queries, keys


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_attention_on_cuda_count_a_triangle_as_half(causal):
    with FakeProgram() as fakes, Tracker(fakes) as tracker:
        q = torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, requires_grad=True)
        aten._scaled_dot_product_flash_attention(q, q, q, 0.0, causal)[0].sum().backward()
        aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, causal)[0].sum().backward()
    forward = 2 * 2 * PAIRS * 16 / (2 if causal else 1)
    for kernel in ("flash", "efficient"):
        assert tracker.flops[f"_scaled_dot_product_{kernel}_attention"] == forward
        assert tracker.flops[f"_scaled_dot_product_{kernel}_attention_backward"] == 2.5 * forward


def test_grouped_products_count_rows_times_one_matrix_each():
    with FakeProgram() as fakes, Tracker(fakes) as tracker:
        rows = torch.empty(64, 32, dtype=torch.bfloat16, requires_grad=True)
        matrices = torch.empty(4, 32, 16, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.empty(4, dtype=torch.int32)
        product = torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
        product.backward(torch.empty_like(product))
    assert tracker.flops["_grouped_mm"] == 3 * 2 * 64 * 32 * 16


def _exchanges(rank, world):
    import torch.distributed as dist

    from ingot.trainer.mesh.collectives import finish, start_all_to_all

    group = dist.group.WORLD
    assert group is not None
    rows = torch.ones(6, 5)
    with Tracker() as tracker:
        dist.all_to_all_single(torch.empty_like(rows), rows)
        finish(start_all_to_all(rows, [3, 3], [3, 3], group))
        sent, received = ([2, 4], [2, 1]) if rank == 0 else ([1, 5], [4, 5])
        finish(start_all_to_all(rows, received, sent, group))
    return [(call.op, call.elements, call.own) for call in tracker.calls]


def test_all_to_alls_tell_what_stays_where_parts_are_unequal(fork_ranks):
    found = fork_ranks(_exchanges, 2)
    even = [("all_to_all", 30, -1)] * 2
    assert found[0] == [*even, ("all_to_all", 30, 10)]
    assert found[1] == [*even, ("all_to_all", 30, 25)]
