"""Context parallelism: the ranks of the cp axis share the tokens of each sequence."""

from collections.abc import Callable

import torch
from torch import Tensor

from ingot.dist.mesh import Mesh


class Context:
    """attend: what the model's attention is given. Everything else of a forward works on this rank's tokens alone."""

    def __init__(self, mesh: Mesh, attend_locally: Callable[..., Tensor]):
        self.mesh, self.attend = mesh, attend_locally

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Of this rank's tokens of sequences of `tokens`, ascending: int64 [tokens / cp]."""
        return torch.arange(tokens, device=device)

    def own(self, x_BT: Tensor) -> Tensor:
        """This rank's tokens of whole sequences."""
        return x_BT

    def whole(self, x_BT: Tensor) -> Tensor:
        """Whole sequences, in order, from all ranks' tokens; [B, T / cp, ..] becomes [B, T, ..]. Collective over cp."""
        return x_BT
