"""Expert parallelism: experts are divided among the ranks of the ep view, and tokens travel to them and back (Lepikhin
et al. 2021, section 3.2).

A layer has two all-to-alls, rows to the experts and results back, and in the backward the same two for gradients. A
small all-to-all of counts goes first, because a rank has to know how many rows arrive. Each all-to-all starts at one
place in the code and is waited for at another, so that the work between the two places overlaps with it:

    rows       forward: `send` starts, `arrive` waits         backward: that of `arrive` starts, that of `send` waits
    results    forward: `send_back` starts, `arrive` waits    backward: likewise

Rows arrive sorted by sender and then by expert; experts need them sorted by expert.

Shape letters: R rows sent from here, A rows that arrive here, D d_model, L experts of one rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.trainer.mesh.collectives import finish, gather, start_all_to_all
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.context import TokenShare


def dispatch_of(mesh: Mesh, local: Any) -> Any:
    """Return `local` if this rank has all experts and whole sequences, otherwise an ExpertDispatch."""
    return local if mesh.size("ep") == mesh.size("sequence") == 1 else ExpertDispatch(mesh, local)


class ExpertDispatch:
    """The Dispatch (model/experts.py) of ranks that share sequences, experts or both.

    local: the LocalDispatch, used if every rank has all experts.
    """

    def __init__(self, mesh: Mesh, local: Any):
        self.mesh, self.local, self.group = mesh, local, mesh.group("ep")
        self.share = TokenShare(mesh)

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        """Return this tp rank's chunk of the values: of attention's T tokens, each tp rank routes one chunk."""
        return per_token_T.chunk(self.mesh.size("tp"))[self.mesh.index("tp")]

    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        """Gather [B, T / (cp x tp), K] of every rank into [B, T, K], in order of position. No gradients."""
        if self.mesh.size("sequence") == 1:
            return per_token_BTK
        by_rank = gather(per_token_BTK, 1, self.mesh.group("sequence"))
        return self.share.in_order(by_rank)  # tp divides a cp rank's tokens in their order

    def send(self, rows_RD: Tensor, counts: list[int]) -> Any:
        if self.mesh.size("ep") == 1:
            return self.local.send(rows_RD, counts)
        route = self._route(counts, rows_RD.device)
        return _ArrivingRows(PendingAllToAll.start(rows_RD, route))

    def send_back(self, made_AD: Tensor, sent: Any) -> Any:
        if self.mesh.size("ep") == 1:
            return self.local.send_back(made_AD, sent)
        route = sent.pending.route
        return PendingAllToAll.start(_Reorder.apply(made_AD, route.place_A, route.order_A), route.back)

    def _route(self, counts: list[int], device: torch.device) -> "Route":
        """Exchange row counts and wait for the other ranks' counts. counts: this rank's rows for each expert."""
        ranks = self.group.size()
        each = len(counts) // ranks
        own_counts = torch.tensor(counts, device=device)
        arriving = finish(start_all_to_all(own_counts, [each] * ranks, [each] * ranks, self.group))
        numbers = self.local.on_host(arriving, sum(counts), "arriving")
        received = [sum(numbers[rank * each : (rank + 1) * each]) for rank in range(ranks)]
        of_own = torch.tensor([sum(numbers[expert::each]) for expert in range(each)])
        experts = torch.arange(each, device=device).repeat(ranks).repeat_interleave(arriving, output_size=sum(received))
        order_A = experts.argsort(stable=True)
        sent = [sum(counts[rank * each : (rank + 1) * each]) for rank in range(ranks)]
        return Route(self.group, sent, received, of_own, order_A, order_A.argsort())


@dataclass(frozen=True)
class Route:
    """The numbers and the order of rows in one all-to-all.

    sent, received: the number of rows for each ep rank. counts_L: the number of arrived rows for each expert, on the
    CPU. order_A: the index that sorts arrived rows by expert. place_A: its inverse.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    counts_L: Tensor
    order_A: Tensor
    place_A: Tensor

    @property
    def back(self) -> "Route":
        return Route(self.group, self.received, self.sent, self.counts_L, self.place_A, self.order_A)


class PendingAllToAll:
    """An all-to-all in flight. result: the arriving rows. gradient: in the backward, the gradient of the sent rows.

    The gradients of `result` and of the sent rows differ in the number of rows. The latter is therefore passed on in
    this object instead of through autograd, which gets a zero expanded to the shape of the former.
    """

    def __init__(self, route: Route):
        self.route, self.gradient = route, None
        self.result: Any = None

    @classmethod
    def start(cls, rows: Any, route: Route) -> "PendingAllToAll":
        pending = cls(route)
        pending.result = _Send.apply(rows, pending)
        return pending

    def arrive(self) -> Tensor:
        result, self.result = self.result, None  # else it would keep alive the graph that holds this object
        return _Arrive.apply(result, self)


@dataclass(frozen=True)
class _ArrivingRows:
    pending: PendingAllToAll

    def arrive(self) -> tuple[Tensor, Tensor]:
        route = self.pending.route
        return _Reorder.apply(self.pending.arrive(), route.order_A, route.place_A), route.counts_L


class _Send(torch.autograd.Function):
    """The start of an all-to-all. The backward waits for the gradient that the backward of `_Arrive` started.

    Autograd runs later operations first, so the backward of the model's work between the two runs in the meantime.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, pending: PendingAllToAll):
        ctx.pending, route = pending, pending.route
        return start_all_to_all(rows, route.received, route.sent, route.group)

    @staticmethod
    def backward(ctx, *grads):
        gradient, ctx.pending.gradient = ctx.pending.gradient, None
        return finish(gradient), None


class _Arrive(torch.autograd.Function):
    """The wait for an all-to-all. The backward starts the all-to-all of gradients."""

    @staticmethod
    def forward(ctx, result: Tensor, pending: PendingAllToAll):
        ctx.pending = pending
        return finish(result).view_as(result)

    @staticmethod
    def backward(ctx, *grads):
        (gradient,), route = grads, ctx.pending.route
        ctx.pending.gradient = start_all_to_all(gradient, route.sent, route.received, route.group)
        return gradient.new_zeros(()).expand_as(gradient), None


class _Reorder(torch.autograd.Function):
    """The rows in another order, rows[order]. The backward gathers by `back`, the inverse order; the usual backward of
    indexing would add into zeros."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor):
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, *grads):
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None
