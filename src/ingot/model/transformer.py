"""A decoder-only transformer of the Llama kind. It knows no rank and no parallelism.

Parameter names are `embed.weight`, `blocks.{i}.attention.q.weight`, `blocks.{i}.mlp.gate.weight`, ... `norm.weight` and
`head.weight` (absent when tied). Blocks are keyed by layer number, so a name stays the same when a pipeline stage holds
only some of them.

Shape letters: B batch, T tokens, D d_model, V vocab_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.attention import Attend, Attention, attend_locally, document_mask
from ingot.model.layers import RMSNorm, SwiGLU, rotary_tables
from ingot.model.loss import CrossEntropy
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


class Transformer(nn.Module):
    """attend: how queries meet keys and values; context parallelism passes another one."""

    def __init__(self, arch: Arch, attend: Attend = attend_locally):
        super().__init__()
        self.arch = arch
        self.embed = nn.Embedding(arch.vocab_size, arch.d_model)
        self.blocks = nn.ModuleDict({str(i): Block(arch, attend) for i in range(arch.num_layers)})
        self.norm = RMSNorm(arch.d_model, arch.norm_eps)
        self.head = None if arch.tied_embeddings else nn.Linear(arch.d_model, arch.vocab_size, bias=False)
        self.cross_entropy = CrossEntropy()

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        cache=None,
    ) -> Tensor:
        """Without targets: logits [B, T, V] in the compute dtype. With targets: the sum of nats over all B x T tokens.

        The sum is float32 (float64 in a float64 model); divide by the number of tokens for the loss.
        document_ids_BT: attention does not cross document borders (positions keep counting through them).
        cache: a KVCache (model/generate.py) that holds the earlier tokens.
        """
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        mask = None if document_ids_BT is None else document_mask(document_ids_BT)
        if cache is not None:
            positions_T, mask = positions_T + cache.tokens, cache.mask(tokens_BT.shape[1])
        rotary = rotary_tables(positions_T, self.arch.head_dim, self.arch.rope_theta)
        x_BTD = self.embed(tokens_BT)
        for index, block in self.blocks.items():
            x_BTD = block(x_BTD, rotary, mask, None if cache is None else cache.layers[int(index)])
        x_BTD = self.norm(x_BTD)
        head_VD = self.embed.weight if self.head is None else self.head.weight
        if targets_BT is None:
            return F.linear(x_BTD, head_VD)
        return self.cross_entropy(x_BTD.flatten(0, 1), head_VD, targets_BT.flatten())
