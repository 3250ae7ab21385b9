"""Grouped-query attention (Ainslie et al. 2023) with rotary positions and, if asked for, RMSNorm on queries and keys.

Shape letters: B batch, T tokens, S tokens looked at, D d_model, N query heads, G key/value heads, H head_dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.layers import RMSNorm, rotate
from ingot.schema.arch import Arch

# (q_BNTH, k_BGSH, v_BGSH, mask) -> BNTH; mask None means causal with T == S, else bool [B or 1, 1, T, S], True looks.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def attend_locally(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention of whole sequences on this device: flash kernels where PyTorch has them."""
    if mask is None and (not q_BNTH.is_cuda or q_BNTH.dtype in (torch.bfloat16, torch.float16)):
        return F.scaled_dot_product_attention(q_BNTH, k_BGSH, v_BGSH, is_causal=True, enable_gqa=True)
    # On CUDA the kernel that takes a mask, or float32, without storing T x S scores knows no groups: give it one key
    # per query head.
    group = q_BNTH.shape[1] // k_BGSH.shape[1]
    k_BNSH, v_BNSH = k_BGSH.repeat_interleave(group, dim=1), v_BGSH.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=mask, is_causal=mask is None)


def document_mask(document_ids_BT: Tensor) -> Tensor:
    """Bool [B, 1, T, T]: a token looks at itself and at earlier tokens of its own document."""
    tokens = document_ids_BT.shape[1]
    same = document_ids_BT[:, None, :, None] == document_ids_BT[:, None, None, :]
    return same & torch.ones(tokens, tokens, dtype=torch.bool, device=document_ids_BT.device).tril()


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

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache=None) -> Tensor:
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
        out_BNTH = self.attend(q_BNTH, k_BGSH, v_BGSH, mask)
        return self.o(out_BNTH.transpose(1, 2).reshape(batch, tokens, -1))
