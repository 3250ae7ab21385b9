"""The arguments of a ring's CUDA kernels, checked without a GPU: tensors that claim to be on a GPU, and a kernel that
reads memory like the real one. tests/gpu checks the numbers."""

from types import SimpleNamespace

import pytest
import torch
from tests.expect import named, refused

from ingot.trainer.parallel import flash
from ingot.trainer.parallel.flash import require_kernels


class OnGpu(torch.Tensor):
    is_cuda = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def test_the_backward_of_some_rows_gets_their_normalizers_side_by_side(monkeypatch):
    """The half of a zigzag rank's queries. The kernel takes the address of the log-sum-exps, not their strides."""
    given = []

    def kernel(grad, q, k, v, out, lse, *rest):
        given.append(torch.as_strided(lse, q.shape[:3], (q.shape[1] * q.shape[2], q.shape[2], 1)))
        return q, k, v

    monkeypatch.setattr(flash, "_kernels", SimpleNamespace(flash_backward=kernel))
    q, k = (torch.zeros(2, heads, 6, 8, dtype=torch.bfloat16).as_subclass(OnGpu) for heads in (4, 2))
    lse_BNT = torch.arange(2 * 4 * 12.0).view(2, 4, 12)[:, :, 6:]
    flash.attend_part_backward(q, q, q, lse_BNT, k, k, causal=False, mask=None)
    assert torch.equal(given[0], lse_BNT)


@pytest.mark.parametrize("device, dtype, head_dim", [("cpu", torch.float64, 4), ("cuda", torch.bfloat16, 192)])
def test_rings_run_where_there_are_kernels(device, dtype, head_dim):
    require_kernels(torch.device(device), dtype, head_dim)


@pytest.mark.parametrize(
    "dtype, head_dim, code, nearest",
    [
        (torch.float64, 64, "E-RING-PRECISION", "bf16"),
        (torch.bfloat16, 84, "E-RING-HEAD-DIM", "80 or 88"),
        (torch.float32, 4, "E-RING-HEAD-DIM", "8"),
        (torch.bfloat16, 320, "E-RING-HEAD-DIM", "256"),
    ],
)
def test_rings_without_a_kernel_are_refused(dtype, head_dim, code, nearest):
    with refused(code) as error:
        require_kernels(torch.device("cuda"), dtype, head_dim)
    assert named([error.value.fix], nearest, "ulysses")
