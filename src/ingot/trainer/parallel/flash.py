"""Attention of one block of queries with one block of keys, as a part of more: results come with the logarithm of their
normalisers, by which parts are merged, and a backward takes those of the whole (Dao et al. 2022, appendix B).

PyTorch's flash kernels do both; the functions that models call do not hand the normalisers out.
Shape letters: B batch, T queries, S keys, N query heads, G key/value heads, H head_dim.
"""

import torch
from torch import Tensor

from ingot.errors import ConfigError
from ingot.schema.nearest import nearest

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_CUDA_HEAD_DIMS = range(8, 257, 8)


def require_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raises ConfigError where PyTorch has no kernel for `attend_part`: on a CPU it has one for all."""
    ulysses = 'or parallel.context = "ulysses", which takes any attention'
    if device.type != "cuda":
        return
    if dtype == torch.float64:
        raise ConfigError(
            "a ring of context parallelism computes in float64 on a GPU",
            rule="steps of a ring are merged by log-sum-exps, and kernels that return them take at most 32 bits there",
            fix=f'use train.precision = "bf16", "fp16" or "fp32", {ulysses}',
        )
    if head_dim not in _CUDA_HEAD_DIMS:
        raise ConfigError(
            f"a ring of context parallelism on a GPU has model.head_dim = {head_dim}",
            rule=f"kernels of a ring take multiples of 8 up to {_CUDA_HEAD_DIMS[-1]} there",
            fix=f"nearest: {nearest(head_dim, _CUDA_HEAD_DIMS)}, {ulysses}",
        )


def attend_part(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, *, causal: bool, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Results [B, N, T, H] and log-sum-exp of the scores [B, N, T], -inf for a query that sees no key here.

    causal: T = S, query i sees keys 0..i. seen: bool [B or 1, 1, T, S], or None. The latter is float32 at least.
    """
    bias = None if seen is None else _bias(seen, q_BNTH.dtype)
    if not q_BNTH.is_cuda:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNTH, k_BGSH, v_BGSH, 0.0, causal, attn_mask=bias
        )
    elif bias is None and q_BNTH.dtype in _HALF:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q_BNTH, k_BGSH, v_BGSH, 0.0, causal)
    else:
        k_BNSH, v_BNSH = _for_each_query_head(q_BNTH, k_BGSH), _for_each_query_head(q_BNTH, v_BGSH)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q_BNTH, k_BNSH, v_BNSH, _laid_out(bias, q_BNTH), True, 0.0, causal
        )
        lse = lse[:, :, : q_BNTH.shape[2]]  # its rows are padded
    if seen is None:
        return out, lse
    blind = ~seen.any(-1)  # kernels differ in what they return for a query without keys
    return out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)


def attend_part_backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    *,
    causal: bool,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of queries, and the gradients of keys and values by these queries.

    out, lse: of the queries' attention to all keys, wherever they are.
    """
    bias = None if seen is None else _bias(seen, q_BNTH.dtype)
    if not q_BNTH.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BNTH, q_BNTH, k_BGSH, v_BGSH, out_BNTH, lse_BNT, 0.0, causal, attn_mask=bias
        )
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q_BNTH.device)  # the state of a generator that is not used
    if bias is None and q_BNTH.dtype in _HALF:
        dense = lse_BNT.contiguous()  # of a part of a rank's queries it is not, and this kernel knows no strides of it
        return _aten._scaled_dot_product_flash_attention_backward(
            grad_BNTH, q_BNTH, k_BGSH, v_BGSH, out_BNTH, dense, None, None, q_BNTH.shape[2], k_BGSH.shape[2], 0.0,
            causal, no_dropout, no_dropout,
        )  # fmt: skip
    k_BNSH, v_BNSH = _for_each_query_head(q_BNTH, k_BGSH), _for_each_query_head(q_BNTH, v_BGSH)
    padded = torch.nn.functional.pad(lse_BNT, (0, -lse_BNT.shape[2] % 32), value=torch.inf)
    dq, dk_BNSH, dv_BNSH, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad_BNTH, q_BNTH, k_BNSH, v_BNSH, _laid_out(bias, q_BNTH), out_BNTH, padded, no_dropout[0], no_dropout[1],
        0.0, [True, True, True, False], causal,
    )  # fmt: skip
    return dq, *(x.unflatten(1, (k_BGSH.shape[1], -1)).sum(2) for x in (dk_BNSH, dv_BNSH))


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _for_each_query_head(q_BNTH: Tensor, x_BGSH: Tensor) -> Tensor:
    """This kernel knows no groups."""
    return x_BGSH.repeat_interleave(q_BNTH.shape[1] // x_BGSH.shape[1], dim=1)


def _laid_out(bias: Tensor | None, q_BNTH: Tensor) -> Tensor | None:
    """This kernel wants rows of a bias that begin at multiples of 16 bytes, and a bias for each head."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    aligned = torch.nn.functional.pad(bias, (0, -keys % 8))[..., :keys]
    return aligned.expand(*q_BNTH.shape[:3], keys)
