"""Grouped-query attention (Ainslie et al. 2023) with rotary positions and, if asked for, RMSNorm on queries and keys.

Shape letters: B batch, T tokens, S tokens looked at, D d_model, N query heads, G key/value heads, H head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ingot.schema.arch import Arch
from ingot.trainer.model.layers import RMSNorm, rotate

# Of the largest mask that is kept: 128 MiB in bf16, once per forward. With more than that, attention goes through the
# queries in chunks whose masks are this large at most.
MASK_ELEMENTS = 2**26


@dataclass(frozen=True, eq=False)
class Sight:
    """What a token may look at: itself, and tokens before it, of its own document, within the window.

    positions_T: of the tokens that ask, ascending; keys of a whole sequence are at 0..S-1.
    document_ids_BS: by position in the whole sequence, or None: one document. window: 0 for no limit.
    bias: 0 where `mask` of all queries and keys is True, else -inf, in the dtype of queries; made once for all layers
      (`prepared`), None where attention has no use for it.
    """

    positions_T: Tensor
    document_ids_BS: Tensor | None = None
    window: int = 0
    bias: Tensor | None = None

    def mask(self, queries_T: Tensor, keys_S: Tensor) -> Tensor:
        """Bool [B or 1, 1, T, S] for positions of queries and keys, True looks."""
        return _mask(queries_T, keys_S, self.document_ids_BS, self.window)

    def needs_mask(self, keys: int) -> bool:
        """Whether the triangle of as many queries as keys would show something else."""
        return len(self.positions_T) != keys or self.document_ids_BS is not None or 0 < self.window < keys

    def mask_elements(self, keys: int) -> int:
        return (1 if self.document_ids_BS is None else len(self.document_ids_BS)) * len(self.positions_T) * keys

    def prepared(self, keys: int, dtype: torch.dtype) -> "Sight":
        """With `bias` for keys at 0..keys-1, where attention in one piece needs it."""
        if not self.needs_mask(keys) or self.mask_elements(keys) > MASK_ELEMENTS:
            return self
        seen = self.mask(self.positions_T, torch.arange(keys, device=self.positions_T.device))
        return replace(self, bias=_bias(seen, dtype))


def _mask(queries_T: Tensor, keys_S: Tensor, document_ids_BS: Tensor | None, window: int) -> Tensor:
    distance_TS = queries_T[:, None] - keys_S[None, :]
    seen = distance_TS >= 0
    if window:
        seen &= distance_TS < window
    if document_ids_BS is None:
        return seen[None, None]
    own, theirs = document_ids_BS[:, queries_T], document_ids_BS[:, keys_S]
    return (seen & (own[:, :, None] == theirs[:, None, :]))[:, None]


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


# (q_BNTH, k_BGSH, v_BGSH, sight) -> BNTH; keys and values of the same tokens as the queries, or of all before as well.
Attend = Callable[[Tensor, Tensor, Tensor, Sight], Tensor]


def attend_locally(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, sight: Sight) -> Tensor:
    """Scaled dot-product attention of whole sequences on this device: flash kernels where PyTorch has them.

    Keys of all positions 0..S-1 are here; queries are the last T of them.
    """
    keys = k_BGSH.shape[2]
    if not sight.needs_mask(keys):
        return _attend(q_BNTH, k_BGSH, v_BGSH, None)
    if sight.bias is None:
        sight = sight.prepared(keys, q_BNTH.dtype)
    if sight.bias is None:
        return _attend_in_chunks(q_BNTH, k_BGSH, v_BGSH, sight)
    return _attend(q_BNTH, k_BGSH, v_BGSH, sight.bias.to(q_BNTH.dtype))


def _attend(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, bias: Tensor | None) -> Tensor:
    """bias: None for the triangle of as many queries as keys."""
    if not q_BNTH.is_cuda or (bias is None and q_BNTH.dtype in (torch.bfloat16, torch.float16)):
        return F.scaled_dot_product_attention(
            q_BNTH, k_BGSH, v_BGSH, attn_mask=bias, is_causal=bias is None, enable_gqa=True
        )
    # On CUDA the kernel that takes a mask, or float32, without storing T x S scores knows no groups: give it one key
    # per query head.
    group = q_BNTH.shape[1] // k_BGSH.shape[1]
    k_BNSH, v_BNSH = k_BGSH.repeat_interleave(group, dim=1), v_BGSH.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=bias, is_causal=bias is None)


def _attend_in_chunks(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, sight: Sight) -> Tensor:
    """Chunks of queries, each with the keys that it reaches. Their masks would together be too large to keep for the
    backward, which makes them, and the chunk's attention, again."""
    tokens, keys = q_BNTH.shape[2], k_BGSH.shape[2]
    rows, parts = max(MASK_ELEMENTS * tokens // sight.mask_elements(keys), 1), []
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        first, last = max(keys - tokens + start - sight.window + 1, 0) if sight.window else 0, keys - tokens + end
        reached_S = torch.arange(first, last, device=q_BNTH.device)
        parts.append(
            checkpoint(
                _attend_chunk,
                q_BNTH[:, :, start:end],
                k_BGSH[:, :, first:last],
                v_BGSH[:, :, first:last],
                sight.positions_T[start:end],
                reached_S,
                sight.document_ids_BS,
                sight.window,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(parts, dim=2)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _attend_chunk(
    q_BNTH: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    queries_T: Tensor,
    keys_S: Tensor,
    document_ids_BS: Tensor | None,
    window: int,
) -> Tensor:
    seen = _mask(queries_T, keys_S, document_ids_BS, window)
    return _attend(q_BNTH, k_BGSH, v_BGSH, _bias(seen, q_BNTH.dtype))


class Attention(nn.Module):
    def __init__(self, arch: Arch, attend: Attend):
        super().__init__()
        self.head_dim = arch.head_dim
        self.attend = attend
        self.q = nn.Linear(arch.d_model, arch.num_heads * arch.head_dim, bias=False)
        self.k = nn.Linear(arch.d_model, arch.num_kv_heads * arch.head_dim, bias=False)
        self.v = nn.Linear(arch.d_model, arch.num_kv_heads * arch.head_dim, bias=False)
        self.o = nn.Linear(arch.num_heads * arch.head_dim, arch.d_model, bias=False)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], sight: Sight, cache=None) -> Tensor:
        """cache: this layer's keys and values so far (model/generate.py), or None. Returns [B, T, D]."""
        batch, tokens, _ = x_BTD.shape
        # As many heads as the matrices have columns for: a tensor-parallel rank holds some of them.
        q_BTNH = self.q(x_BTD).view(batch, tokens, -1, self.head_dim)
        k_BTGH = self.k(x_BTD).view(batch, tokens, -1, self.head_dim)
        v_BTGH = self.v(x_BTD).view(batch, tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTGH = self.q_norm(q_BTNH), self.k_norm(k_BTGH)
        q_BNTH = rotate(q_BTNH.transpose(1, 2), *rotary)
        k_BGSH, v_BGSH = rotate(k_BTGH.transpose(1, 2), *rotary), v_BTGH.transpose(1, 2)
        if cache is not None:
            k_BGSH, v_BGSH = cache.append(k_BGSH, v_BGSH)
        out_BNTH = self.attend(q_BNTH, k_BGSH, v_BGSH, sight)
        return self.o(out_BNTH.transpose(1, 2).reshape(batch, tokens, -1))
