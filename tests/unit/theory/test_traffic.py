"""The formulas of the papers, on shapes of one's choice. What the trainer really sends: tests/dist/test_traffic.py."""

from dataclasses import replace

import pytest

from ingot.recipes.load import load_model
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import positions
from ingot.theory.params import count_parameters
from ingot.theory.traffic import sent_by_axis, step_traffic

ARCH = replace(load_model("llama3-8b").arch, num_layers=4, vocab_size=4096, tied_embeddings=True)
A, B, T = 4, 2, 1024
P, HIDDEN = count_parameters(ARCH), B * T * ARCH.d_model * 2


def sent(arch: Arch = ARCH, rank: int = 0, **settings) -> dict[str, float]:
    parallel = Parallel(**settings)
    train = Train(steps=1, seq_len=T, global_batch=A * B * parallel.data_ranks, micro_batch=B)
    run = RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel)
    return sent_by_axis(step_traffic(positions(run)[rank]))


def test_one_rank_sends_nothing():
    assert sent() == {}


@pytest.mark.parametrize("n", [2, 8])
def test_zero_1_and_2_send_as_much_as_ddp_and_zero_3_half_more(n):
    """Rajbhandari et al. 2020, section 7, where gradients and parameters have the same dtype; one micro-batch."""
    ring = (n - 1) / n
    assert sent(dp_replicate=n, grads="bf16") == pytest.approx({"dp_replicate": 2 * ring * P * 2})
    assert sent(dp_shard=n, zero=1, grads="bf16") == pytest.approx({"dp_shard": 2 * ring * P * 2})
    per_micro_batch = sent(dp_shard=n, zero=3, grads="bf16")["dp_shard"] / A
    assert per_micro_batch == pytest.approx(1.5 * 2 * ring * P * 2)
    assert sent(dp_shard=n, zero=3, grads="bf16", reshard=False)["dp_shard"] / A == pytest.approx(2 * ring * P * 2)


def test_accumulation_costs_zero_2_a_reduction_each_and_zero_1_nothing():
    one, two = (sent(dp_shard=4, zero=z)["dp_shard"] for z in (1, 2))
    assert two - one == pytest.approx((A - 1) * 0.75 * P * 4)


def test_hsdp_sums_shards_across_copies():
    both = sent(dp_shard=4, dp_replicate=2, zero=1)
    assert both["dp_replicate"] == pytest.approx(P * 4 / 4)
    assert both["dp_shard"] == sent(dp_shard=4, zero=1)["dp_shard"]
    # Once per step with ZeRO-3 as well, unless the sum over micro-batches lives on the host.
    third = sent(dp_shard=4, dp_replicate=2, zero=3)
    assert third["dp_replicate"] == both["dp_replicate"]
    host = sent(dp_shard=4, dp_replicate=2, zero=3, offload="cpu", offload_parameters=True)
    assert host == third | {"dp_replicate": A * third["dp_replicate"]}


def test_canonical_order_costs_whole_gradients_for_every_doubling():
    run = {"reduce": "canonical", "virtual_ranks": 8}
    assert sent(dp_replicate=4, **run) == pytest.approx({"dp_replicate": 2 * P * 4})


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_sends_as_much_as_without(tp):
    """Korthikanti et al. 2022, section 4.2.2: a gather and a reduce-scatter are an all-reduce."""
    whole, cut = (sent(tp=tp, sequence=s)["tp"] for s in (False, True))
    regions = 2 * ARCH.num_layers + 1  # each left forward and entered backward; embedding and loss make one together
    numbers = A * B * T * 3 * 4
    assert whole == pytest.approx(2 * (tp - 1) / tp * (2 * A * regions * HIDDEN + numbers))
    norms = 4 * (2 * ARCH.num_layers + 1) * ARCH.d_model
    assert cut == pytest.approx(whole + 2 * (tp - 1) / tp * norms)


def test_full_recompute_repeats_three_of_four_collectives_of_a_forward_and_selective_two():
    def traffic(**settings):
        parallel = Parallel(tp=2, **settings)
        train = Train(steps=1, seq_len=T, global_batch=A * B, micro_batch=B)
        run = RunConfig(name="x", model=ARCH, data=Data(tokens=""), train=train, parallel=parallel)
        return {t.kind: t.count for t in step_traffic(positions(run)[0]) if t.what == "hidden states"}

    plain, full, selective, second = (
        traffic(),
        traffic(recompute="full"),
        traffic(recompute="selective"),
        traffic(recompute="full", recompute_every=2),
    )
    # What left a region is kept; what entered it is gathered again.
    assert selective == plain | {"all_gather": plain["all_gather"] + 2 * A * ARCH.num_layers}
    assert full["all_gather"] - plain["all_gather"] == 2 * A * ARCH.num_layers
    assert full["reduce_scatter"] - plain["reduce_scatter"] == A * ARCH.num_layers
    assert second["all_gather"] - plain["all_gather"] == A * ARCH.num_layers


def test_a_pipeline_sends_hidden_states_over_each_boundary():
    ends = [sent(pp=4, rank=rank, dp_shard=1)["pp"] for rank in range(4)]
    tied = ARCH.vocab_size * ARCH.d_model * 4
    assert ends == [A * HIDDEN + tied, 2 * A * HIDDEN, 2 * A * HIDDEN, A * HIDDEN + tied]
    untied = replace(ARCH, tied_embeddings=False)
    assert sent(untied, pp=4)["pp"] == A * HIDDEN
    assert sent(untied, pp=2, tp=2)["pp"] == A * HIDDEN / 2
    assert sent(untied, pp=2, tp=2, sequence=False)["pp"] == A * HIDDEN


def test_the_turn_of_a_v_needs_no_message():
    down = [sent(replace(ARCH, num_layers=8), pp=2, schedule="zb_v", rank=r)["pp"] for r in (0, 1)]
    assert down == [2 * A * HIDDEN, 2 * A * HIDDEN]  # rank 0: forward of stage 0, gradient of stage 3; both on rank 1
