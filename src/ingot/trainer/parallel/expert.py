"""Expert parallelism: experts are divided among the ranks of the ep view, and tokens travel to them and back (Lepikhin
et al. 2021, section 3.2).

A layer has two all-to-alls, rows to the experts and results back, and in the backward the same two for gradients. A
small all-to-all of counts goes first, from device to device, because a rank has to know how many rows arrive. How many
rows each all-to-all has, the host must know as well:

    with a capacity   blocks of a fixed size for each rank, if most of their rows can be in use: no wait of the host
    otherwise         the host waits once, for the counts of both directions

A block that is recomputed takes the numbers that the host got in its forward, and does not wait for them again.

Each all-to-all starts at one place in the code and is waited for at another, so that the work between the two places
overlaps with it:

    rows       forward: `send` starts, `arrive` waits         backward: that of `arrive` starts, that of `send` waits
    results    forward: `send_back` starts, `arrive` waits    backward: likewise

Rows arrive sorted by sender and then by expert; experts need them sorted by expert.

Shape letters: M tokens, R rows sent from here, A rows that arrive here, D d_model, E experts, L experts of one rank,
S ranks that share experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.theory.layout import fixed_expert_rows
from ingot.trainer.mesh.collectives import finish, gather, start_all_to_all
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.context import TokenShare
from ingot.trainer.parallel.turns import pass_turn


def dispatch_of(mesh: Mesh, local: Any) -> Any:
    """Return `local` if this rank has all experts and whole sequences, otherwise an ExpertDispatch."""
    return local if mesh.size("ep") == mesh.size("sequence") == 1 else ExpertDispatch(mesh, local)


class ExpertDispatch:
    """The Dispatch (model/experts.py) of ranks that share sequences, experts or both.

    local: the LocalDispatch, used if every rank has all experts, and for what both have in common.
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

    def send(self, x_MD: Tensor, routing: Any) -> Any:
        if self.mesh.size("ep") == 1:
            return self.local.send(x_MD, routing)
        ordered = self.local.sorted(routing)
        (tokens, top_k), ranks = routing.experts_MK.shape, self.group.size()
        fixed = fixed_expert_rows(tokens, top_k, ranks, routing.experts, routing.most_rows, routing.even_rows)
        if routing.kept_MK is not None and fixed is not None:
            rows, route = ordered.in_blocks(ranks, fixed), self._fixed_route(ordered.counts_E, fixed)
        else:
            route = self._counted_route(ordered.counts_E, routing.experts_MK.numel())
            rows = ordered.first(sum(route.sent), exactly=True)
        x_RD = self.local.token_rows(x_MD, rows)
        return _ArrivingRows(PendingAllToAll.start(x_RD, route), rows, routing.weights_MK)

    def send_back(self, made_AD: Tensor, sent: Any) -> Any:
        if self.mesh.size("ep") == 1:
            return self.local.send_back(made_AD, sent)
        route = sent.pending.route
        made_AD = _Reorder.apply(made_AD, route.place_A, route.order_A)
        return _ReturningRows(PendingAllToAll.start(made_AD, route.back), sent, self.local)

    def _exchanged(self, counts_E: Tensor) -> Tensor:
        """Return the number of rows that arrive here per sender and local expert: int64 [S, L], on the device."""
        ranks = self.group.size()
        each = [len(counts_E) // ranks] * ranks
        return finish(start_all_to_all(counts_E, each, each, self.group)).view(ranks, -1)

    def _counted_route(self, counts_E: Tensor, assignments: int) -> "Route":
        """Return the route of exactly the rows that are kept. The host waits for the counts."""
        ranks, arriving_SL = self.group.size(), self._exchanged(counts_E)
        both = torch.cat((counts_E.view(ranks, -1).sum(1), arriving_SL.flatten()))
        numbers = self.local.once(lambda: self.local.on_host(both, assignments, "exchanged"))
        sent, each = numbers[:ranks], arriving_SL.shape[1]
        by_sender = [numbers[ranks + rank * each : ranks + (rank + 1) * each] for rank in range(ranks)]
        received, own = [sum(counts) for counts in by_sender], [sum(counts) for counts in zip(*by_sender, strict=True)]
        experts = torch.arange(each, device=counts_E.device).repeat(ranks)
        order_A = experts.repeat_interleave(arriving_SL.flatten(), output_size=sum(received)).argsort(stable=True)
        counts = self.local.counts(arriving_SL.sum(0), sum(received), own)
        return Route(self.group, sent, received, counts, order_A, order_A.argsort())

    def _fixed_route(self, counts_E: Tensor, rows: int) -> "Route":
        """Return the route of blocks of `rows` rows. Fill in blocks that arrive is sorted after all rows."""
        ranks, arriving_SL = self.group.size(), self._exchanged(counts_E)
        places = torch.arange(rows, device=counts_E.device).repeat(ranks, 1)
        experts_A = torch.searchsorted(arriving_SL.cumsum(1), places, right=True).flatten()  # L for fill
        order_A = experts_A.argsort(stable=True)
        counts = self.local.counts(arriving_SL.sum(0), ranks * rows, has_fill=True)
        return Route(self.group, [rows] * ranks, [rows] * ranks, counts, order_A, order_A.argsort())


@dataclass(frozen=True)
class Route:
    """The numbers and the order of rows in one all-to-all.

    sent, received: the number of rows for each ep rank. counts: the ExpertCounts (model/experts.py) of the rows that
    arrive. order_A: the index that sorts arrived rows by expert. place_A: its inverse.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    counts: Any
    order_A: Tensor
    place_A: Tensor

    @property
    def back(self) -> "Route":
        return Route(self.group, self.received, self.sent, self.counts, self.place_A, self.order_A)


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
        pass_turn(in_forward=True)
        result, self.result = self.result, None  # else it would keep alive the graph that holds this object
        return _Arrive.apply(result, self)


@dataclass(frozen=True)
class _ArrivingRows:
    pending: PendingAllToAll
    rows: Any
    weights_MK: Tensor

    def arrive(self) -> tuple[Tensor, Any]:
        route = self.pending.route
        return _Reorder.apply(self.pending.arrive(), route.order_A, route.place_A), route.counts


@dataclass(frozen=True)
class _ReturningRows:
    pending: PendingAllToAll
    sent: _ArrivingRows
    local: Any

    def arrive(self) -> Tensor:
        return self.local.combine(self.pending.arrive(), self.sent.weights_MK, self.sent.rows)


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
        pass_turn()
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
