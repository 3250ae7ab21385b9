"""Grouped-query attention (Ainslie et al. 2023) with rotary positions and, if asked for, RMSNorm on queries and keys.

Shape letters: B batch, T tokens, S tokens looked at, D d_model, N query heads, G key/value heads, H head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.layers import RMSNorm, rotate
from ingot.schema.arch import Arch


@dataclass(frozen=True)
class Sight:
    """What a token may look at: itself, and tokens before it, of its own document, within the window.

    positions_T: of the tokens that ask, ascending; keys of a whole sequence are at 0..S-1.
    document_ids_BS: by position in the whole sequence, or None: one document. window: 0 for no limit.
    """

    positions_T: Tensor
    document_ids_BS: Tensor | None = None
    window: int = 0

    def mask(self, queries_T: Tensor, keys_S: Tensor) -> Tensor:
        """Bool [B or 1, 1, T, S] for positions of queries and keys, True looks."""
        distance_TS = queries_T[:, None] - keys_S[None, :]
        seen = distance_TS >= 0
        if self.window:
            seen &= distance_TS < self.window
        if self.document_ids_BS is None:
            return seen[None, None]
        own, theirs = self.document_ids_BS[:, queries_T], self.document_ids_BS[:, keys_S]
        return (seen & (own[:, :, None] == theirs[:, None, :]))[:, None]


# (q_BNTH, k_BGSH, v_BGSH, sight) -> BNTH; keys and values of the same tokens as the queries, or of all before as well.
Attend = Callable[[Tensor, Tensor, Tensor, Sight], Tensor]


def attend_locally(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, sight: Sight) -> Tensor:
    """Scaled dot-product attention of whole sequences on this device: flash kernels where PyTorch has them.

    Keys of all positions 0..S-1 are here; queries are the last T of them.
    """
    tokens, keys = q_BNTH.shape[2], k_BGSH.shape[2]
    plain = tokens == keys and sight.document_ids_BS is None and not 0 < sight.window < keys
    mask = None if plain else sight.mask(sight.positions_T, torch.arange(keys, device=q_BNTH.device))
    if mask is None and (not q_BNTH.is_cuda or q_BNTH.dtype in (torch.bfloat16, torch.float16)):
        return F.scaled_dot_product_attention(q_BNTH, k_BGSH, v_BGSH, is_causal=True, enable_gqa=True)
    # On CUDA the kernel that takes a mask, or float32, without storing T x S scores knows no groups: give it one key
    # per query head.
    group = q_BNTH.shape[1] // k_BGSH.shape[1]
    k_BNSH, v_BNSH = k_BGSH.repeat_interleave(group, dim=1), v_BGSH.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=mask, is_causal=mask is None)


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
