"""Rows travel to the ranks of their experts and back, for any numbers of rows, forward and backward."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ingot.schema.parallel import Parallel
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.model import experts
from ingot.trainer.model.experts import LocalDispatch
from ingot.trainer.parallel.context import ContextParallelism
from ingot.trainer.parallel.expert import ExpertDispatch, dispatch_of

EXPERTS, WIDTH = 6, 4
LOADS = {
    "uneven": lambda rank, ranks: [(7 * rank + 3 * e) % 5 for e in range(EXPERTS)],
    "one rank without rows": lambda rank, ranks: [0 if rank == 1 else e for e in range(EXPERTS)],
    "all to the last expert": lambda rank, ranks: [0] * (EXPERTS - 1) + [3 + rank],
    "no rows": lambda rank, ranks: [0] * EXPERTS,
}


def rows_of(rank: int, counts: list[int]) -> Tensor:
    """Each says who sent it, for which expert, and where it lay."""
    of_experts = [(e, place) for e, n in enumerate(counts) for place in range(n)]
    rows = [[rank, e, place, 1.0] for e, place in of_experts]
    return torch.tensor(rows, dtype=torch.float64).view(-1, WIDTH)


def there_and_back(rank, ranks, load):
    """Return the rows that arrived, their number for each expert, the results that came back, and the gradient of the
    rows. An expert multiplies by its number + 1."""
    dispatch = dispatch_of(build_mesh(Parallel(dp_shard=ranks, ep=ranks), "cpu", experts=True), LocalDispatch())
    counts = LOADS[load](rank, ranks)
    rows = rows_of(rank, counts).requires_grad_()
    sent = dispatch.send(rows * 1, counts)
    arrived, counts_L = sent.arrive()
    made = arrived * (arrived[:, 1:2].detach() + 1)
    back = dispatch.send_back(made, sent).arrive()
    (back * rows.detach()).sum().backward()
    assert rows.grad is not None
    return arrived.detach().numpy(), counts_L.tolist(), back.detach().numpy(), rows.grad.numpy()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_arrive_by_expert_and_return_in_their_order(fork_ranks, ranks, load):
    each = EXPERTS // ranks
    sent = [LOADS[load](rank, ranks) for rank in range(ranks)]
    for rank, (arrived, counts, back, gradient) in enumerate(fork_ranks(there_and_back, ranks, load)):
        own = range(rank * each, (rank + 1) * each)
        expected = [(source, e, i) for e in own for source in range(ranks) for i in range(sent[source][e])]
        assert [tuple(row) for row in arrived[:, :3].astype(int).tolist()] == expected
        assert counts == [sum(of_rank[e] for of_rank in sent) for e in own]
        rows = rows_of(rank, sent[rank]).numpy()
        times = rows * (rows[:, 1:2] + 1)
        assert np.array_equal(back, times)
        assert np.array_equal(gradient, times)  # of rows * factor * rows, the last one held fast


@pytest.mark.parametrize(
    "layout, degrees",
    [
        ("zigzag", {"cp": 2, "tp": 2}),
        ("striped", {"cp": 2}),
        ("contiguous", {"tp": 2}),
        ("zigzag", {"cp": 4, "ulysses": 2}),
        ("striped", {"cp": 4, "ulysses": 2}),
    ],
)
def test_sequences_are_put_together_by_position(fork_ranks, layout, degrees):
    parallel = Parallel(**{"ulysses": 1} | degrees, context="usp", context_layout=layout)
    tokens = 16

    def together(rank, ranks):
        mesh = build_mesh(parallel, "cpu", experts=True)
        dispatch = dispatch_of(mesh, LocalDispatch())
        own_T = dispatch.own_tokens(
            ContextParallelism(mesh, lambda *_: torch.empty(0)).positions(tokens, torch.device("cpu"))
        )
        per_token = torch.stack((own_T, own_T * 10), dim=-1)
        return own_T.tolist(), dispatch.whole_sequences(torch.stack((per_token, -per_token))).tolist()

    found = fork_ranks(together, parallel.world_size)
    assert sorted(position for own, _ in found for position in own) == list(range(tokens))
    for own_T, (first, second) in found:
        assert len(own_T) == tokens // parallel.world_size
        assert first == [[i, 10 * i] for i in range(tokens)]
        assert second == [[-i, -10 * i] for i in range(tokens)]


@pytest.mark.parametrize(
    "degrees, divided", [({"dp_shard": 2}, False), ({"dp_shard": 2, "ep": 2}, True), ({"tp": 2}, True)]
)
def test_only_who_shares_something_needs_more_than_local_dispatch(fork_ranks, degrees, divided):
    def kind(rank, ranks):
        local = LocalDispatch()
        found = dispatch_of(build_mesh(Parallel(**degrees), "cpu", experts=True), local)
        return isinstance(found, ExpertDispatch), found is local

    assert fork_ranks(kind, 2) == [(divided, not divided)] * 2


def test_the_host_waits_once_for_both_directions(fork_ranks, monkeypatch):
    calls = []
    monkeypatch.setattr(experts, "on_host", lambda counts, balanced, kind: calls.append(balanced) or counts.tolist())

    def waits(rank, ranks):
        there_and_back(rank, ranks, "uneven")
        return calls

    assert fork_ranks(waits, 2) == [[sum(LOADS["uneven"](rank, 2))] for rank in range(2)]
