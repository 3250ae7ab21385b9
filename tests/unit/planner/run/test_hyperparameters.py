"""Proposals: each has a formula and a source, and published runs agree with the rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot.errors import ConfigError
from ingot.planner.predict.time.timed_step import bubble_share
from ingot.planner.request.presets import load_model, model_names
from ingot.planner.run.hyperparameters import (
    ProposedValue,
    inference_aware,
    propose_hyperparameters,
    ramp_bubbles,
    ramp_warning,
    serving_weight,
)
from ingot.planner.run.scaling import suggested_batch_tokens, suggested_learning_rate
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, Optim, RunConfig, Train

LLAMA3_8B, LLAMA3_70B = load_model("llama3-8b").arch, load_model("llama3-70b").arch


def named(proposals: tuple[ProposedValue, ...], name: str) -> list[ProposedValue]:
    return [proposal for proposal in proposals if proposal.name == name]


@given(st.sampled_from(model_names()), st.integers(1, 10**14), st.sampled_from([1, 512, 8192]))
def test_every_proposal_says_how_and_who(name, tokens, seq_len):
    proposals = propose_hyperparameters(load_model(name).arch, tokens, seq_len)
    assert all(p.value > 0 and p.shown and p.formula and p.source for p in proposals)
    assert {p.name for p in proposals} >= {
        "compute-optimal tokens", "compute-optimal size", "loss", "batch", "critical batch", "batch ramp",
        "learning rate", "schedule", "warm-up", "weight decay",
    }  # fmt: skip
    assert bool(named(proposals, "experts")) == load_model(name).arch.is_moe


def test_the_first_of_a_name_is_what_a_run_file_takes():
    proposals = propose_hyperparameters(LLAMA3_8B, 15 * 10**12, 8192)
    assert named(proposals, "learning rate")[0].value == suggested_learning_rate(LLAMA3_8B, 8192, 15 * 10**12)
    assert named(proposals, "batch")[0].value == suggested_batch_tokens(LLAMA3_8B, 8192, 15 * 10**12)
    assert named(proposals, "weight decay")[0].value == Optim().weight_decay


def test_a_batch_that_is_chosen_is_judged_and_scheduled():
    plain = propose_hyperparameters(LLAMA3_8B, 10**12, 8192)
    chosen = propose_hyperparameters(LLAMA3_8B, 10**12, 8192, batch_tokens=4e6)
    assert named(chosen, "batch") == named(plain, "batch")
    assert "; 4M take" in named(chosen, "critical batch")[0].formula
    assert named(chosen, "batch ramp")[0].shown == "1M -> 2M -> 4M tokens"
    assert "all 250,000 steps" in named(chosen, "schedule")[0].formula


def test_llama3_8b():
    """Llama team 2024, table 3: 3e-4; 15T are 93 times the compute-optimal 161B."""
    proposals = propose_hyperparameters(LLAMA3_8B, 15 * 10**12, 8192)
    rates = named(proposals, "learning rate")
    assert rates[0].value == pytest.approx(3e-4, rel=0.1)
    assert rates[1].formula == "Llama 3 8B has 3.0e-04"
    assert "93.4 times" in named(proposals, "compute-optimal tokens")[0].formula
    assert "82% of the training FLOPs" in named(proposals, "loss")[0].note


def test_too_few_tokens_ask_for_a_smaller_model():
    """GPT-3 saw 300B tokens with 175B parameters."""
    note = named(propose_hyperparameters(LLAMA3_70B, 100 * 10**9, 8192), "loss")[0].note
    assert "a smaller model would reach the same loss" in note


def test_kaplan_is_silent_where_it_has_ended():
    kaplan = [p for p in propose_hyperparameters(LLAMA3_70B, 10**12, 8192) if "Kaplan et al. 2020, eq. D.1" in p.source]
    assert kaplan == []


def test_no_tokens_are_refused():
    with refused("E-TOKENS-NONE", tokens=0):
        propose_hyperparameters(LLAMA3_8B, 0, 8192)


def test_a_size_for_serving():
    found, proposal = inference_aware(70e9, 1.4e12, 2e13)
    assert proposal.value == found.parameters < 40e9
    assert found.tokens > 1.4e12
    assert "compared with the cheapest to train" in proposal.note
    dearer, _ = inference_aware(70e9, 1.4e12, 2e13, weight=serving_weight(0.45, 0.1))
    assert dearer.parameters < found.parameters
    assert "more than fits know" in inference_aware(70e9, 1.4e12, 1e15)[1].note


def test_weight_of_serving():
    assert serving_weight(0.45, 0.1) == pytest.approx(4.5)
    assert serving_weight(0.5, 0.5, price_ratio=0.5) == 0.5
    for wrong in ((0.0, 0.1, 1.0), (0.45, 1.1, 1.0), (0.45, 0.1, 0.0)):
        with refused("E-SERVING-VALUE"):
            serving_weight(*wrong)


@pytest.mark.parametrize("wrong", [(0, 1e12, 1e12), (7e9, 0, 1e12), (7e9, 1e12, -1)])
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ConfigError):
        inference_aware(*wrong)


def run_with(parallel: Parallel, global_batch: int) -> RunConfig:
    train = Train(steps=1000, seq_len=4096, global_batch=global_batch, micro_batch=1)
    return RunConfig(name="run", model=LLAMA3_70B, data=Data(tokens="tokens"), train=train, parallel=parallel)


def test_a_ramp_from_one_to_four_million_tokens_idles_a_pipeline():
    """tp 4, pp 4, dp 64: 43% of a step at first, 16% in the end (seq 4096, whole micro-batches)."""
    run = run_with(Parallel(tp=4, pp=4, dp_shard=64), 1024)
    stages = ramp_bubbles(run)
    assert [stage.micro_batches for stage in stages] == [4, 8, 16]
    assert [stage.bubble for stage in stages] == pytest.approx([bubble_share(4, count) for count in (4, 8, 16)])
    assert "wait 43% of a step with 4 micro-batches, and 16% with the whole batch" in ramp_warning(run)
    assert ramp_warning(run, tolerated=0.5) == ""


def test_a_run_without_a_pipeline_has_no_bubble():
    run = run_with(Parallel(dp_shard=64), 1024)
    assert [stage.bubble for stage in ramp_bubbles(run)] == [0, 0, 0]
    assert ramp_warning(run) == ""


def test_a_schedule_that_needs_more_micro_batches_is_told():
    run = run_with(Parallel(tp=4, pp=4, dp_shard=64, schedule="dualpipe_v"), 1024)
    assert ramp_bubbles(run)[0].bubble is None
    assert "dualpipe_v is not possible with its 4 micro-batches" in ramp_warning(run)


def test_another_first_batch():
    run = run_with(Parallel(tp=4, pp=4, dp_shard=64), 1024)
    assert ramp_bubbles(run, first_batch=64 * 4096)[0].micro_batches == 1
    assert ramp_bubbles(run, tokens=10**12)[-1].until_tokens == 10**12
