"""A model of plug-ins' layers with a plug-in's loss term equals one process in every layout: those of examples/extend.

All four layers act at once. `ingot check --proof` compares more layouts; these are the cheap ones.
"""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.plugins.registry import MAIN, Registry
from ingot.schema.arch import Moe

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
LONG = ("tp over shared heads",)


@pytest.fixture(scope="module", autouse=True)
def examples():
    """The examples, registered in this process and so in the ranks that are forked from it."""
    for name in ("squared_relu", "layer_norm", "gated_attention", "parallel_block", "z_loss"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    yield
    for registry in Registry.every:
        registry.forget(MAIN)


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


@pytest.mark.parametrize("form", ["tp", "cp", "zero 3"])
def test_the_mean_of_the_term_is_that_of_one_process(fork_ranks, alone, form):
    run = run_with(Z, **FORMS[form])
    *_, expected = alone(fork_ranks, run)
    ranks = [sums for *_, sums in fork_ranks(trained, 2, run)]
    if form == "tp":  # both ranks have read the same tokens
        np.testing.assert_allclose(ranks, [expected] * 2, rtol=1e-12)
    else:
        np.testing.assert_allclose(sum(ranks), expected, rtol=1e-12)
