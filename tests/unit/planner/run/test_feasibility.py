"""The first lines of `ingot check`: does a run fit, how fast is it, and which one change helps most."""

from dataclasses import replace

import pytest

from ingot.config import to_toml
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.run.feasibility import feasibility
from ingot.planner.search.candidates import MEMORY_SHARE
from ingot.planner.show.feasibility import feasibility_lines
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import layout_problems
from ingot.theory.rules import load_run


def run_of(model: str = "llama3-8b", micro_batch: int = 1, batch: int = 64, **parallel) -> RunConfig:
    train = Train(steps=10, seq_len=8192, global_batch=batch, micro_batch=micro_batch)
    arch = load_model(model).arch
    return RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train, parallel=Parallel(**parallel))


@pytest.mark.parametrize(
    ("run", "cluster"),
    [
        (run_of(dp_shard=8, recompute="full"), "8xh100"),  # recomputes although there is room
        (run_of(dp_shard=8, tp=4, batch=64), "4x8xh100"),
        (run_of("llama3-70b", dp_shard=8), "8xh100"),  # does not fit, whatever one changes
        (run_of(dp_shard=8, micro_batch=4), "8xh100"),  # does not fit as it is
    ],
    ids=["recompute", "tp", "too large", "batch"],
)
def test_the_change_can_be_set_and_does_what_was_said(run, cluster, tmp_path):
    cluster = load_cluster(cluster)
    found = feasibility(run, cluster)
    assert found.fits == (found.plan.total_memory_bytes <= cluster.memory_bytes)
    if found.change:
        (tmp_path / "run.toml").write_text(to_toml(found.run, {}))
        other = load_run(tmp_path / "run.toml", found.overrides)
        assert not list(layout_problems(other)) and other.parallel.world_size == run.parallel.world_size
        after = feasibility(other, cluster)
        assert after.plan.step_seconds == pytest.approx(found.change.candidate.step_seconds)
        assert after.plan.total_memory_bytes == pytest.approx(found.change.candidate.memory_bytes)
        assert found.change.fits == (after.plan.total_memory_bytes <= MEMORY_SHARE * cluster.memory_bytes)
        assert found.facts()["change"]["fits"] == after.fits
        if found.fits:
            assert found.change.fits and after.plan.step_seconds < 0.98 * found.plan.step_seconds


def test_what_helps_most():
    h100 = load_cluster("8xh100")
    recomputes = feasibility(run_of(dp_shard=8, recompute="full"), h100)
    assert recomputes.fits and recomputes.overrides == ("parallel.recompute=selective",)
    again = feasibility(replace(recomputes.change.candidate.run), h100)
    assert again.fits and again.overrides != ("parallel.recompute=full",)
    large = feasibility(run_of(dp_shard=8, micro_batch=8), h100)
    assert not large.fits and large.change and large.change.fits
    hopeless = feasibility(run_of("llama3-405b", dp_shard=8), h100)
    assert not hopeless.fits and not (hopeless.change and hopeless.change.fits)


def test_the_lines_say_all_of_it():
    lines = list(feasibility_lines(feasibility(run_of(pp=2, dp_shard=4, recompute="full"), load_cluster("8xh100"))))
    text = "\n".join(lines)
    assert [line[:10].strip() for line in lines if line[0] != " "] == ["fits", "step", "exposed", "change"]
    assert "yes: " in text and "MFU" in text and "pipeline ranks wait" in text and "--set parallel." in text
    assert "left" in text and "most of it is" in text
    text = "\n".join(feasibility_lines(feasibility(run_of("llama3-70b", dp_shard=8), load_cluster("8xh100"))))
    assert "no: " in text and "too much" in text
    slow = replace(load_cluster("8xh100"), peak_flops={})
    text = "\n".join(feasibility_lines(feasibility(run_of(dp_shard=8), slow)))
    assert text.count("unknown") == 1 and text.count("ingot doctor --bench") == 2 and "single setting" not in text


def test_a_run_that_fits_barely_is_advised_to_become_faster_or_nothing():
    run, cluster = run_of(dp_shard=8), load_cluster("8xh100")
    needed = feasibility(run, cluster).plan.total_memory_bytes
    tight = replace(cluster, memory_bytes=round(needed / 0.95))
    found = feasibility(run, tight)
    assert found.fits and (found.change is None or found.change.candidate.step_seconds < 0.98 * found.plan.step_seconds)


def test_a_cluster_with_too_few_devices_does_not_do():
    found = feasibility(run_of(dp_shard=8), load_cluster("1xh100"))
    assert not found.fits and not found.facts()["fits"]
    text = "\n".join(feasibility_lines(found))
    assert "8 ranks need as many devices, 1xh100 has 1" in text and "lower parallel.dp_shard" in text
