"""Attention and feed-forward side by side, from one norm (Wang & Komatsuzaki 2021, GPT-J; Chowdhery et al. 2022, PaLM).

Run file: model.block = "parallel".
"""

from ingot.plugins.layers import BLOCKS, BlockPart
from ingot.trainer.model.transformer import TransformerBlock


class ParallelBlock(TransformerBlock):
    def __init__(self, arch, layer, attend, dispatch):
        super().__init__(arch, layer, attend, dispatch)
        del self.mlp_norm

    def forward(self, x, rotary, mask_spec, cache=None, router_loss=None):
        normed = self.attention_norm(x)
        x = x + self.attention(normed, rotary, mask_spec, cache)
        if self.moe is not None:
            return x + self.moe(normed, mask_spec.positions_T, router_loss)
        return x + self.mlp(normed)


BLOCKS.register(BlockPart(name="parallel", make=ParallelBlock, norms=("attention_norm",), one_input=True))
