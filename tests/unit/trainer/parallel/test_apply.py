from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ingot.schema.arch import Arch, Moe
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.trainer.build import build_parts
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.apply import compile_blocks, should_compile
from ingot.trainer.step import train_step

ARCH = Arch(vocab_size=20, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, d_ffn=24)
EXPERTS = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=8, shared_experts=1, first_dense=1, z_loss=0.01))


def train_settings(**changes):
    return Train(**({"steps": 1, "seq_len": 8, "global_batch": 2, "micro_batch": 1} | changes))


@pytest.mark.parametrize(
    "setting, device, expected",
    [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_auto_compiles_on_a_gpu_only(setting, device, expected):
    assert should_compile(train_settings(compile=setting), torch.device(device)) is expected


def eager_graphs(monkeypatch):
    """Real graphs of blocks and loss, without the minutes that generating CPU code takes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.slow
def test_compiled_blocks_keep_names_and_results(monkeypatch):
    plain, compiled = Transformer(ARCH), Transformer(ARCH)
    for model in (plain, compiled):
        initialize(model, ARCH, 1)
    eager_graphs(monkeypatch)
    compile_blocks(compiled, whole_readout=True)
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in plain.named_parameters()]
    ids = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = [model(ids[:, :-1], ids[:, 1:]) for model in (plain, compiled)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, rtol=1e-6)
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every, compiled", [(0, ["0", "1", "2"]), (1, ["0"]), (2, ["0", "1"])])
def test_blocks_with_experts_that_keep_results_are_not_compiled(monkeypatch, every, compiled):
    model, found = Transformer(replace(EXPERTS, num_layers=3)), set()
    names = {part.forward: name for name, part in model.named_modules()}
    monkeypatch.setattr(torch, "compile", lambda forward: found.add(names.get(forward)) or forward)
    how = "selective" if every else "none"
    compile_blocks(model, whole_readout=False, recompute=how, every=max(every, 1))
    inside = {f"blocks.{i}.{part}" for i in ("1", "2") if i in compiled for part in ("attention", "moe.shared")}
    assert found == {"blocks.0"} | inside


@pytest.mark.parametrize(
    "how, compiled",
    [
        ("none", {"blocks.0", "blocks.1"}),
        ("full", {"blocks.0.attention", "blocks.0.mlp", "blocks.1"}),
        ("selective", {"blocks.1"}),
    ],
)
def test_recomputed_blocks_are_compiled_inside_where_attention_is_not_seen_whole(monkeypatch, how, compiled):
    model, found = Transformer(replace(ARCH, num_layers=2)), set()
    names = {part.forward: name for name, part in model.named_modules()}
    monkeypatch.setattr(torch, "compile", lambda forward: found.add(names.get(forward)) or forward)
    compile_blocks(model, whole_readout=False, whole_attention=False, recompute=how, every=2)
    assert found == compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, forms",
    [
        (ARCH, {}),
        pytest.param(ARCH, {"tp": 2}, marks=pytest.mark.nightly),
        pytest.param(ARCH, {"recompute": "selective"}, marks=pytest.mark.nightly),
        pytest.param(ARCH, {"cp": 2, "context": "ring", "recompute": "full"}, marks=pytest.mark.nightly),
        (ARCH, {"cp": 2, "context": "ring", "recompute": "selective"}),
        pytest.param(EXPERTS, {"ep": 2}, marks=pytest.mark.nightly),
        (EXPERTS, {"ep": 2, "recompute": "selective"}),
        pytest.param(EXPERTS, {"tp": 2, "ep": 4, "recompute": "full"}, marks=pytest.mark.nightly),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "experts" if value.is_moe else "dense",
)
@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_compiled_and_parallel_equals_parallel(fork_ranks, monkeypatch, zero, arch, forms):
    def losses(rank, ranks):
        eager_graphs(monkeypatch)
        results = []
        for setting in ("off", "on"):
            train = train_settings(compile=setting, precision="fp32")
            run = RunConfig(
                name="x",
                model=arch,
                data=Data(tokens=""),
                train=train,
                parallel=Parallel(dp_shard=2, zero=zero, **forms),
            )
            parts = build_parts(run, torch.device("cpu"), Path())
            ids = torch.randint(0, 20, (1, 1, 9), generator=torch.Generator().manual_seed(parts.mesh.data_rank))
            batch = SimpleNamespace(step=1, inputs=ids[..., :-1], targets=ids[..., 1:], document_ids=None)
            facts = train_step(parts, batch, 1e-3)
            results.append((facts.loss.item(), facts.grad_norm.item()))
        return results

    for off, on in fork_ranks(losses, 2 * forms.get("tp", 1) * forms.get("cp", 1)):
        assert on == pytest.approx(off, rel=1e-5)
