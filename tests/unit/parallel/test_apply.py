from functools import partial

import pytest
import torch

from ingot.dist.mesh import build_mesh
from ingot.model.init import initial_value, initialize
from ingot.model.transformer import Transformer
from ingot.parallel import data
from ingot.parallel.apply import compile_blocks, parallelize, should_compile
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Train

ARCH = Arch(vocab_size=19, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, d_ffn=24)


def train_settings(**changes):
    return Train(**({"steps": 1, "seq_len": 8, "global_batch": 2, "micro_batch": 2} | changes))


@pytest.mark.parametrize(
    "setting, device, expected",
    [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_auto_compiles_on_a_gpu_only(setting, device, expected):
    assert should_compile(train_settings(compile=setting), torch.device(device)) is expected


def eager_graphs(monkeypatch):
    """Real graphs of blocks and loss, without the minutes that generating CPU code takes."""
    whole, module = torch.compile, torch.nn.Module.compile
    monkeypatch.setattr(torch, "compile", partial(whole, backend="aot_eager"))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: module(self, backend="aot_eager"))


def test_compiled_blocks_keep_names_and_results(monkeypatch):
    plain, compiled = Transformer(ARCH), Transformer(ARCH)
    for model in (plain, compiled):
        initialize(model, ARCH, 1)
    eager_graphs(monkeypatch)
    compile_blocks(compiled)
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in plain.named_parameters()]
    ids = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = [model(ids[:, :-1], ids[:, 1:]) for model in (plain, compiled)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, rtol=1e-6)
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("units", [0, 10**9], ids=["blocks", "one"])
def test_compiled_and_sharded_equals_sharded(fork_ranks, monkeypatch, units):
    def losses(rank, ranks):
        data.ONE_UNIT_PARAMETERS = units
        eager_graphs(monkeypatch)
        results = []
        for setting in ("off", "on"):
            with torch.device("meta"):
                model = Transformer(ARCH)
            mesh = build_mesh(Parallel(dp_shard=ranks), "cpu")
            settings = train_settings(compile=setting, precision="fp32")
            value = partial(initial_value_of, ARCH)
            parallelize(model, mesh, settings, torch.device("cpu"), value)
            ids = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(rank))
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            results.append((loss.item(), model.norm.weight.grad.full_tensor().tolist()))
        return results

    for off, on in fork_ranks(losses, 2):
        assert on[0] == pytest.approx(off[0], rel=1e-6)
        assert on[1] == pytest.approx(off[1], rel=1e-4, abs=1e-5)


def initial_value_of(arch, name, shape):
    return initial_value(name, shape, arch, 1)


def test_small_models_are_one_unit_and_large_ones_are_not(fork_ranks):
    def units(rank, ranks):
        found = []
        for limit in (10**9, 0):
            data.ONE_UNIT_PARAMETERS = limit
            with torch.device("meta"):
                model = Transformer(ARCH)
            data.shard_data_parallel(model, build_mesh(Parallel(dp_shard=1), "cpu"), "bf16")
            found.append(data.is_one_unit(model))
        return found

    assert fork_ranks(units, 1) == [[True, False]]
