"""Multi-head latent attention (DeepSeek-AI 2024, V2, section 2.1, eq. 9-19; V3 has the same).

Keys and values of all heads are computed from one narrow latent per token, queries from another one or directly; both
latents pass an RMSNorm first (V2, section 3.1.2). Only a part of each query and key knows positions, and that part of
the keys is computed from the token itself and shared by all heads: were it rotated after `kv_up`, a server could not
fold `kv_up` into the queries and keep the latents alone.

Shape letters: B batch, T tokens, D d_model, N heads, H head_dim = P nope_dim + R rope_dim, U v_dim, C kv_rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.schema.arch import Arch
from ingot.trainer.model.attention import Attend, Sight
from ingot.trainer.model.layers import RMSNorm, rotate


class LatentAttention(nn.Module):
    """In place of Attention (model/attention.py); scores are divided by sqrt(H), as there (V2, eq. 18).

    A head's rows are ordered: in `q_up` (or `q`) P without positions, then R with; in `kv_up` P of its key, then U of
    its value. The rows of `kv_down` are the latent's, then the R of the shared key.
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

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], sight: Sight, cache=None) -> Tensor:
        """rotary: tables of R. cache: this layer's keys and values so far (model/generate.py), or None. -> [B, T, D].

        The cache holds what it holds for any attention, N keys and values of width H per token: correct, but not the
        C + R numbers that latent attention could do with. They pay off in serving, which is not done here.
        """
        q_BNTH = self._queries(x_BTD, rotary)
        k_BNSH, v_BNSU = self._keys_and_values(x_BTD, rotary)
        # Kernels, and the exchanges of context parallelism, take values as wide as keys. Zeros add nothing to the other
        # columns, and theirs are cut off again.
        v_BNSH = F.pad(v_BNSU, (0, self.head_dim - self.mla.v_dim))
        if cache is not None:
            k_BNSH, v_BNSH = cache.append(k_BNSH, v_BNSH)
        out_BNTU = self.attend(q_BNTH, k_BNSH, v_BNSH, sight)[..., : self.mla.v_dim]
        return self.o(out_BNTU.transpose(1, 2).flatten(2))

    def _queries(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        if self.q is not None:
            queries = self.q(x_BTD)
        else:
            assert self.q_down is not None and self.q_latent_norm is not None and self.q_up is not None
            queries = self.q_up(self.q_latent_norm(self.q_down(x_BTD)))
        # As many heads as the matrix has rows for: a tensor-parallel rank holds some of them.
        q_BNTH = queries.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q_BNTP, q_BNTR = q_BNTH.split((self.mla.nope_dim, self.mla.rope_dim), dim=-1)
        return torch.cat((q_BNTP, rotate(q_BNTR, *rotary)), dim=-1)

    def _keys_and_values(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, N, T, H] and [B, N, T, U]."""
        mla = self.mla
        latent_BTC, k_BTR = self.kv_down(x_BTD).split((mla.kv_rank, mla.rope_dim), dim=-1)
        up = self.kv_up(self.kv_latent_norm(latent_BTC)).unflatten(-1, (-1, mla.nope_dim + mla.v_dim)).transpose(1, 2)
        k_BNTP, v_BNTU = up.split((mla.nope_dim, mla.v_dim), dim=-1)
        k_BNTR = rotate(k_BTR[:, None], *rotary).expand(-1, k_BNTP.shape[1], -1, -1)
        return torch.cat((k_BNTP, k_BNTR), dim=-1), v_BNTU
