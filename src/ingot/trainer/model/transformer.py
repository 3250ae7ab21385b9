"""A decoder-only transformer of the Llama kind. It knows no rank and no parallelism.

Parameter names are `embed.weight`, `blocks.{i}.attention.q.weight`, `blocks.{i}.mlp.gate.weight` (where a block has
experts `blocks.{i}.moe.experts.gate.weight`, model/moe.py), ... `norm.weight` and `head.weight` (absent when tied).
Blocks are keyed by layer number, so a name stays the same when a pipeline stage holds only some of them.

Shape letters: B batch, T tokens, D d_model, V vocab_size.
"""

import torch
from torch import Tensor, nn

from ingot.schema.arch import Arch
from ingot.trainer.model.attention import Attend, Attention, Sight, attend_locally
from ingot.trainer.model.latent import LatentAttention
from ingot.trainer.model.layers import RMSNorm, SwiGLU, rotary_tables
from ingot.trainer.model.loss import Readout
from ingot.trainer.model.moe import Dispatch, LocalDispatch, Moe, Pressure


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): pre-norm (Xiong et al. 2020). Experts may take the mlp's place."""

    def __init__(self, arch: Arch, layer: int, attend: Attend, dispatch: Dispatch):
        super().__init__()
        self.attention_norm = RMSNorm(arch.d_model, arch.norm_eps)
        self.attention = (LatentAttention if arch.is_mla else Attention)(arch, attend)
        self.mlp_norm = RMSNorm(arch.d_model, arch.norm_eps)
        self.mlp = None if arch.has_experts(layer) else SwiGLU(arch.d_model, arch.d_ffn)
        self.moe = Moe(arch, layer, dispatch) if arch.has_experts(layer) else None

    def forward(
        self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], sight: Sight, cache=None, pressure: Pressure | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, sight, cache)
        if self.moe is not None:
            return x_BTD + self.moe(self.mlp_norm(x_BTD), sight.positions_T, pressure)
        assert self.mlp is not None
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


# What tensor parallelism may do with each parameter, by the end of its name: the output dim of `column` and the input
# dim of `row` matrices is cut, `vocab` matrices are cut by token id; `kv` are column matrices whose heads may be fewer
# than the ranks; `stream` weights act on the residual stream, `heads` weights for every head alike. Stacked `expert`
# matrices are not cut by it: its ranks send their own tokens to them.
SHARDING = {
    "embed.weight": "vocab",
    "head.weight": "vocab",
    "attention.q.weight": "column",
    "attention.k.weight": "kv",
    "attention.v.weight": "kv",
    "attention.o.weight": "row",
    "attention.q_norm.weight": "heads",
    "attention.k_norm.weight": "heads",
    "attention.q_down.weight": "heads",
    "attention.q_latent_norm.weight": "heads",
    "attention.q_up.weight": "column",
    "attention.kv_down.weight": "heads",
    "attention.kv_latent_norm.weight": "heads",
    "attention.kv_up.weight": "column",
    "mlp.gate.weight": "column",
    "mlp.up.weight": "column",
    "mlp.down.weight": "row",
    "moe.router.weight": "stream",
    "moe.experts.gate.weight": "expert",
    "moe.experts.up.weight": "expert",
    "moe.experts.down.weight": "expert",
    "moe.shared.gate.weight": "column",
    "moe.shared.up.weight": "column",
    "moe.shared.down.weight": "row",
    "moe.fallback.gate.weight": "stream",
    "moe.fallback.up.weight": "stream",
    "moe.fallback.down.weight": "stream",
    "attention_norm.weight": "stream",
    "mlp_norm.weight": "stream",
    "norm.weight": "stream",
}


class Transformer(nn.Module):
    """attend: how queries meet keys and values, dispatch: how tokens come to experts. Context and expert parallelism
    pass others.

    A pipeline stage is a Transformer that lost its other blocks, `embed` if it is not the first, and `norm` and `head`
    if it is not the last (a last one with tied embeddings keeps `embed` as its head).
    """

    embed: nn.Embedding | None
    norm: RMSNorm | None
    head: nn.Linear | None

    def __init__(self, arch: Arch, attend: Attend = attend_locally, dispatch: Dispatch | None = None):
        super().__init__()
        self.arch = arch
        self.embed = nn.Embedding(arch.vocab_size, arch.d_model)
        dispatch = dispatch or LocalDispatch()
        self.blocks = nn.ModuleDict({str(i): Block(arch, i, attend, dispatch) for i in range(arch.num_layers)})
        self.norm = RMSNorm(arch.d_model, arch.norm_eps)
        self.head = None if arch.tied_embeddings else nn.Linear(arch.d_model, arch.vocab_size, bias=False)
        self.readout = Readout()
        # Other forms of attention make masks of their own, of the parts that they work on.
        self.masks_here = attend is attend_locally

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        cache=None,
        *,
        positions_T: Tensor | None = None,
        per_token: bool = False,
        pressure: Pressure | None = None,
    ) -> Tensor:
        """Without targets: logits [B, T, V] in the compute dtype. With targets: the sum of nats over all B x T tokens.

        The sum is float32 (float64 in a float64 model); divide by the number of tokens for the loss. per_token: nats
        of every target instead, [B * T], without gradients.
        x: token ids [B, T]; on a stage that is not the first, hidden states [B, T, D] (with sequence parallelism a
        part of T, and positions_T says which positions attention sees). A stage that is not the last returns them.
        document_ids_BT: attention does not cross document borders (positions keep counting through them); of the whole
        sequence, also where x is a part of it. positions_T: of the tokens that attention sees, ascending; 0..T-1 unless
        given. cache: a KVCache (model/generate.py) with the earlier tokens. pressure: in training, what limits and
        balances experts (model/routing.py).
        """
        positions = torch.arange(x.shape[1], device=x.device) if positions_T is None else positions_T
        if cache is not None:
            positions = positions + cache.tokens
        sight = Sight(positions, document_ids_BT, self.arch.sliding_window)
        rotated = self.arch.mla.rope_dim if self.arch.is_mla else self.arch.head_dim
        rotary = rotary_tables(positions, rotated, self.arch.rope_theta)
        x_BTD = x if x.is_floating_point() or self.embed is None else self.embed(x)
        if self.masks_here:
            sight = sight.prepared(len(positions) + (0 if cache is None else cache.tokens), x_BTD.dtype)
        for index, block in self.blocks.items():
            x_BTD = block(x_BTD, rotary, sight, None if cache is None else cache.layers[int(index)], pressure)
        if self.norm is None:
            return x_BTD
        x_BTD = self.norm(x_BTD)
        head_VD = (self.head or self.embed).weight  # pyright: ignore[reportOptionalMemberAccess]
        if targets_BT is None:
            return self.readout.logits(x_BTD, head_VD)
        read = self.readout.nats if per_token else self.readout
        return read(x_BTD.flatten(0, 1), head_VD, targets_BT.flatten())
