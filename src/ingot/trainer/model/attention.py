"""Attention: grouped-query (Ainslie et al. 2023) and multi-head latent (DeepSeek-AI 2024, V2), with rotary positions.

Shape letters: B batch, T query tokens, S key tokens, D d_model, N query heads, G key/value heads, H head_dim.
Latent attention: H = P nope_dim + R rope_dim, U v_dim, C kv_rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.schema.arch import Arch
from ingot.trainer.attend.documents import ends_of
from ingot.trainer.attend.packed import PackedDocuments, attend_packed, has_packed_kernel, pack
from ingot.trainer.attend.tiled import TilePlan, attend_tiles, plan_tiles
from ingot.trainer.model.layers import RMSNorm, rotate


@dataclass(frozen=True, eq=False)
class AttentionMaskSpec:
    """The rule for which keys a query may attend to: its own and earlier tokens of its document, within the window.

    positions_T: positions of the queries, ascending. Keys of a whole sequence have the positions 0..S-1.
    document_ids_BS: the document number of every position of the whole sequence, on the host (attend/documents.py);
      None if there is one document.
    window: the number of tokens a query attends to, itself included; 0 means no limit.
    plan: how attention of whole sequences follows the rule on this device. `planned` makes it once for all layers; None
      before, or if plain causal attention follows the rule.
    """

    positions_T: Tensor
    document_ids_BS: Tensor | None = None
    window: int = 0
    plan: PackedDocuments | TilePlan | None = None

    def is_causal(self, keys: int) -> bool:
        """Return whether plain causal attention over `keys` keys already follows this rule."""
        return len(self.positions_T) == keys and self.document_ids_BS is None and not 0 < self.window < keys

    def planned(self, keys: int, like: Tensor, head_dim: int) -> "AttentionMaskSpec":
        """Return a copy with a plan for keys 0..keys-1, or self if plain causal attention will do.

        The queries are the last tokens. like: a tensor of the batch, in the dtype of queries, on their device.
        """
        if self.is_causal(keys):
            return self
        tokens, ids = len(self.positions_T), self.document_ids_BS
        ends, window = None if ids is None else ends_of(ids), self.window if self.window < keys else 0
        if tokens == keys and has_packed_kernel(like.is_cuda, like.dtype, head_dim):
            return replace(self, plan=pack(ends, batch=len(like), tokens=tokens, window=window, device=like.device))
        plan = plan_tiles(
            ends, ids, batch=len(like), tokens=tokens, keys=keys, window=window, dtype=like.dtype, device=like.device
        )
        return replace(self, plan=plan)


# (q_BNTH, k_BGSH, v_BGSH, mask_spec) -> BNTH. Keys and values belong to the same tokens as the queries, or to these and
# all earlier tokens.
Attend = Callable[[Tensor, Tensor, Tensor, AttentionMaskSpec], Tensor]


def attend_locally(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_spec: AttentionMaskSpec) -> Tensor:
    """Compute scaled dot-product attention of whole sequences on this device, without masks of T x S elements.

    The keys have the positions 0..S-1; the queries are the last T of them. Returns [B, N, T, H].
    """
    keys = k_BGSH.shape[2]
    if mask_spec.is_causal(keys):
        return _attend_causally(q_BNTH, k_BGSH, v_BGSH)
    if mask_spec.plan is None:
        mask_spec = mask_spec.planned(keys, q_BNTH, q_BNTH.shape[3])
    if isinstance(mask_spec.plan, PackedDocuments):
        return attend_packed(q_BNTH, k_BGSH, v_BGSH, mask_spec.plan)
    assert mask_spec.plan is not None
    return attend_tiles(q_BNTH, k_BGSH, v_BGSH, mask_spec.plan)


# An `attend` with this attribute uses the plan of the mask spec, so the model makes it before its first layer. Others
# make plans for the parts of the sequence that they process.
attend_locally.uses_plan = True


def _attend_causally(q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor) -> Tensor:
    if not q_BNTH.is_cuda or q_BNTH.dtype in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(q_BNTH, k_BGTH, v_BGTH, is_causal=True, enable_gqa=True)
    # On CUDA, the kernel for float32 does not support grouped heads: repeat the keys and values for each query head.
    group = q_BNTH.shape[1] // k_BGTH.shape[1]
    k_BNTH, v_BNTH = k_BGTH.repeat_interleave(group, dim=1), v_BGTH.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)


class Attention(nn.Module):
    """Grouped-query attention, with RMSNorm on queries and keys if `arch.qk_norm`."""

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

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask_spec: AttentionMaskSpec, cache=None) -> Tensor:
        """Return [B, T, D]. rotary: cos and sin [T, H/2]. cache: the layer's LayerCache (model/generate.py) or None."""
        batch, tokens, _ = x_BTD.shape
        # The number of heads follows from the matrices: a tensor-parallel rank has a part of the heads.
        q_BTNH = self.q(x_BTD).view(batch, tokens, -1, self.head_dim)
        k_BTGH = self.k(x_BTD).view(batch, tokens, -1, self.head_dim)
        v_BTGH = self.v(x_BTD).view(batch, tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTGH = self.q_norm(q_BTNH), self.k_norm(k_BTGH)
        q_BNTH = rotate(q_BTNH.transpose(1, 2), *rotary)
        k_BGSH, v_BGSH = rotate(k_BTGH.transpose(1, 2), *rotary), v_BTGH.transpose(1, 2)
        if cache is not None:
            k_BGSH, v_BGSH = cache.append(k_BGSH, v_BGSH)
        out_BNTH = self.attend(q_BNTH, k_BGSH, v_BGSH, mask_spec)
        return self.output(x_BTD, out_BNTH.transpose(1, 2).reshape(batch, tokens, -1))

    def output(self, x_BTD: Tensor, attended_BTN: Tensor) -> Tensor:
        """Return [B, T, D], the input of this module being `x_BTD`. attended_BTN: the heads of this rank, side by side.

        A plug-in's attention may override it.
        """
        return self.o(attended_BTN)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, V2, section 2.1, eq. 9-19; the same in V3).

    Keys and values of all heads are computed from one narrow latent per token, and queries from another latent or from
    the hidden state. Each latent passes an RMSNorm first (V2, section 3.1.2). Only R of the H numbers of a query or key
    depend on the position; this part of the key is computed from the hidden state and shared by all heads. (If it came
    from `kv_up`, a server could not fold `kv_up` into the queries and cache the latents alone.) Scores are divided by
    sqrt(H), as in Attention (V2, eq. 18).

    The rows of each head: `q_up` (or `q`) has P rows without positions, then R rows with positions; `kv_up` has P rows
    for the key, then U rows for the value. `kv_down` has the C rows of the latent, then the R rows of the shared key.
    """

    def __init__(self, arch: Arch, attend: Attend):
        super().__init__()
        self.mla, self.head_dim, self.attend = arch.mla, arch.head_dim, attend
        mla, queries = arch.mla, arch.num_heads * arch.head_dim
        self.q = None if mla.q_rank else nn.Linear(arch.d_model, queries, bias=False)
        self.q_down = nn.Linear(arch.d_model, mla.q_rank, bias=False) if mla.q_rank else None
        self.q_latent_norm = RMSNorm(mla.q_rank, arch.norm_eps) if mla.q_rank else None
        self.q_up = nn.Linear(mla.q_rank, queries, bias=False) if mla.q_rank else None
        self.kv_down = nn.Linear(arch.d_model, mla.kv_rank + mla.rope_dim, bias=False)
        self.kv_latent_norm = RMSNorm(mla.kv_rank, arch.norm_eps)
        self.kv_up = nn.Linear(mla.kv_rank, arch.num_heads * (mla.nope_dim + mla.v_dim), bias=False)
        self.o = nn.Linear(arch.num_heads * mla.v_dim, arch.d_model, bias=False)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask_spec: AttentionMaskSpec, cache=None) -> Tensor:
        """Return [B, T, D]. rotary: cos and sin [T, R/2]. cache: the layer's LayerCache (model/generate.py) or None.

        The cache holds N keys and values of width H per token, as in ordinary attention, not the C + R numbers that
        latent attention needs: only a server gains from the smaller cache.
        """
        q_BNTH = self._queries(x_BTD, rotary)
        k_BNSH, v_BNSU = self._keys_and_values(x_BTD, rotary)
        # Kernels, and the exchanges of context parallelism, need values as wide as keys: pad the values with zeros, and
        # cut the added columns off the result.
        v_BNSH = F.pad(v_BNSU, (0, self.head_dim - self.mla.v_dim))
        if cache is not None:
            k_BNSH, v_BNSH = cache.append(k_BNSH, v_BNSH)
        out_BNTU = self.attend(q_BNTH, k_BNSH, v_BNSH, mask_spec)[..., : self.mla.v_dim]
        return self.o(out_BNTU.transpose(1, 2).flatten(2))

    def _queries(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        if self.q is not None:
            queries = self.q(x_BTD)
        else:
            assert self.q_down is not None and self.q_latent_norm is not None and self.q_up is not None
            queries = self.q_up(self.q_latent_norm(self.q_down(x_BTD)))
        # The number of heads follows from the matrix: a tensor-parallel rank has a part of the heads.
        q_BNTH = queries.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q_BNTP, q_BNTR = q_BNTH.split((self.mla.nope_dim, self.mla.rope_dim), dim=-1)
        return torch.cat((q_BNTP, rotate(q_BNTR, *rotary)), dim=-1)

    def _keys_and_values(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys [B, N, T, H] and values [B, N, T, U]."""
        mla = self.mla
        latent_BTC, k_BTR = self.kv_down(x_BTD).split((mla.kv_rank, mla.rope_dim), dim=-1)
        up = self.kv_up(self.kv_latent_norm(latent_BTC)).unflatten(-1, (-1, mla.nope_dim + mla.v_dim)).transpose(1, 2)
        k_BNTP, v_BNTU = up.split((mla.nope_dim, mla.v_dim), dim=-1)
        k_BNTR = rotate(k_BTR[:, None], *rotary).expand(-1, k_BNTP.shape[1], -1, -1)
        return torch.cat((k_BNTP, k_BNTR), dim=-1), v_BNTU


def grouped_query(arch: Arch, attend: Attend, options: None = None) -> Attention | LatentAttention:
    """Return grouped-query attention, or latent attention if the model has latents."""
    return (LatentAttention if arch.is_mla else Attention)(arch, attend)
