"""Rows travel to the ranks of their experts and back, for any numbers of rows, forward and backward."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ingot.schema.parallel import Parallel
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.model import experts
from ingot.trainer.model.experts import LocalDispatch
from ingot.trainer.model.routing import Routing
from ingot.trainer.parallel import expert
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


def routing_of(counts: list[int], room: int) -> Routing:
    """One choice for each token: counts[e] tokens choose expert e. room: with 0, no capacity; otherwise every fifth
    token is beyond the capacity, and no expert keeps more than `room` tokens."""
    chosen_M1 = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))[:, None]
    kept_M1 = torch.arange(len(chosen_M1))[:, None] % 5 != 3 if room else None
    weights_M1 = torch.ones_like(chosen_M1, dtype=torch.float64)
    return Routing(chosen_M1, weights_M1, kept_M1, EXPERTS, room or len(chosen_M1), room)


def there_and_back(rank, ranks, load, room=0):
    """Return the rows that arrived, their number for each expert, the results that came back, and the gradient of the
    rows. An expert multiplies by its number + 1. Tokens beyond the capacity come back as zeros."""
    dispatch = dispatch_of(build_mesh(Parallel(dp_shard=ranks, ep=ranks), "cpu", experts=True), LocalDispatch())
    counts = LOADS[load](rank, ranks)
    rows = rows_of(rank, counts).requires_grad_()
    sent = dispatch.send(rows * 1, routing_of(counts, room))
    arrived, counts_L = sent.arrive()
    made = arrived * (arrived[:, 1:2].detach() + 1)
    back = dispatch.send_back(made, sent).arrive()
    (back * rows.detach()).sum().backward()
    assert rows.grad is not None
    return arrived.detach().numpy(), counts_L.counts_E.tolist(), back.detach().numpy(), rows.grad.numpy()


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


@pytest.mark.parametrize("load, fixed", [("uneven", True), ("all to the last expert", True), ("uneven", False)])
def test_blocks_of_a_fixed_size_carry_what_is_kept(fork_ranks, monkeypatch, load, fixed):
    """Blocks of a capacity have zeros after their rows, which the last expert takes. If blocks were too large, the rows
    that are kept travel alone: the results are the same."""
    ranks, each, rows = 2, EXPERTS // 2, 20
    monkeypatch.setattr(expert, "fixed_expert_rows", lambda *_: rows if fixed else None)
    kept = [(torch.arange(sum(LOADS[load](rank, ranks))) % 5 != 3).numpy() for rank in range(ranks)]
    sent = [rows_of(rank, LOADS[load](rank, ranks)).numpy() for rank in range(ranks)]
    for rank, (arrived, counts, back, gradient) in enumerate(fork_ranks(there_and_back, ranks, load, 5)):
        own = range(rank * each, (rank + 1) * each)
        expected = [
            tuple(row[:3].astype(int))
            for e in own
            for source in range(ranks)
            for row in sent[source][kept[source] & (sent[source][:, 1] == e)]
        ]
        found = [tuple(row) for row in arrived[:, :3].astype(int).tolist()]
        assert found[: len(expected)] == expected
        assert len(found) == (ranks * rows if fixed else len(expected)) == sum(counts)
        assert not arrived[len(expected) :].any()
        assert counts[:-1] == [sum(row[1] == e for row in expected) for e in own][:-1]
        times = sent[rank] * (sent[rank][:, 1:2] + 1) * kept[rank][:, None]
        assert np.array_equal(back, times)
        assert np.array_equal(gradient, times)


@pytest.mark.parametrize("room, waits", [(0, 1), (5, 0)])
def test_the_host_waits_once_for_both_directions_and_not_with_a_capacity(fork_ranks, monkeypatch, room, waits):
    calls = []
    monkeypatch.setattr(expert, "fixed_expert_rows", lambda *_: 20)
    monkeypatch.setattr(experts, "on_host", lambda counts, rows, kind: calls.append((rows, kind)) or counts.tolist())

    def waited(rank, ranks):
        there_and_back(rank, ranks, "uneven", room)
        return calls

    expected = [[(sum(LOADS["uneven"](rank, 2)), "exchanged")] * waits for rank in range(2)]
    assert fork_ranks(waited, 2) == expected
