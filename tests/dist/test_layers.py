"""A model of plug-ins' layers with a plug-in's loss term equals one process in every layout: those of examples/extend.

All four layers act at once. `ingot check --proof` compares more layouts; these are the cheap ones.
"""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ingot.plugins.loss import LOSS_TERMS, LossTermPart
from ingot.plugins.registry import MAIN, Registry
from ingot.schema.arch import Moe
from ingot.trainer.loss_terms import log_loss_terms

from .steps import ARCH, join, keep, mean_losses, run_of, state_of, train

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
OWN = {"feed_forward": "squared_relu", "norm": "layer", "attention": "gated", "block": "parallel"}
LAYERS = replace(ARCH, num_layers=2, qk_norm=False, **OWN)
EXPERTS = replace(
    ARCH, num_layers=2, qk_norm=False, block="parallel", moe=Moe(num_experts=4, top_k=2, d_expert=6, first_dense=1)
)
Z = {"z": {"weight": 0.3}}
STEPS = (1, 2, 3)
FORMS = {
    "tp": {"tp": 2, "sequence": True},
    "tp without sequence": {"tp": 2, "sequence": False},
    "tp over shared heads": {"tp": 4, "sequence": True},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "pp": {"pp": 2, "schedule": "zb_h1"},
    "cp": {"cp": 2, "context": "ring"},
    "selective": {"recompute": "selective"},
    "ep": {"dp_shard": 2, "ep": 2, "zero": 1, "arch": EXPERTS},
    "ep over tp": {"tp": 2, "ep": 2, "arch": EXPERTS},
}
LONG = ("tp over shared heads", "ep over tp")


@pytest.fixture(scope="module", autouse=True)
def examples():
    """The examples, registered in this process and so in the ranks that are forked from it."""
    for name in ("squared_relu", "layer_norm", "gated_attention", "parallel_block", "z_loss"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    LOSS_TERMS.register(LossTermPart(name="twice", term=twice))
    yield
    for registry in Registry.every:
        registry.forget(MAIN)


def twice(logits, *rest):
    values, slope = LOSS_TERMS["z"].term(logits, *rest)
    return 2 * values, 2 * slope


def run_with(loss, **form):
    return replace(run_of(**{"arch": LAYERS} | form), loss=loss)


def trained(rank, world, run):
    """Losses, gradient norms and the state after the steps, and each term's sum of values and tokens."""
    found = train(run, STEPS)
    terms = [term.take().numpy() for stage in found.parts.model.stages.values() for term in stage.readout.terms]
    return found.losses, found.norms, keep(state_of(found.parts)), sum(terms)


@pytest.fixture(scope="module")
def alone():
    """`alone(fork_ranks, run)`: the results of one process for the model and the loss of a run, computed once."""
    known = {}

    def computed(fork_ranks, run):
        key = (run.model, bool(run.loss))
        if key not in known:
            known[key] = fork_ranks(trained, 1, run_with(run.loss, arch=run.model))[0]
        return known[key]

    return computed


@pytest.mark.parametrize("form", [pytest.param(f, marks=pytest.mark.slow) if f in LONG else f for f in FORMS])
def test_every_layout_equals_one_process(fork_ranks, alone, form):
    run = run_with(Z, **FORMS[form])
    losses, norms, state, _ = alone(fork_ranks, run)
    expected = join([state])
    ranks = fork_ranks(trained, run.parallel.world_size, run)
    found = join(state for _, _, state, _ in ranks)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(found[name] - values).max() <= 1e-10 * np.abs(values).max(), name
    np.testing.assert_allclose(mean_losses(losses for losses, *_ in ranks), losses, rtol=1e-12)
    for _, own, _, _ in ranks:
        np.testing.assert_allclose(own, norms, rtol=1e-10)


def test_every_layer_and_the_term_have_parameters_and_an_effect(fork_ranks, alone):
    losses, _, state, sums = alone(fork_ranks, run_with(Z))
    names = {name.removeprefix("blocks.0.") for name, *_ in state if name.startswith("blocks.0.")}
    assert {"attention.gate.weight", "mlp.up.weight", "attention_norm.bias"} <= names
    assert not names & {"mlp.gate.weight", "mlp_norm.weight"}
    tokens = len(STEPS) * 8 * 8
    assert sums[1] == tokens and np.log(48) ** 2 * 0.9 < sums[0] / tokens < np.log(48) ** 2 * 1.1
    plain, *_ = alone(fork_ranks, run_with({}))
    assert losses[0] == plain[0] and losses[-1] != plain[-1], "the term changes gradients, not the reported loss"


def logged(rank, world, run):
    """The values of the `metrics` events after one step and after two more."""
    written, parts = [], None
    for steps in ((1,), (2, 3)):
        parts = train(run, steps, parts).parts
        own = SimpleNamespace(**vars(parts), log=lambda kind, **fields: written.append((kind, fields)))
        log_loss_terms(own, steps[-1])
    return written


@pytest.mark.parametrize(
    "form", ["tp", "cp", "zero 3", "pp", pytest.param("two stages on each rank", marks=pytest.mark.slow)]
)
def test_the_logged_mean_of_a_term_is_that_of_all_tokens(fork_ranks, form):
    layout = FORMS.get(form, {"pp": 2, "schedule": "zb_v", "arch": replace(LAYERS, num_layers=4)})
    run = run_with(Z | {"twice": {"weight": 0.0}}, **layout)
    (expected,) = fork_ranks(logged, 1, run_with(run.loss, arch=run.model))
    assert [(kind, fields["by"], fields["step"]) for kind, fields in expected] == [
        ("metrics", "loss", 1),
        ("metrics", "loss", 3),
    ]
    first, second = (fields["values"] for _, fields in expected)
    assert first["twice"] == 2 * first["z"] and first["z"] != second["z"]
    assert first["z"] == pytest.approx(np.log(48) ** 2, rel=0.05)
    for found in fork_ranks(logged, 2, run):
        for (_, ours), (_, theirs) in zip(found, expected, strict=True):
            assert ours["values"] == pytest.approx(theirs["values"], rel=1e-10)


def test_without_terms_nothing_is_logged(fork_ranks):
    assert fork_ranks(logged, 1, run_with({})) == [[]]
