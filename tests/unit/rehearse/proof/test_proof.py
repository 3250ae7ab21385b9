"""The proof of a run's own model: equal layouts are called equal, and faults of plug-ins are found and named."""

from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.rehearse.proof import cases as cases_module
from ingot.rehearse.proof.cases import cases, tiny
from ingot.rehearse.proof.proof import LayoutProof, case_line, prove_layouts
from ingot.schema.arch import Arch, Mla, Moe
from ingot.schema.run import Data, Optim, RunConfig, Train
from ingot.theory.rules import load_run

ARCH = Arch(vocab_size=512, d_model=64, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8, d_ffn=160)
TRAIN = Train(steps=10, seq_len=64, global_batch=4, micro_batch=1)
MOE = Moe(num_experts=64, top_k=6, d_expert=32, shared_experts=2, first_dense=1, groups=8, top_groups=3)
MLA = Mla(q_rank=64, kv_rank=32, nope_dim=8, rope_dim=8, v_dim=8)
MODELS = {
    "grouped": ARCH,
    "one key/value head, window": replace(ARCH, num_kv_heads=1, sliding_window=16),
    "experts": replace(ARCH, moe=MOE),
    "experts with a capacity": replace(
        ARCH, moe=replace(MOE, groups=1, top_groups=1, top_k=2, capacity_factor=1.5, overflow="fallback")
    ),
    "latent attention": replace(ARCH, mla=MLA, num_kv_heads=8, head_dim=16),
}
FEW = ({"dp_shard": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "ep": 2})
PIPELINE = {"pp": 2, "schedule": "zb_h1"}
PLUGIN = """
from torch import nn
from ingot.plugins.layers import FEED_FORWARDS, FeedForwardPart
from ingot.plugins.loss import LOSS_TERMS, LossTermPart
from ingot.plugins.optimizer import OPTIMIZERS, OptimizerPart, UpdateRule

class OverWidth(nn.Module):
    def __init__(self, d_model, d_ffn, options):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ffn, bias=False), nn.Linear(d_ffn, d_model, bias=False)

    def forward(self, x):
        hidden = self.up(x)
        return self.down((hidden - hidden.mean(-1, keepdim=True)).relu())

class OverPiece(UpdateRule):
    def new(self, value, gradient, state, lr, *, decays):
        return value - lr * gradient / (gradient.norm() + 1e-9), {}

PAIR = {"up.weight": "column", "down.weight": "row"}
for name, matrices in (("over_width", 2), ("counts_three", 3)):
    FEED_FORWARDS.register(FeedForwardPart(name=name, make=OverWidth, sharding=PAIR, matrices=matrices, saved=2))
def z(logits, targets, vocabulary, options):
    largest = vocabulary.largest(logits.amax(-1))
    exponentials = (logits - largest[:, None]).exp()
    total = vocabulary.sum(exponentials.sum(-1))
    log_z = total.log() + largest
    return log_z.square(), exponentials * (2 * log_z / total)[:, None]

def own_part(logits, targets, vocabulary, options):
    log_z = logits.logsumexp(-1)
    return log_z.square(), logits.softmax(-1) * (2 * log_z)[:, None]

def half_slope(logits, targets, vocabulary, options):
    values, slope = z(logits, targets, vocabulary, options)
    return values, slope / 2

def raises(logits, targets, vocabulary, options):
    raise ValueError("raises on purpose")

for term in (z, own_part, half_slope, raises):
    LOSS_TERMS.register(LossTermPart(name=term.__name__, term=term))
make = lambda optim, options: lambda name, shape: OverPiece()
OPTIMIZERS.register(OptimizerPart(name="over_piece", make=make, moments=lambda name, dims: 0))
"""
RUN = """name = "x"
[model]
vocab_size = 64
d_model = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
d_ffn = 48
[data]
tokens = "tokens"
[train]
steps = 10
seq_len = 16
global_batch = 4
micro_batch = 1
[plugins]
modules = ["proof_faults"]
"""


@pytest.fixture
def few_layouts(monkeypatch):
    monkeypatch.setattr(cases_module, "_LAYOUTS", FEW)


@pytest.fixture
def load(tmp_path):
    (tmp_path / "proof_faults.py").write_text(PLUGIN)
    (tmp_path / "run.toml").write_text(RUN)
    return lambda *overrides: load_run(tmp_path / "run.toml", overrides)


@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_keep_their_kind_and_fit_most_layouts(name):
    arch = MODELS[name]
    small = tiny(RunConfig(name="x", model=arch, data=Data(tokens=""), train=TRAIN, optim=Optim(lr=0.5)))
    assert small.optim.lr == 0.01  # with a rate that makes training unstable, every last bit counts
    assert (small.model.is_moe, small.model.is_mla, small.model.num_kv_heads == 1) == (
        arch.is_moe,
        arch.is_mla,
        arch.num_kv_heads == 1,
    )
    found = list(cases(small))
    assert sum(case.run is not None for case in found) >= 20
    assert all(case.why for case in found if case.run is None)


@pytest.mark.slow
def test_sound_layouts_are_equal(monkeypatch, load):
    monkeypatch.setattr(cases_module, "_LAYOUTS", (*FEW, PIPELINE))
    found = list(prove_layouts(load("loss.z.weight=0.1")))
    assert [case.ok for case in found if case.ran] == [True] * 3
    assert [case.name for case in found if not case.ran] == ["tp 2, ep 2"]
    assert all(case.deviation < 1e-12 for case in found if case.ran)
    assert any(case.deviation > 0 for case in found)  # sums in another order: something was really compared


@pytest.mark.nightly
def test_all_layouts_are_equal(load):
    found = [case for case in prove_layouts(load("loss.z.weight=0.1")) if case.ran]
    assert len(found) >= 20 and all(case.ok for case in found)


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        pytest.param("model.feed_forward=over_width", ["tp 2"], marks=pytest.mark.nightly),
        pytest.param("optim.kind=over_piece", ["dp_shard 2, zero 3", "tp 2"], marks=pytest.mark.slow),
        ("loss.own_part.weight=0.1", ["tp 2"]),
    ],
)
def test_a_part_that_is_not_the_same_under_a_layout_is_found(few_layouts, load, override, wrong):
    found = list(prove_layouts(load(override)))
    assert [case.name for case in found if case.ran and not case.ok] == wrong
    assert all("DIFFERS" in case_line(case) and case.where for case in found if case.name in wrong)
    proof = LayoutProof(tuple(case for case in found if case.ran), ())
    assert not proof.ok and [row["layout"] for row in proof.facts()["compared"] if not row["equal"]] == wrong


def test_a_part_that_is_wrong_on_one_process_is_named(few_layouts, load):
    with refused("E-PROOF-ONE-PROCESS") as caught:
        list(prove_layouts(load("loss.half_slope.weight=1.0")))
    assert "half_slope" in caught.value.facts["cause"]


def test_the_error_of_a_part_on_one_process_is_its_answer(load, tmp_path):
    pytest.importorskip("torch")
    from ingot.rehearse.proof.ranks import run_case, wrong_term

    assert "raises on purpose" in wrong_term(tiny(load("loss.raises.weight=1.0")))
    assert wrong_term(tiny(load("loss.z.weight=1.0"))) == ""
    assert "counts_three" in run_case(tiny(load("model.feed_forward=counts_three")), tmp_path / "0")
