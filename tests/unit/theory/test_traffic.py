"""The formulas of the papers, on shapes of one's choice. What the trainer really sends: tests/dist/test_traffic.py."""

from dataclasses import replace

import pytest

from ingot.planner.request.presets import load_model
from ingot.schema.arch import Arch, Moe
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import positions
from ingot.theory.params import count_parameters
from ingot.theory.traffic import Traffic, sent_by_axis, step_traffic

ARCH = replace(load_model("llama3-8b").arch, num_layers=4, vocab_size=4096, tied_embeddings=True)
A, B, T = 4, 2, 1024
EXPERTS = Moe(num_experts=16, top_k=4, d_expert=512)
SPARSE = replace(ARCH, moe=EXPERTS)
P, HIDDEN = count_parameters(ARCH), B * T * ARCH.d_model * 2


def traffic_of(arch: Arch = ARCH, rank: int = 0, **settings) -> tuple[Traffic, ...]:
    parallel = Parallel(**settings)
    train = Train(steps=1, seq_len=T, global_batch=A * B * parallel.data_ranks, micro_batch=B)
    run = RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel)
    return step_traffic(positions(run)[rank])


def sent(arch: Arch = ARCH, rank: int = 0, **settings) -> dict[str, float]:
    return sent_by_axis(traffic_of(arch, rank, **settings))


def by_what(arch: Arch = ARCH, **settings) -> dict[str, Traffic]:
    """Return the traffic by name; each name has one kind of traffic."""
    return {traffic.what: traffic for traffic in traffic_of(arch, **settings)}


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


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_of_context_parallelism_exchange_state_like_those_of_data_parallelism(zero):
    """The same parameters once per micro-batch; cp = 4 has a quarter of the samples of dp_shard = 4, in as many."""
    data = sent(dp_shard=4, zero=zero)["dp_shard"]
    both = [t for t in traffic_of(cp=2, dp_shard=2, context="ring", zero=zero) if t.axis == "dp_shard+cp"]
    assert sum(t.sent for t in both) == data and all(t.ranks == 4 for t in both)


def test_a_ring_passes_keys_and_values_on_and_ulysses_deals_heads():
    kv = 2 * B * T * ARCH.num_kv_heads * ARCH.head_dim  # of whole sequences; here each rank has a quarter
    ring = by_what(cp=4, context="ring")["keys and values"]
    # 3 messages forward, 3 backward and 3 of gradients, which are summed in float32.
    assert (ring.kind, ring.axis, ring.count) == ("send", "cp", 9 * A * ARCH.num_layers)
    assert ring.sent == A * ARCH.num_layers * 3 * kv / 4 * (2 + 2 + 4)
    heads = by_what(cp=4, context="ulysses")["heads of attention"]
    qkvo = B * T / 4 * ARCH.head_dim * (2 * ARCH.num_heads + 2 * ARCH.num_kv_heads) * 2
    assert (heads.kind, heads.count) == ("all_to_all", 4 * A * ARCH.num_layers)
    assert heads.sent == A * ARCH.num_layers * 2 * qkvo * 3 / 4


@pytest.mark.parametrize(("recompute", "times"), [("full", 4 / 3), ("selective", 1)])
def test_recomputed_attention_meets_the_others_again_unless_its_result_is_kept(recompute, times):
    plain, again = (by_what(cp=4, context="ring", recompute=how)["keys and values"] for how in ("none", recompute))
    assert again.count == plain.count * times  # 3 more messages for 9


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_experts_get_rows_of_every_token_and_send_them_back(ep):
    rows = by_what(SPARSE, dp_shard=8, ep=ep)["rows of experts"]
    assert (rows.axis, rows.count) == ("dp_shard", 4 * A * SPARSE.num_layers)
    assert rows.sent == pytest.approx(4 * A * SPARSE.num_layers * EXPERTS.top_k * HIDDEN * (ep - 1) / ep)


def test_a_capacity_below_an_even_share_sends_fewer_rows_and_every_choice():
    half = replace(SPARSE, moe=replace(EXPERTS, capacity_factor=0.5))
    whole, capped = (by_what(arch, dp_shard=2, cp=2, ep=4, context="ring") for arch in (SPARSE, half))
    assert capped["rows of experts"].sent == whole["rows of experts"].sent / 2
    assert "choices of experts" not in whole
    choices = capped["choices of experts"]
    assert (choices.kind, choices.axis) == ("all_gather", "cp")
    assert choices.bytes == A * SPARSE.num_layers * B * T * EXPERTS.top_k * 8


def test_full_recompute_repeats_the_forwards_all_to_alls_and_selective_keeps_what_they_brought():
    plain, full, selective = (
        by_what(SPARSE, dp_shard=4, ep=4, recompute=how)["rows of experts"] for how in ("none", "full", "selective")
    )
    assert full.count == plain.count * 3 / 2 and selective == plain


def test_experts_are_summed_over_the_ranks_that_hold_the_same_ones():
    traffic = by_what(SPARSE, dp_shard=8, ep=2, zero=1)
    experts = 16 * 3 * ARCH.d_model * 512 * ARCH.num_layers / 2
    assert traffic["gradients of experts"].bytes == 4 * experts and traffic["gradients of experts"].ranks == 4
    assert traffic["parameters of experts"].bytes == 2 * experts
    assert traffic["gradients"].ranks == 8
    alone = by_what(SPARSE, dp_shard=8, ep=8, zero=1)
    assert "gradients of experts" not in alone and "parameters of experts" not in alone
    copies = by_what(SPARSE, dp_replicate=2, dp_shard=2, ep=2, zero=1)
    assert (copies["gradients of experts"].kind, copies["gradients of experts"].axis) == ("all_reduce", "dp_replicate")


def test_only_shared_experts_are_a_region_of_tensor_parallelism():
    shared = replace(SPARSE, moe=replace(EXPERTS, shared_experts=1))
    counts = [
        sum(t.count for t in traffic_of(arch, tp=2) if t.what == "hidden states" and t.kind == "all_gather")
        for arch in (ARCH, shared, SPARSE)
    ]
    # Of each block forward and backward; embedding and loss.
    assert counts == [A * (4 * 4 + 2), A * (4 * 4 + 2), A * (2 * 4 + 2)]


def test_canonical_sums_reach_the_ranks_of_a_copy_once():
    run = {"reduce": "canonical", "virtual_ranks": 8, "dp_replicate": 2, "cp": 2, "context": "ring"}
    last = [t for t in traffic_of(**run) if t.kind == "all_reduce" and t.axis == "cp"]
    assert [t.bytes for t in last] == [P * 4]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_chunks_of_tp_are_more_calls_of_the_same_bytes(recompute):
    def hidden(chunks: int) -> dict[str, Traffic]:
        found = traffic_of(tp=4, tp_chunks=chunks, recompute=recompute)
        return {traffic.kind: traffic for traffic in found if traffic.what == "hidden states"}

    whole, divided = hidden(1), hidden(3)
    ends = 2 * A  # the embedding and the loss have one of each kind, and no chunks
    for kind in ("all_gather", "reduce_scatter"):
        assert divided[kind].bytes == whole[kind].bytes
        assert divided[kind].count - ends == 3 * (whole[kind].count - ends)
