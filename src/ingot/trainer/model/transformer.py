"""A decoder-only transformer like Llama. The model's code does not depend on ranks or parallelism.

Parameter names are `embed.weight`, `blocks.{i}.attention.q.weight`, `blocks.{i}.mlp.gate.weight` (in a block with
experts `blocks.{i}.moe.experts.gate.weight`, model/experts.py), ... `norm.weight` and `head.weight` (absent if tied).
Blocks are keyed by layer number, so names stay the same in a pipeline stage that holds some of the blocks.

Shape letters: B batch, T tokens, D d_model, V vocab_size.
"""

import torch
from torch import Tensor, nn

from ingot.plugins.layers import ATTENTIONS, BLOCKS, FEED_FORWARDS
from ingot.plugins.registry import resolve
from ingot.schema.arch import Arch
from ingot.trainer.model.attention import Attend, AttentionMaskSpec, attend_locally
from ingot.trainer.model.chosen import attention_of, feed_forward, require_declared, stream_norm
from ingot.trainer.model.experts import Dispatch, LocalDispatch, MoeLayer
from ingot.trainer.model.layers import rotary_tables
from ingot.trainer.model.loss import Readout
from ingot.trainer.model.routing import RouterLoss


class TransformerBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)) (Xiong et al. 2020). `moe` may replace `mlp`."""

    def __init__(self, arch: Arch, layer: int, attend: Attend, dispatch: Dispatch):
        super().__init__()
        self.attention_norm = stream_norm(arch)
        self.attention = attention_of(arch, attend)
        self.mlp_norm = stream_norm(arch)
        self.mlp = None if arch.has_experts(layer) else feed_forward(arch)
        self.moe = MoeLayer(arch, layer, dispatch) if arch.has_experts(layer) else None

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask_spec: AttentionMaskSpec,
        cache=None,
        router_loss: RouterLoss | None = None,
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, mask_spec, cache)
        if self.moe is not None:
            return x_BTD + self.moe(self.mlp_norm(x_BTD), mask_spec.positions_T, router_loss)
        assert self.mlp is not None
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


# The role of each parameter under tensor parallelism, by the end of its name. `column` matrices are split along the
# output dim, `row` matrices along the input dim, `vocab` matrices by token id. `kv` matrices are column matrices that
# may have fewer heads than there are ranks. `stream` weights act on the residual stream and `heads` weights on every
# head alike. Stacked `expert` matrices are not split by tensor parallelism: its ranks send their own tokens to experts.
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


def sharding_of(arch: Arch) -> dict[str, str]:
    """Return SHARDING with the roles of the layers that the model chooses."""
    own = {f"attention.{name}": role for name, role in ATTENTIONS[arch.attention].sharding.items()}
    own |= {f"mlp.{name}": role for name, role in FEED_FORWARDS[arch.feed_forward].sharding.items()}
    norms = (*BLOCKS[arch.block].norms, "norm")
    own |= {f"{name}.{leaf}": "stream" for name in norms for leaf in ("weight", "bias")}
    return {name: role for name, role in SHARDING.items() if not name.startswith("mlp.")} | own


class Transformer(nn.Module):
    """The model. Context and expert parallelism pass their own `attend` and `dispatch`.

    attend: the function that computes attention. dispatch: the transport of tokens to experts and back.
    A pipeline stage is a Transformer without the other stages' blocks, without `embed` unless it is the first stage,
    and without `norm` and `head` unless it is the last (a last stage with tied embeddings keeps `embed` as its head).
    """

    embed: nn.Embedding | None
    norm: nn.Module | None
    head: nn.Linear | None

    def __init__(self, arch: Arch, attend: Attend = attend_locally, dispatch: Dispatch | None = None):
        super().__init__()
        self.arch = arch
        # nn.Embedding's own normal_ imports the compiler on the meta device: 2 s for each rank. trunc_normal_ does not.
        first_values = nn.init.trunc_normal_(torch.empty(arch.vocab_size, arch.d_model))
        self.embed = nn.Embedding.from_pretrained(first_values, freeze=False)
        dispatch = dispatch or LocalDispatch()
        make_block = resolve(BLOCKS[arch.block].make)
        self.blocks = nn.ModuleDict({str(i): make_block(arch, i, attend, dispatch) for i in range(arch.num_layers)})
        self.norm = stream_norm(arch)
        self.head = None if arch.tied_embeddings else nn.Linear(arch.d_model, arch.vocab_size, bias=False)
        self.readout = Readout(arch)
        self.makes_plan = getattr(attend, "uses_plan", False)
        require_declared(self, arch)

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        cache=None,
        *,
        positions_T: Tensor | None = None,
        per_token: bool = False,
        router_loss: RouterLoss | None = None,
    ) -> Tensor:
        """Return the sum of nats over all B x T tokens or, without targets, logits [B, T, V] in the compute dtype.

        The sum is float32 (float64 in a float64 model); the loss is the sum divided by the number of tokens. A stage
        that is not the last returns hidden states [B, T, D].
        x: token ids [B, T]; on a stage that is not the first, hidden states [B, T, D] (with sequence parallelism a part
        of T). document_ids_BT: document numbers of the whole sequence, even if x is a part of it, on the host;
        attention stays inside documents, but positions do not restart. positions_T: the positions of the tokens that
        attention gets, ascending; by default 0..T-1. cache: a KVCache (model/generate.py) with the earlier tokens.
        per_token: return nats of every target, [B * T], without gradients. router_loss: the routers' inputs in
        training.
        """
        positions = torch.arange(x.shape[1], device=x.device) if positions_T is None else positions_T
        if cache is not None:
            positions = positions + cache.tokens
        mask_spec = AttentionMaskSpec(positions, document_ids_BT, self.arch.sliding_window)
        rotated = self.arch.mla.rope_dim if self.arch.is_mla else self.arch.head_dim
        rotary = rotary_tables(positions, rotated, self.arch.rope_theta)
        x_BTD = x if x.is_floating_point() or self.embed is None else self.embed(x)
        if self.makes_plan:
            keys = len(positions) + (0 if cache is None else cache.tokens)
            mask_spec = mask_spec.planned(keys, x_BTD, self.arch.head_dim)
        for index, block in self.blocks.items():
            layer_cache = None if cache is None else cache.layers[int(index)]
            x_BTD = block(x_BTD, rotary, mask_spec, layer_cache, router_loss)
        if self.norm is None:
            return x_BTD
        x_BTD = self.norm(x_BTD)
        head_VD = (self.head or self.embed).weight  # pyright: ignore[reportOptionalMemberAccess]
        if targets_BT is None:
            return self.readout.logits(x_BTD, head_VD)
        read = self.readout.nats if per_token else self.readout
        return read(x_BTD.flatten(0, 1), head_VD, targets_BT.flatten())
