"""Kernels of attention. The arguments of those on CUDA are checked without a GPU: tensors that claim to be on a GPU,
and kernels that read memory like the real ones. tests/gpu checks the numbers."""

from types import SimpleNamespace

import pytest
import torch
from tests.expect import named, refused

from ingot.trainer.attend import kernels
from ingot.trainer.attend.kernels import (
    attend_by_products,
    attend_by_products_backward,
    attend_part,
    attend_part_backward,
    bias_of,
    require_kernels,
)


class OnGpu(torch.Tensor):
    is_cuda = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def test_the_backward_of_some_rows_gets_their_normalizers_side_by_side(monkeypatch):
    """The half of a zigzag rank's queries. The kernel takes the address of the log-sum-exps, not their strides."""
    given = []

    def kernel(grad, q, k, v, out, lse, *rest):
        given.append(torch.as_strided(lse, q.shape[:3], (q.shape[1] * q.shape[2], q.shape[2], 1)))
        return q, k, v

    monkeypatch.setattr(kernels, "_kernels", SimpleNamespace(flash_backward=kernel))
    q, k = (torch.zeros(2, heads, 6, 8, dtype=torch.bfloat16).as_subclass(OnGpu) for heads in (4, 2))
    lse_BNT = torch.arange(2 * 4 * 12.0).view(2, 4, 12)[:, :, 6:]
    attend_part_backward(q, q, q, lse_BNT, k, k, causal=False, bias=None)
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


def tensors_of(tokens, keys):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, tokens, 8), (2, 2, keys, 8), (2, 2, keys, 8), (2, 4, tokens, 8)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_query_without_keys_adds_nothing():
    q, k, v, grad = tensors_of(5, 5)
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    seen[..., 2, :] = False
    bias = bias_of(seen, q.dtype)
    out, lse = attend_part(q, k, v, causal=False, bias=bias, without_keys=True)
    assert torch.equal(out[:, :, 2], torch.zeros(2, 4, 8).double()) and (lse[:, :, 2] == -torch.inf).all()
    assert lse[:, :, [0, 1, 3, 4]].isfinite().all()
    whole = torch.zeros_like(lse)  # of the attention to all keys, which is finite
    dq, dk, dv = attend_part_backward(grad, q, out, whole, k, v, causal=False, bias=bias)
    assert not dq[:, :, 2].any() and dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("limit", [2**24, 40])
@pytest.mark.parametrize("what", ["all", "causal", "bias", "causal and bias"])
def test_products_equal_the_kernel(monkeypatch, what, limit):
    """For float64 on a GPU. The kernel on a CPU takes a bias in addition to `causal`, which spares it later keys."""
    monkeypatch.setattr(kernels, "_SCORES", limit)  # 40: one query at a time
    q, k, v, grad = tensors_of(7, 7 if "causal" in what else 9)
    seen = (torch.rand(2, 1, 7, k.shape[2], generator=torch.Generator().manual_seed(1)) < 0.7) | torch.eye(
        7, k.shape[2], dtype=torch.bool
    )
    form = {"causal": "causal" in what, "bias": bias_of(seen, q.dtype) if "bias" in what else None}
    out, lse = attend_part(q, k, v, **form)
    equal(attend_by_products(q, k, v, **form), (out, lse))
    expected = attend_part_backward(grad, q, out, lse, k, v, **form)
    equal(attend_by_products_backward(grad, q, out, lse, k, v, **form), expected)


def test_a_gpu_without_a_kernel_gets_products(monkeypatch):
    monkeypatch.setattr(kernels, "_kernels", None)
    q, k, v, grad = (x.as_subclass(OnGpu) for x in tensors_of(3, 3))
    out, lse = attend_part(q, k, v, causal=True, bias=None)
    assert [x.shape for x in attend_part_backward(grad, q, out, lse, k, v, causal=True, bias=None)] == [
        q.shape, k.shape, v.shape,
    ]  # fmt: skip
