"""Dense models in every kind of layout against the Llama and Mistral of `transformers`."""

from dataclasses import replace

import pytest

from . import steps
from .reference import compare

ARCH = replace(steps.ARCH, qk_norm=False)  # Llama has no norms of queries and keys
LAYOUTS = {
    "one process": {},
    "tp": {"tp": 2},
    "tp without sequence": {"tp": 4, "sequence": False},
    "pp": {"pp": 2},
    "zb_v": {"pp": 2, "schedule": "zb_v"},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "tp x zero 3": {"tp": 2, "dp_shard": 2, "zero": 3},
    "pp x tp x zero 3": {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 3},
}
CONTEXT_LAYOUTS = {
    "ring": {"cp": 2, "context": "ring"},
    "striped ring x zero 3": {"cp": 2, "context": "ring", "context_layout": "striped", "zero": 3},
    "ulysses x tp": {"cp": 2, "context": "ulysses", "tp": 2},
}


@pytest.mark.parametrize(
    "tied",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.nightly)],
    ids=["tied", "untied"],
)
def test_layouts_equal_the_llama_of_transformers(fork_ranks, transformers_twin, tied):
    compare(fork_ranks, transformers_twin, replace(ARCH, tied_embeddings=tied), LAYOUTS)


@pytest.mark.parametrize(
    "qk_norm",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.nightly)],
    ids=["mistral", "qwen3"],
)
def test_a_window_is_that_of_transformers(fork_ranks, transformers_twin, qk_norm):
    """A window of 3 tokens in sequences of 8 shows an error of one token."""
    arch = replace(ARCH, qk_norm=qk_norm, sliding_window=3)
    compare(fork_ranks, transformers_twin, arch, {"one process": {}, "tp": {"tp": 2}} | CONTEXT_LAYOUTS)


@pytest.mark.slow
def test_context_layouts_equal_the_llama_of_transformers(fork_ranks, transformers_twin):
    compare(fork_ranks, transformers_twin, ARCH, CONTEXT_LAYOUTS)
