"""Proposals are runs that may start, with a reason for each chosen value."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import refused

from ingot.config import to_dict
from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model, model_names
from ingot.planner.run.propose import Hints, propose
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data
from ingot.theory.params import count_parameters
from ingot.theory.rules import run_from_dict
from ingot.theory.rules.nearest import shareable_batch

DATA = Data(tokens="tokens")
CPU = Cluster(name="here", device="cpu", devices_per_node=2, memory_bytes=8 << 30)
TINY, SMALL = load_model("tiny"), load_model("smollm2-135m")


def proposed(preset, cluster, tokens, **more):
    return propose(preset.arch, cluster, DATA, name="x", tokens=tokens, preset=preset.train, **more)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(model_names()),
    st.sampled_from(["h200", "8xh100", "2x8xa100", "16x8xb200"]),
    st.integers(1, 10**13),
    st.sampled_from([0, 300, 512, 8192]),
)
def test_whatever_is_proposed_obeys_the_rules_of_a_run(name, cluster, tokens, seq_len):
    proposal = proposed(load_model(name), load_cluster(cluster), tokens, wanted=Hints(seq_len=seq_len))
    assert run_from_dict(to_dict(proposal.run)) == proposal.run
    assert proposal.run.train.seq_len == seq_len or not seq_len


def test_the_quickstarts_preset_is_taken_as_it_is():
    run = proposed(TINY, CPU, 1_300_000, vocab_size=4096).run
    assert (run.train.steps, run.train.seq_len, run.optim.lr) == (TINY.train.steps, TINY.train.seq_len, TINY.train.lr)
    assert run.train.global_batch == TINY.train.global_batch and run.parallel.dp_shard == 2
    assert run.model == TINY.arch


def test_products_are_in_fp32_where_a_cpu_is_faster_in_it_or_was_not_measured():
    for bf16, fp32, chosen, why in (
        (7e8, 1.4e10, "fp32", "20 times as fast as in bf16"),
        (4e10, 2e10, "bf16", ""),
        (0.0, 2e10, "fp32", "are slow"),
    ):
        found = proposed(TINY, replace(CPU, peak_flops={"bf16": bf16, "fp32": fp32}), 1_300_000, vocab_size=4096)
        assert found.run.train.precision == chosen
        assert found.reasons.get("train.precision", "").endswith(why) and ("train.precision" in found.reasons) == bool(
            why
        )
    assert proposed(TINY, replace(CPU, device="cuda"), 1_300_000, vocab_size=4096).run.train.precision == "bf16"
    slow = replace(CPU, peak_flops={"bf16": 7e8, "fp32": 1.4e10})
    assert proposed(TINY, slow, 1_300_000, vocab_size=4096, precision="bf16").run.train.precision == "bf16"


def test_what_was_asked_for_goes_first_and_says_so():
    proposal = proposed(TINY, CPU, 10**6, wanted=Hints(steps=7, seq_len=128, global_batch=6, lr=1e-4))
    train = proposal.run.train
    assert (train.steps, train.seq_len, train.global_batch, proposal.run.optim.lr) == (7, 128, 6, 1e-4)
    assert proposal.reasons["optim.lr"] == "as asked for"


def test_steps_repeat_little_data_up_to_four_times_and_much_data_once():
    parameters = count_parameters(SMALL.arch)
    for tokens, passes in ((parameters, 4), (10 * parameters, 2), (100 * parameters, 1)):
        run = proposed(SMALL, load_cluster("h200"), tokens).run
        assert run.train.steps * run.tokens_per_step == pytest.approx(passes * tokens, rel=0.01)


def test_a_presets_steps_are_cut_when_the_data_is_too_small_for_them():
    run = proposed(TINY, CPU, 100_000).run
    assert run.train.steps * run.tokens_per_step <= 4 * 100_000


def test_the_vocabulary_is_the_tokenizers():
    run = proposed(TINY, CPU, 10**6, vocab_size=5001).run
    assert run.model.vocab_size == 5056


def test_sequences_longer_than_the_model_stretch_it():
    assert proposed(TINY, CPU, 10**6, wanted=Hints(seq_len=1024)).run.model.max_seq_len == 1024


def test_the_micro_batch_is_the_largest_that_fits():
    cluster = load_cluster("h100")
    run = proposed(SMALL, cluster, 10**10).run
    budget = 0.9 * rank_memory_bytes(cluster, 1)
    assert sum(t.value for t in memory_bill(run, cluster).values()) <= budget
    small = replace(cluster, memory_bytes=12 << 30)
    assert proposed(SMALL, small, 10**10).run.train.micro_batch < run.train.micro_batch


def test_a_batch_that_cannot_be_shared_is_refused_with_the_nearest():
    with refused("E-BATCH-RANKS", legal=[6, 8]):
        proposed(TINY, CPU, 10**6, wanted=Hints(global_batch=7))


@pytest.mark.parametrize(
    ("batch", "devices", "near"),
    [(15_360, 1152, 14_976), (2048, 1152, 2016), (2048, 16_384, 2048), (512, 8, 512), (100, 32, 96), (7, 6, 6)],
)
def test_a_known_batch_moves_a_little_to_a_number_that_devices_can_share(batch: int, devices: int, near: int):
    assert shareable_batch(batch, devices) == near
