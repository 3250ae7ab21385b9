"""Context parallelism: the ranks of the cp axis share the tokens of each sequence.

Only attention looks at other tokens. There the ranks are a grid: `ulysses` neighbours deal out heads among themselves
(parallel/ulysses.py), and rings across them pass keys and values on (parallel/ring.py); either side of the grid may
have size 1 (Fang & Zhao 2024). Which tokens a rank has is said in theory/context.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ingot.theory.context import rank_positions
from ingot.trainer.mesh.exchange import gather
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.ring import Ring
from ingot.trainer.parallel.ulysses import attend_by_heads


class TokenShare:
    """Which tokens of whole sequences are this rank's, and how whole ones are put together. Alone: all of them."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, mesh.size("cp")
        self._known: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Of this rank's tokens of sequences of `tokens`, ascending: int64 [tokens / cp]."""
        return self._places(tokens, device)[0]

    def own(self, x_BT: Tensor) -> Tensor:
        """This rank's tokens of whole sequences."""
        return x_BT if self.ranks == 1 else x_BT.index_select(1, self.positions(x_BT.shape[1], x_BT.device))

    def whole(self, x_BT: Tensor) -> Tensor:
        """Whole sequences, in order, from all ranks' tokens; [B, T / cp, ..] becomes [B, T, ..]. Collective over cp.

        Gradients do not pass.
        """
        if self.ranks == 1:
            return x_BT
        return self.in_order(gather(x_BT, 1, self.mesh.group("cp")))

    def in_order(self, by_rank_BT: Tensor) -> Tensor:
        """Whole sequences, by position, of which the tokens of all ranks lie side by side."""
        return by_rank_BT.index_select(1, self._places(by_rank_BT.shape[1], by_rank_BT.device)[1])

    def _places(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of this rank's tokens, and where each position lies when the tokens of all ranks lie side by side.

        The last ones are kept: a step asks for them again for every micro-batch.
        """
        key = tokens, torch.device(device)
        if key not in self._known:
            by_rank = [self._positions_of(index, tokens) for index in range(self.ranks)]
            own, places = by_rank[self.mesh.index("cp")], torch.cat(by_rank).argsort()
            self._known = {key: (own.to(device), places.to(device))}
        return self._known[key]

    def _positions_of(self, index: int, tokens: int) -> Tensor:
        parts = rank_positions(self.mesh.parallel, index, tokens)
        return torch.cat([torch.arange(part.start, part.stop, part.step) for part in parts])


class Context(TokenShare):
    """attend: what the model's attention is given. Everything else of a forward works on this rank's tokens alone.

    attend_locally: attention of whole sequences, (q_BNTH, k_BGTH, v_BGTH, sight) -> BNTH (model/attention.py).
    """

    attend: Callable[..., Tensor]

    def __init__(self, mesh: Mesh, attend_locally: Callable[..., Tensor]):
        super().__init__(mesh)
        self._attend_locally, self._ulysses = attend_locally, mesh.size("ulysses")
        self._sights: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of whole sequences, by that of this rank's
        self._ring = Ring(mesh.parallel, mesh.index("ring"), mesh.ranks("ring"), mesh.group("ring"))
        # A compiler sees no messages between ranks, and would move what lies between two of them: blocks are compiled
        # up to here and from here on.
        self.attend = attend_locally if self.ranks == 1 else torch.compiler.disable(self._attend)  # type: ignore

    def _attend(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, sight: Any) -> Tensor:
        """Of this rank's tokens, at sight.positions_T, to all tokens of their sequences."""
        attend = self._whole_sequences if len(self._ring.ranks) == 1 else self._ring.attend
        if self._ulysses == 1:
            return attend(q_BNTH, k_BGTH, v_BGTH, sight)
        return attend_by_heads(q_BNTH, k_BGTH, v_BGTH, partial(attend, sight=sight), self.mesh.group("ulysses"))

    def _whole_sequences(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, sight: Any) -> Tensor:
        if sight not in self._sights:  # one for all layers of a forward
            tokens = q_BNTH.shape[2]
            whole = replace(sight, positions_T=torch.arange(tokens, device=q_BNTH.device))
            self._sights[sight] = whole.prepared(tokens, q_BNTH.dtype)
        return self._attend_locally(q_BNTH, k_BGTH, v_BGTH, self._sights[sight])
