"""Attention whose result is gated by its input (Qiu et al. 2025). Run file: model.attention = "gated"."""

from torch import nn

from ingot.plugins.layers import ATTENTIONS, AttentionPart
from ingot.trainer.model.attention import Attention


class GatedAttention(Attention):
    def __init__(self, arch, attend):
        super().__init__(arch, attend)
        self.gate = nn.Linear(arch.d_model, arch.num_heads * arch.head_dim, bias=False)

    def output(self, x, attended):  # [B, T, D], [B, T, heads of this rank x head_dim]
        return self.o(attended * self.gate(x).sigmoid())


ATTENTIONS.register(
    AttentionPart(
        name="gated",
        make=lambda arch, attend, options: GatedAttention(arch, attend),
        sharding={"gate.weight": "column"},
        matrices=lambda arch, options: [(arch.num_heads * arch.head_dim, arch.d_model)],
        saved=lambda arch, options: 2 * arch.num_heads * arch.head_dim,  # the gate and the gated result
    )
)
