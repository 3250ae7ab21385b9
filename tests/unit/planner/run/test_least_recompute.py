"""The least recomputation that fits: the bill of the planner decides, for the fullest rank."""

from dataclasses import replace

import pytest

from ingot.planner.predict.memory.peak_memory import memory_bill
from ingot.planner.request.clusters import load_cluster
from ingot.planner.run.advice import memory_warnings
from ingot.planner.run.least_recompute import least_recompute
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train

NODE = load_cluster("8xh100")
ARCH = Arch(
    vocab_size=4096,
    d_model=1024,
    num_layers=6,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    d_ffn=4096,
    max_seq_len=8192,
)
ORDER = [(form, every) for form in ("selective", "full") for every in (6, 5, 4, 3, 2, 1)]


def run_of(**layout) -> RunConfig:
    parallel = Parallel(**layout)
    train = Train(steps=1, seq_len=8192, global_batch=4 * parallel.data_ranks, micro_batch=1)
    return RunConfig(name="run", model=ARCH, data=Data(tokens=""), train=train, parallel=parallel)


def needed(run: RunConfig, form: str, every: int = 1) -> float:
    laid_out = replace(run, parallel=replace(run.parallel, recompute=form, recompute_every=every))
    return sum(term.value for term in memory_bill(laid_out, NODE).values())


@pytest.mark.parametrize("layout", [{}, {"dp_shard": 4, "zero": 3}, {"pp": 2, "tp": 2}])
def test_the_first_layout_that_fits_is_found(layout):
    run = run_of(**layout)
    sizes = {setting: needed(run, *setting) for setting in ORDER}
    assert needed(run, "none") >= max(sizes.values()) and len(set(sizes.values())) > 3
    for limit in sizes.values():
        found = least_recompute(run, replace(NODE, memory_bytes=limit))
        first = next(setting for setting in ORDER if sizes[setting] <= limit)
        assert found is not None
        assert (found[0].recompute, found[0].recompute_every, found[1]) == (*first, sizes[first])
    assert least_recompute(run, replace(NODE, memory_bytes=min(sizes.values()) - 1)) is None


def test_a_run_that_does_not_fit_is_shown_the_settings_that_do():
    run = run_of()
    bill = memory_bill(run, NODE)
    for form, every, words in (
        ("selective", 2, "--set parallel.recompute=selective --set parallel.recompute_every=2 fits with"),
        ("full", 1, "--set parallel.recompute=full fits with"),
    ):
        (warning,) = memory_warnings(run, replace(NODE, memory_bytes=needed(run, form, every)), bill)
        assert "does not fit" in warning and words in warning
    (warning,) = memory_warnings(run, replace(NODE, memory_bytes=needed(run, "full") - 1), bill)
    assert warning.endswith("recompute them (parallel.recompute)")
