"""LayerNorm with a bias (Ba et al. 2016) instead of RMSNorm. Run file: model.norm = "layer"."""

from torch import nn

from ingot.plugins.layers import NORMS, NormPart


def make(dim, eps, options):
    return nn.LayerNorm(dim, eps)


NORMS.register(NormPart(name="layer", make=make, vectors=2, saved=1))  # weight and bias; keeps its input
