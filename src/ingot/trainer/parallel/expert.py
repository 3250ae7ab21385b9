"""Expert parallelism: experts are divided among the ranks of the ep view, and tokens travel to them and back (Lepikhin
et al. 2021, section 3.2).

A layer has two all-to-alls, rows there and results back, and the same two of gradients in the backward; a small one of
counts goes before, because a rank has to know how much comes. Each is started at one place and waited for at another,
so that what stands between them computes meanwhile:

    forward    send starts, arrive waits               send_back starts, its arrive waits
    backward   (arrive) starts, (send) waits           the same: autograd runs them from the end

Rows arrive by sender and, of each sender, by expert; experts want them by expert.

Shape letters: R rows sent from here, A rows that arrive here, D d_model, L experts of one rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.trainer.mesh.exchange import finish, gather, start_all_to_all
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.context import TokenShare


def dispatch_of(mesh: Mesh, local: Any) -> Any:
    """What the model's experts are given on this rank: `local` where one rank has them all and whole sequences."""
    return local if mesh.size("ep") == mesh.size("sequence") == 1 else ExpertDispatch(mesh, local)


def on_host(counts: Tensor, balanced: int) -> list[int]:
    """The host waits for numbers of rows, int64 [n], without which it cannot size what comes next.

    balanced: their sum if all experts had the same load; a trace, which has no numbers, takes its share of it.
    """
    return counts.tolist()


class ExpertDispatch:
    """The protocol of model/moe.py for ranks that share sequences, experts or both. local: sends rows where a rank has
    all experts."""

    def __init__(self, mesh: Mesh, local: Any):
        self.mesh, self.local, self.group = mesh, local, mesh.group("ep")
        self.share = TokenShare(mesh)

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        """Under sequence parallelism the experts' part of a block has one of tp chunks."""
        return per_token_T.chunk(self.mesh.size("tp"))[self.mesh.index("tp")]

    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        """[B, T / (cp x tp), K] of every rank become [B, T, K], by position. Gradients do not pass."""
        if self.mesh.size("sequence") == 1:
            return per_token_BTK
        return self.share.in_order(gather(per_token_BTK, 1, self.mesh.group("sequence")))  # tp cuts a rank's in order

    def send(self, rows_RD: Tensor, counts: list[int]) -> Any:
        if self.mesh.size("ep") == 1:
            return self.local.send(rows_RD, counts)
        route = _route(counts, self.group, rows_RD.device)
        return _Arriving(Flight.of(rows_RD, route))

    def send_back(self, made_AD: Tensor, sent: Any) -> Any:
        if self.mesh.size("ep") == 1:
            return self.local.send_back(made_AD, sent)
        route = sent.flight.route
        return Flight.of(_Reorder.apply(made_AD, route.place_A, route.order_A), route.back)


@dataclass(frozen=True)
class Route:
    """Who sends how many rows to whom. sent, received: by ep rank. counts_L: on the host, of what arrived, by expert.
    order_A: brings what arrived from the order of senders to that of experts, place_A back."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    counts_L: Tensor
    order_A: Tensor
    place_A: Tensor

    @property
    def back(self) -> "Route":
        return Route(self.group, self.received, self.sent, self.counts_L, self.place_A, self.order_A)


def _route(counts: list[int], group: dist.ProcessGroup, device: torch.device) -> Route:
    """counts: of this rank's rows for each expert. Waits for the other ranks' ones."""
    ranks = group.size()
    each = len(counts) // ranks
    given = torch.tensor(counts, device=device)
    coming = finish(start_all_to_all(given, [each] * ranks, [each] * ranks, group))
    numbers = on_host(coming, balanced=sum(counts))
    received = [sum(numbers[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    of_own = torch.tensor([sum(numbers[expert::each]) for expert in range(each)])
    experts = torch.arange(each, device=device).repeat(ranks).repeat_interleave(coming, output_size=sum(received))
    order_A = experts.argsort(stable=True)
    sent = [sum(counts[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    return Route(group, sent, received, of_own, order_A, order_A.argsort())


class Flight:
    """An all-to-all on its way. pending: its result; gradient: in the backward, that of what was sent, on its way too.

    The gradient of `pending` is not what comes back by another all-to-all, which has another number of rows, so that
    travels here, past autograd, which gets a tensor without memory in its place.
    """

    def __init__(self, route: Route):
        self.route, self.gradient = route, None
        self.pending: Any = None

    @classmethod
    def of(cls, rows: Any, route: Route) -> "Flight":
        flight = cls(route)
        flight.pending = _Send.apply(rows, flight)
        return flight

    def arrive(self) -> Tensor:
        pending, self.pending = self.pending, None  # else it would keep the graph alive that holds it
        return _Arrive.apply(pending, self)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Arriving:
    flight: Flight

    def arrive(self) -> tuple[Tensor, Tensor]:
        route = self.flight.route
        return _Reorder.apply(self.flight.arrive(), route.order_A, route.place_A), route.counts_L  # type: ignore


class _Send(torch.autograd.Function):
    """Starts. In the backward `_Arrive` has started its gradient, and this one waits: autograd runs what was recorded
    later first, so that what the model did between the two has had its turn."""

    @staticmethod
    def forward(ctx, rows: Tensor, flight: Flight):
        ctx.flight, route = flight, flight.route
        return start_all_to_all(rows, route.received, route.sent, route.group)

    @staticmethod
    def backward(ctx, *grads):
        gradient, ctx.flight.gradient = ctx.flight.gradient, None
        return finish(gradient), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pending: Tensor, flight: Flight):
        ctx.flight = flight
        return finish(pending).view_as(pending)

    @staticmethod
    def backward(ctx, *grads):
        (gradient,), route = grads, ctx.flight.route
        ctx.flight.gradient = start_all_to_all(gradient, route.sent, route.received, route.group)
        return gradient.new_zeros(()).expand_as(gradient), None


class _Reorder(torch.autograd.Function):
    """rows[order]; the backward takes rows as well, where that of an index would add into zeros. back: its inverse."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor):
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, *grads):
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None
