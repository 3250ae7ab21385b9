"""Attention of one block of queries to one block of keys, as a part of attention to more keys.

Each result comes with the logarithm of its softmax normalizers, by which partial results are merged. The backward takes
the normalizers of attention to all keys (Dao et al. 2022, appendix B). PyTorch's flash kernels do both, but the
functions that models call do not return the normalizers. Heads are grouped: a kernel reads the keys and values of a
group once for all its query heads, except the one for biases and float32 on CUDA, which gets them repeated.

Shape letters: B batch, T queries, S keys, N query heads, G key/value heads, H head_dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.errors import ConfigError
from ingot.theory.rules.nearest import nearest
from ingot.trainer.torch_private import attention_kernels

_kernels = attention_kernels()
_HALF = (torch.bfloat16, torch.float16)
_CUDA_HEAD_DIMS = range(8, 257, 8)


def require_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Check that PyTorch has kernels for `attend_part` (always true on a CPU).

    Raises ConfigError on a GPU for float64, or for a head dim that the kernels do not support.
    """
    ulysses = 'or set parallel.context = "ulysses", which works with any attention'
    if device.type != "cuda":
        return
    if dtype == torch.float64:
        raise ConfigError(
            "E-RING-PRECISION",
            'ring attention on a GPU does not support train.precision = "fp64"',
            rule="a ring needs the log-sum-exps of attention, and GPU kernels return these up to float32 only",
            fix=f'use train.precision = "bf16", "fp16" or "fp32", {ulysses}',
            precision="fp64",
        )
    if head_dim not in _CUDA_HEAD_DIMS:
        raise ConfigError(
            "E-RING-HEAD-DIM",
            f"ring attention on a GPU does not support model.head_dim = {head_dim}",
            rule=f"its kernels take head dims that are multiples of 8, up to {_CUDA_HEAD_DIMS[-1]}",
            fix=f"use the nearest head_dim, {nearest(head_dim, _CUDA_HEAD_DIMS)}, {ulysses}",
            head_dim=head_dim,
        )


def attend_part(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, *, causal: bool, bias: Tensor | None, without_keys: bool = False
) -> tuple[Tensor, Tensor]:
    """Return results [B, N, T, H] and the log-sum-exp of the scores, [B, N, T] in float32 or wider.

    causal: T = S, and query i attends to the keys 0..i. bias: added to the scores, [B or 1, 1, T, S] in the dtype of
    the queries (`bias_of`), or None; a causal bias is -inf after the diagonal, too. without_keys: some queries attend
    to none of these keys; their results are 0 and their log-sum-exps are -inf.
    """
    if _has_no_kernel(q_BNTH):
        out, lse = attend_by_products(q_BNTH, k_BGSH, v_BGSH, causal=causal, bias=bias)
    elif not q_BNTH.is_cuda:
        out, lse = _kernels.flash_on_cpu(q_BNTH, k_BGSH, v_BGSH, 0.0, causal, attn_mask=bias)
    elif bias is None and q_BNTH.dtype in _HALF:
        out, lse, *_ = _kernels.flash(q_BNTH, k_BGSH, v_BGSH, 0.0, causal)
    else:
        k_BNSH, v_BNSH = _for_each_query_head(q_BNTH, k_BGSH), _for_each_query_head(q_BNTH, v_BGSH)
        out, lse, *_ = _kernels.efficient(q_BNTH, k_BNSH, v_BNSH, _aligned(bias, q_BNTH), True, 0.0, causal)
        lse = lse[:, :, : q_BNTH.shape[2]]  # its rows are padded
    if not without_keys or bias is None:
        return out, lse
    hidden = (bias == -torch.inf).all(-1)  # kernels return different values for such a query
    return out.masked_fill(hidden[..., None], 0), lse.masked_fill(hidden, -torch.inf)


def attend_part_backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    *,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of queries, and the gradients of its keys and values from these
    queries.

    out, lse: result and log-sum-exp of the attention of these queries to all keys, on all ranks.
    """
    if _has_no_kernel(q_BNTH):
        return attend_by_products_backward(
            grad_BNTH, q_BNTH, out_BNTH, lse_BNT, k_BGSH, v_BGSH, causal=causal, bias=bias
        )
    if not q_BNTH.is_cuda:
        return _kernels.flash_on_cpu_backward(
            grad_BNTH, q_BNTH, k_BGSH, v_BGSH, out_BNTH, lse_BNT, 0.0, causal, attn_mask=bias
        )
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q_BNTH.device)  # the state of an unused generator
    if bias is None and q_BNTH.dtype in _HALF:
        dense = lse_BNT.contiguous()  # a part of a rank's queries is not contiguous, and this kernel ignores strides
        return _kernels.flash_backward(
            grad_BNTH, q_BNTH, k_BGSH, v_BGSH, out_BNTH, dense, None, None, q_BNTH.shape[2], k_BGSH.shape[2], 0.0,
            causal, no_dropout, no_dropout,
        )  # fmt: skip
    k_BNSH, v_BNSH = _for_each_query_head(q_BNTH, k_BGSH), _for_each_query_head(q_BNTH, v_BGSH)
    padded = torch.nn.functional.pad(lse_BNT, (0, -lse_BNT.shape[2] % 32), value=torch.inf)
    dq, dk_BNSH, dv_BNSH, _ = _kernels.efficient_backward(
        grad_BNTH, q_BNTH, k_BNSH, v_BNSH, _aligned(bias, q_BNTH), out_BNTH, padded, no_dropout[0], no_dropout[1],
        0.0, [True, True, True, False], causal,
    )  # fmt: skip
    return dq, *(x.unflatten(1, (k_BGSH.shape[1], -1)).sum(2) for x in (dk_BNSH, dv_BNSH))


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias of a mask: 0 where it is True and attention is allowed, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _for_each_query_head(q_BNTH: Tensor, x_BGSH: Tensor) -> Tensor:
    """Repeat key/value heads, one for each query head: the efficient kernel does not support grouped heads."""
    return x_BGSH.repeat_interleave(q_BNTH.shape[1] // x_BGSH.shape[1], dim=1)


def _aligned(bias: Tensor | None, q_BNTH: Tensor) -> Tensor | None:
    """Return the bias for each head, with rows that begin at multiples of 16 bytes, as the efficient kernel needs."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    padded = torch.nn.functional.pad(bias, (0, -keys % 8))[..., :keys]
    return padded.expand(*q_BNTH.shape[:3], keys)


# -- without a kernel --

_SCORES = 2**24  # elements of the scores that exist at a time


def _has_no_kernel(q_BNTH: Tensor) -> bool:
    """Return whether a GPU has no kernel for such queries: of float64, or of a width that is no multiple of 8."""
    return q_BNTH.is_cuda and (q_BNTH.dtype == torch.float64 or q_BNTH.shape[3] not in _CUDA_HEAD_DIMS)


def attend_by_products(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, *, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the same as `attend_part`, from products of matrices, for some queries at a time."""
    out, lse = torch.empty_like(q_BNTH), torch.empty(q_BNTH.shape[:3], dtype=_wide(q_BNTH), device=q_BNTH.device)
    for rows in _rows(q_BNTH, k_BGSH):
        scores = _scores(q_BNTH, k_BGSH, rows, causal, bias)
        lse_BGqR = scores.logsumexp(-1)
        made = (scores - lse_BGqR[..., None]).exp().to(v_BGSH.dtype) @ v_BGSH[:, :, None]
        out[:, :, rows], lse[:, :, rows] = made.flatten(1, 2), lse_BGqR.flatten(1, 2)
    return out, lse


def attend_by_products_backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    *,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `attend_part_backward`, from products of matrices, for some queries at a time."""
    groups, scale = k_BGSH.shape[1], q_BNTH.shape[-1] ** -0.5
    wide = _wide(q_BNTH)
    dq = torch.empty_like(q_BNTH)
    dk, dv = (torch.zeros(k_BGSH.shape, dtype=wide, device=q_BNTH.device) for _ in "kv")
    for rows in _rows(q_BNTH, k_BGSH):
        grad, q, out = (x[:, :, rows].unflatten(1, (groups, -1)).to(wide) for x in (grad_BNTH, q_BNTH, out_BNTH))
        lse = lse_BNT[:, :, rows].unflatten(1, (groups, -1))[..., None]
        shares = (_scores(q_BNTH, k_BGSH, rows, causal, bias) - lse).exp()
        dv += (shares.transpose(-1, -2) @ grad).sum(2)
        slopes = grad @ v_BGSH[:, :, None].to(wide).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
        slopes = slopes.mul_(shares).mul_(scale)
        dq[:, :, rows] = (slopes @ k_BGSH[:, :, None].to(wide)).flatten(1, 2).to(dq.dtype)
        dk += (slopes.transpose(-1, -2) @ q).sum(2)
    return dq, dk.to(k_BGSH.dtype), dv.to(v_BGSH.dtype)


def _rows(q_BNTH: Tensor, k_BGSH: Tensor) -> Iterator[slice]:
    """Yield parts of the queries whose scores have at most _SCORES elements."""
    batch, heads, tokens, _ = q_BNTH.shape
    size = max(_SCORES // (batch * heads * k_BGSH.shape[2]), 1)
    yield from (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _scores(q_BNTH: Tensor, k_BGSH: Tensor, rows: slice, causal: bool, bias: Tensor | None) -> Tensor:
    """Return the scores of some queries with the queries of each group side by side: [B, G, N / G, rows, S]."""
    q, wide = q_BNTH[:, :, rows].unflatten(1, (k_BGSH.shape[1], -1)), _wide(q_BNTH)
    scores = (q.to(wide) * q.shape[-1] ** -0.5) @ k_BGSH[:, :, None].to(wide).transpose(-1, -2)
    if bias is not None:
        scores += bias[:, :, None, rows]
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(rows.start + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
