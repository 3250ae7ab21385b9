"""A decoder-only transformer of the Llama kind. It knows no rank and no parallelism.

Parameter names are `embed.weight`, `blocks.{i}.attention.q.weight`, `blocks.{i}.mlp.gate.weight`, ... `norm.weight` and
`head.weight` (absent when tied). Blocks are keyed by layer number, so a name stays the same when a pipeline stage holds
only some of them.

Shape letters: B batch, T tokens, D d_model, V vocab_size.
"""

import torch
from torch import Tensor, nn

from ingot.model.attention import Attend, Attention, attend_locally, document_mask
from ingot.model.layers import RMSNorm, SwiGLU, rotary_tables
from ingot.model.loss import Readout
from ingot.schema.arch import Arch


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): pre-norm (Xiong et al. 2020)."""

    def __init__(self, arch: Arch, attend: Attend):
        super().__init__()
        self.attention_norm = RMSNorm(arch.d_model, arch.norm_eps)
        self.attention = Attention(arch, attend)
        self.mlp_norm = RMSNorm(arch.d_model, arch.norm_eps)
        self.mlp = SwiGLU(arch)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache=None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, mask, cache)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


# What tensor parallelism may do with each parameter, by the end of its name: the output dim of `column` and the input
# dim of `row` matrices is cut, `vocab` matrices are cut by token id; `kv` are column matrices whose heads may be fewer
# than the ranks; `stream` weights act on the residual stream, `heads` weights on every head alike.
SHARDING = {
    "embed.weight": "vocab",
    "head.weight": "vocab",
    "attention.q.weight": "column",
    "attention.k.weight": "kv",
    "attention.v.weight": "kv",
    "attention.o.weight": "row",
    "attention.q_norm.weight": "heads",
    "attention.k_norm.weight": "heads",
    "mlp.gate.weight": "column",
    "mlp.up.weight": "column",
    "mlp.down.weight": "row",
    "attention_norm.weight": "stream",
    "mlp_norm.weight": "stream",
    "norm.weight": "stream",
}


class Transformer(nn.Module):
    """attend: how queries meet keys and values; context parallelism passes another one.

    A pipeline stage is a Transformer that lost its other blocks, `embed` if it is not the first, and `norm` and `head`
    if it is not the last (a last one with tied embeddings keeps `embed` as its head).
    """

    embed: nn.Embedding | None
    norm: RMSNorm | None
    head: nn.Linear | None

    def __init__(self, arch: Arch, attend: Attend = attend_locally):
        super().__init__()
        self.arch = arch
        self.embed = nn.Embedding(arch.vocab_size, arch.d_model)
        self.blocks = nn.ModuleDict({str(i): Block(arch, attend) for i in range(arch.num_layers)})
        self.norm = RMSNorm(arch.d_model, arch.norm_eps)
        self.head = None if arch.tied_embeddings else nn.Linear(arch.d_model, arch.vocab_size, bias=False)
        self.readout = Readout()

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        cache=None,
        *,
        positions_T: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Without targets: logits [B, T, V] in the compute dtype. With targets: the sum of nats over all B x T tokens.

        The sum is float32 (float64 in a float64 model); divide by the number of tokens for the loss. per_token: nats
        of every target instead, [B * T], without gradients.
        x: token ids [B, T]; on a stage that is not the first, hidden states [B, T, D] (with sequence parallelism a
        part of T, and positions_T says which positions attention sees). A stage that is not the last returns them.
        document_ids_BT: attention does not cross document borders (positions keep counting through them).
        positions_T: of the tokens; 0..T-1 unless given. cache: a KVCache (model/generate.py) with the earlier tokens.
        """
        mask = None if document_ids_BT is None else document_mask(document_ids_BT)
        positions = torch.arange(x.shape[1], device=x.device) if positions_T is None else positions_T
        if cache is not None:
            positions, mask = positions + cache.tokens, cache.mask(x.shape[1])
        rotary = rotary_tables(positions, self.arch.head_dim, self.arch.rope_theta)
        x_BTD = x if x.is_floating_point() or self.embed is None else self.embed(x)
        for index, block in self.blocks.items():
            x_BTD = block(x_BTD, rotary, mask, None if cache is None else cache.layers[int(index)])
        if self.norm is None:
            return x_BTD
        x_BTD = self.norm(x_BTD)
        head_VD = (self.head or self.embed).weight  # pyright: ignore[reportOptionalMemberAccess]
        if targets_BT is None:
            return self.readout.logits(x_BTD, head_VD)
        read = self.readout.nats if per_token else self.readout
        return read(x_BTD.flatten(0, 1), head_VD, targets_BT.flatten())
