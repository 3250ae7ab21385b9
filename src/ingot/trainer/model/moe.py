"""A mixture of experts in place of the feed-forward (Shazeer et al. 2017; Fedus et al. 2021; DeepSeek-AI 2024).

Who takes a token is in model/routing.py, what experts do in model/experts.py; here they meet.

Shape letters: B batch, T tokens, M = B x T, D d_model, E experts, K experts of a token, F d_expert, R rows on their way
to experts (at most M x K).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ingot.schema.arch import Arch
from ingot.trainer.model.experts import Experts, combine, deal, spread
from ingot.trainer.model.layers import SwiGLU
from ingot.trainer.model.routing import Pressure, Router, Sequences


class Arriving(Protocol):
    def arrive(self) -> tuple[Tensor, Tensor]:
        """Wait for rows [R', D] for the experts of this rank, expert by expert, and how many each has [E'], on the
        host."""
        ...


class Returning(Protocol):
    def arrive(self) -> Tensor:
        """Wait for what experts made of the rows that were sent [R, D], in the order they were sent in."""
        ...


class Dispatch(Sequences, Protocol):
    """How tokens come to experts and back; expert parallelism has another one (parallel/expert.py)."""

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        """Of a value for each token that attention sees, those of the tokens that experts see here."""
        ...

    def send(self, rows_RD: Tensor, counts: list[int]) -> Arriving:
        """Start sending rows, expert by expert, counts[e] of them to expert e."""
        ...

    def send_back(self, made_RD: Tensor, sent: Arriving) -> Returning:
        """Start sending back what was made of what arrived."""
        ...


@dataclass(frozen=True)
class _Here:
    rows_RD: Tensor
    counts_E: Tensor

    def arrive(self) -> tuple[Tensor, Tensor]:
        return self.rows_RD, self.counts_E


@dataclass(frozen=True)
class _Back:
    rows_RD: Tensor

    def arrive(self) -> Tensor:
        return self.rows_RD


class LocalDispatch:
    """All experts and whole sequences are here."""

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        return per_token_T

    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        return per_token_BTK

    def send(self, rows_RD: Tensor, counts: list[int]) -> Arriving:
        return _Here(rows_RD, torch.tensor(counts))

    def send_back(self, made_RD: Tensor, sent: Arriving) -> Returning:
        return _Back(made_RD)


class Moe(nn.Module):
    """sum over a token's experts of weight x expert(x), plus shared(x) if there are shared experts."""

    def __init__(self, arch: Arch, layer: int, dispatch: Dispatch):
        super().__init__()
        moe = arch.moe
        self.moe, self.dispatch = moe, dispatch
        self.router = Router(arch, layer, dispatch)
        self.experts = Experts(moe.num_experts, arch.d_model, moe.d_expert)
        self.shared = SwiGLU(arch.d_model, moe.shared_experts * moe.d_expert) if moe.shared_experts else None
        self.fallback = SwiGLU(arch.d_model, moe.d_expert) if moe.has_fallback else None

    def forward(self, x_BTD: Tensor, positions_T: Tensor, pressure: Pressure | None = None) -> Tensor:
        """positions_T: of all tokens that attention sees here. Returns [B, T, D]."""
        routing = self.router(x_BTD, self.dispatch.own_tokens(positions_T), pressure)
        rows, counts, left = deal(routing, self.moe)
        x_MD = x_BTD.flatten(0, 1)
        sent = self.dispatch.send(spread(x_MD, rows), counts)
        shared = self.shared(x_BTD) if self.shared is not None else None  # while rows are on their way
        back = self.dispatch.send_back(self.experts(*sent.arrive()), sent)
        y_MD = combine(back.arrive(), routing.weights_MK, rows)
        if self.fallback is not None and left is not None:
            y_MD = y_MD + combine(self.fallback(spread(x_MD, left)), routing.weights_MK, left)
        y_BTD = y_MD.view_as(x_BTD)
        return y_BTD if shared is None else y_BTD + shared
