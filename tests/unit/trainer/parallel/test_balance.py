"""Routers' counts summed over the world, and the biases and loads from them, against sums made by hand."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ingot.schema.arch import Moe
from ingot.schema.parallel import Parallel
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.parallel.balance import Balance, loads_of, updated_biases

EXPERTS, RATE = 4, 0.25
CPU = torch.device("cpu")


class Router(nn.Module):
    """The attributes of a router (model/routing.py) that balancing uses."""

    def __init__(self, layer: int, dtype=torch.float32):
        super().__init__()
        self.layer, self.seen = layer, None
        self.weight = nn.Parameter(torch.zeros(EXPERTS, 2, dtype=dtype))
        self.register_buffer("bias", torch.full((EXPERTS,), torch.nan, dtype=dtype))
        self.register_buffer("load", torch.full((EXPERTS,), torch.nan, dtype=dtype))


def moe(**changes) -> Moe:
    return Moe(**{"num_experts": EXPERTS, "d_expert": 2, "bias_rate": RATE, "global_loss": 0.01} | changes)


def stage_of(*layers: int, dtype=torch.float32) -> nn.Module:
    stage = nn.Module()
    stage.blocks = nn.ModuleDict({str(layer): nn.ModuleDict({"router": Router(layer, dtype)}) for layer in layers})
    return stage


def routers(stages) -> list[Router]:
    return [m for stage in stages.values() for m in stage.modules() if isinstance(m, Router)]


def seen_by(rank: int, layer: int) -> torch.Tensor:
    """Loads, dropped, entropy, tokens: other ones on each rank and layer."""
    loads = torch.tensor([rank + 1, 2 * layer + 1, 3, 5], dtype=torch.float64)
    return torch.cat((loads, torch.tensor([rank, 0.5 * layer, 7 + rank], dtype=torch.float64)))


def test_a_bias_follows_the_sign_of_what_its_expert_lacks():
    """Wang et al. 2024, algorithm 1: b + u sign(mean - c). The mean here is 3."""
    bias = torch.tensor([[1.0, -1.0, 0.5, 0.0]])
    after = updated_biases(bias, torch.tensor([[2.0, 9.0, 3.0, -2.0]]).double(), 0.25)
    assert after.tolist() == [[1.25, -1.25, 0.5, 0.25]] and after.dtype == torch.float32


def test_loads_are_shares_times_experts():
    loads = loads_of(torch.tensor([[1.0, 1.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0]]).double())
    assert loads.tolist() == [[1.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


def stages_on(rank: int, stages: int, ranks: int) -> list[int]:
    """Return the stages of this rank: two of a V-shaped pipeline, else one."""
    return [rank] if stages == ranks else [rank, stages - 1 - rank]


@pytest.mark.parametrize(
    "parallel, layers_of_stage, dense",
    [
        ({"dp_shard": 2}, [(0, 1, 2)], ()),
        ({"dp_replicate": 2, "cp": 2}, [(0, 1, 2)], ()),
        ({"pp": 2}, [(0, 1), (2, 3)], ()),
        ({"pp": 2}, [(0, 1), (2, 3)], (0, 1)),
        ({"pp": 2, "tp": 2}, [(0,), (1, 2, 3)], (0,)),
        ({"pp": 2, "schedule": "zb_v"}, [(0,), (1,), (2,), (3,)], (0,)),
    ],
    ids=str,
)
def test_every_rank_knows_the_sum_of_all(fork_ranks, parallel, layers_of_stage, dense):
    """A stage may have no experts; a rank of a V-shaped pipeline has two stages."""
    settings = Parallel(**parallel)
    layers = [layer for stage in layers_of_stage for layer in stage if layer not in dense]

    def on_rank(rank, world):
        mesh = build_mesh(settings, "cpu", experts=True)
        numbers = stages_on(mesh.index("pp"), len(layers_of_stage), settings.pp)
        stages = {n: stage_of(*(i for i in layers_of_stage[n] if i not in dense)) for n in numbers}
        balance = Balance(stages, mesh, moe(), layers, CPU)
        for router in routers(stages):
            router.seen = seen_by(rank, router.layer)
        table = balance.step(1, None)
        assert all(router.seen is None for router in routers(stages))
        held = {router.layer: (router.bias.numpy(), router.load.numpy()) for router in routers(stages)}
        return table.numpy(), held, [(p.name, p.shape, p.sizes, p.owner) for p in balance.shards]

    results = fork_ranks(on_rank, settings.world_size)
    whole = np.zeros((len(layers), EXPERTS + 3))
    for rank, (_, held, _) in enumerate(results):
        for layer in held:
            whole[layers.index(layer)] += seen_by(rank, layer).numpy()
    for table, held, _ in results:
        assert np.array_equal(table, whole)
        for layer, (bias, load) in held.items():
            counts = whole[layers.index(layer), :EXPERTS]
            assert np.array_equal(bias, RATE * np.sign(counts.mean() - counts).astype(np.float32))
            assert np.array_equal(load, (counts * EXPERTS / counts.sum()).astype(np.float32))
    owned = sorted(name for _, _, pieces in results for name, *_, owner in pieces if owner)
    assert owned == sorted(f"blocks.{i}.moe.router.{kind}" for i in layers for kind in ("bias", "load"))
    assert all(shape == sizes == (EXPERTS,) for *_, pieces in results for _, shape, sizes, _ in pieces)


@pytest.fixture
def alone(fork_ranks):
    """alone(function): in one process with a mesh of one."""

    def run(function):
        return fork_ranks(lambda rank, world: function(build_mesh(Parallel(), "cpu", experts=True)), 1)[0]

    return run


def test_a_vetoed_step_changes_nothing_but_clears_what_was_seen(alone):
    def on_rank(mesh):
        balance = Balance({0: (stage := stage_of(0))}, mesh, moe(), [0], CPU)
        (router,) = routers({0: stage})
        router.seen = seen_by(0, 0)
        balance.step(1, torch.tensor(True))
        assert router.seen is None
        assert router.bias.tolist() == [0.0] * EXPERTS and router.load.tolist() == [1.0] * EXPERTS
        router.seen = seen_by(0, 0)
        balance.step(1, torch.tensor(False))
        return router.bias.tolist()

    assert alone(on_rank) == [0.25, 0.25, -0.25, -0.25]


@pytest.mark.parametrize("computes, kept", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_buffers_stay_wide_and_begin_at_zero_and_one(alone, computes, kept):
    def on_rank(mesh):
        balance = Balance({0: (stage := stage_of(0, 1, dtype=computes))}, mesh, moe(), [0, 1], CPU)
        assert [piece.value.dtype for piece in balance.shards] == [kept] * 4
        for router in routers({0: stage}):
            assert router.bias.tolist() == [0.0] * EXPERTS and router.load.tolist() == [1.0] * EXPERTS
            router.seen = seen_by(0, router.layer)
        balance.step(1, None)
        # The pieces that a checkpoint fills are the buffers that routers read.
        values = {piece.name: piece.value for piece in balance.shards}
        for router in routers({0: stage}):
            values[f"blocks.{router.layer}.moe.router.bias"].fill_(3.0)
            assert router.bias.tolist() == [3.0] * EXPERTS
        assert "blocks.0.router.bias" in stage.state_dict()

    alone(on_rank)


def test_biases_rest_after_their_last_step_and_loads_do_not(alone):
    def on_rank(mesh):
        balance = Balance({0: (stage := stage_of(0))}, mesh, moe(bias_steps=2), [0], CPU)
        (router,) = routers({0: stage})
        found = []
        for number in (1, 2, 3, 4):
            router.load.fill_(torch.nan)
            router.seen = seen_by(0, 0)
            balance.step(number, None)
            found.append(router.bias[0].item())
            assert router.load.isfinite().all()
        return found

    assert alone(on_rank) == [0.25, 0.5, 0.5, 0.5]


def test_without_their_use_there_are_no_buffers(alone):
    def on_rank(mesh):
        balance = Balance({0: (stage := stage_of(0))}, mesh, moe(bias_rate=0.0, global_loss=0.0), [0], CPU)
        (router,) = routers({0: stage})
        router.seen = seen_by(0, 0)
        assert balance.shards == [] and router.bias is None and router.load is None
        return balance.step(1, None).tolist()

    assert alone(on_rank) == [seen_by(0, 0).tolist()]


def test_a_router_that_saw_nothing_is_a_fault(alone):
    def on_rank(mesh):
        balance = Balance({0: stage_of(4)}, mesh, moe(), [4], CPU)
        with pytest.raises(AssertionError, match="router of layer 4"):
            balance.step(1, None)
        assert dist.get_world_size() == 1

    alone(on_rank)
