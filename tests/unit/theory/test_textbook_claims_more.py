"""More numbers of teaching texts, each as ingot's own formulas or its published runs give it (docs/textbook.md)."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.theory.test_textbook_claims import published_block_bytes

from ingot.config import to_dict
from ingot.data.filters.c4 import C4, C4Rules
from ingot.data.filters.quality import PRESETS
from ingot.data.mixture.shares import CLASSIC
from ingot.planner.predict.time.links import CollectiveGroup, all_reduce, ring_all_reduce, tree_all_reduce
from ingot.planner.predict.time.links import all_gather as reduce_scatter
from ingot.planner.published.run import shipped_rows
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.run.outlook import device_usd
from ingot.planner.run.storage import SAVED_STATE_AND_WEIGHTS_BYTES, blocking_stall, copy_stall, text_bytes_per_second
from ingot.schema.arch import Arch
from ingot.schema.corpus import Document
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.flops import TRAIN_TO_FORWARD, model_flops_utilization, train_flops_6nd
from ingot.theory.layout import positions
from ingot.theory.params import count_parameters, state_per_parameter
from ingot.theory.saved import block_bytes, recomputed_block_bytes
from ingot.theory.traffic import step_traffic

H100 = load_cluster("128x8xh100")
PEAK = 989e12
LLAMA3_8B, LLAMA3_70B = load_model("llama3-8b").arch, load_model("llama3-70b").arch
ROWS = {row.id: row for row in shipped_rows()}


def measured(name: str, key: str) -> float:
    found = ROWS[name].number("measured", key)
    assert found
    return found


def position(arch: Arch, parallel: Parallel, seq_len: int = 4096):
    train = Train(steps=1, seq_len=seq_len, global_batch=parallel.data_ranks, micro_batch=1)
    return positions(RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel))[0]


def test_full_recompute_saves_what_was_kept():
    """A forward more is 4/3 of the FLOPs; of a block its input stays: 17 times less than 34sbh, 21 with wide SwiGLU."""
    assert pytest.approx(4 / 3) == (TRAIN_TO_FORWARD + 1) / TRAIN_TO_FORWARD
    kept = sum(block_bytes(position(LLAMA3_70B, Parallel()), "cuda").values())
    saved = kept / recomputed_block_bytes(position(LLAMA3_70B, Parallel(recompute="full")))
    assert saved == pytest.approx(21.3, abs=0.1)
    assert 34 / 2 == 17  # sbh of a GELU block with dropout (Korthikanti et al. 2022)


@pytest.mark.parametrize(("rate", "seconds"), [(10e9, 98), (2e9, 490), (3.3e9, 297)])
def test_a_blocking_checkpoint_of_70b_is_a_division(rate, seconds):
    """14 N bytes / rate: five minutes are 3.3 GB/s."""
    found = blocking_stall(70e9 * SAVED_STATE_AND_WEIGHTS_BYTES, 1, rate).value
    assert found == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("tera", "mfu"), [(430, 0.43), (400, 0.40), (380, 0.38)])
def test_mfu_of_llama3_by_scale_and_length(tera, mfu):
    """TFLOP/s of a GPU / 989: 430 on 8,192, 400 on 16,384, 380 with sequences of 131,072."""
    assert model_flops_utilization(tera * 1e12, 1, PEAK) == pytest.approx(mfu, abs=0.006)


def test_45_per_cent_mfu_is_above_every_scale_of_llama3():
    """45% are 445 TFLOP/s; the largest of Llama 3's is 430. Published runs of H100 at 45% and more are smaller."""
    assert 430e12 < 0.45 * PEAK < 446e12
    assert model_flops_utilization(430e12, 1, PEAK) < 0.45
    above = [row for row in ROWS.values() if (row.number("measured", "mfu_pct") or 0) >= 45]
    assert above and all((row.number("cluster", "n_gpus") or 0) < 16_384 for row in above)


def test_mfu_of_palm():
    assert measured("palm-540b", "mfu_pct") == 46.2


def test_compute_of_gpt3():
    """6 x 175e9 x 300e9 = 3.15e23, half of what is printed."""
    assert train_flops_6nd(175e9, 300e9) == pytest.approx(3.15e23)
    assert 6e23 / train_flops_6nd(175e9, 300e9) == pytest.approx(1.9, abs=0.01)


def test_13b_on_one_gpu_needs_offloaded_parameters():
    """2 N = 26 GB of 16-bit weights: more than 24 GB, less than 32 GB."""
    weights = 13e9 * state_per_parameter(Parallel(grads="bf16"), "bf16").copy
    assert 24e9 < weights == 26e9 < 32e9


def test_llama3_has_no_qk_norm():
    norms = {name: load_model(name).arch.qk_norm for name in ("llama3-8b", "llama3-70b", "llama3-405b", "qwen3-8b")}
    assert norms == {"llama3-8b": False, "llama3-70b": False, "llama3-405b": False, "qwen3-8b": True}


def test_a_cap_on_logits_is_a_setting_of_its_own():
    """Flash attention computes the same function; the cap changes it, and is off unless it is set."""
    assert LLAMA3_8B.logit_softcap == 0.0
    assert to_dict(replace(LLAMA3_8B, logit_softcap=30.0)) != to_dict(LLAMA3_8B)


def test_bf16_has_the_range_of_fp32_and_8_bits():
    """Largest (2 - 2^-7) 2^127 = 3.39e38, below fp32's 3.40e38; 1 + 2^-8 is no number of bf16."""
    largest_bf16, largest_fp32 = (2 - 2.0**-7) * 2.0**127, (2 - 2.0**-23) * 2.0**127
    assert largest_bf16 == pytest.approx(3.39e38, rel=1e-3) and largest_bf16 < largest_fp32
    assert largest_bf16 * 2 > largest_fp32  # so a sum of two large numbers overflows


def test_sharp_sends_once():
    """S against 2 (n-1)/n S: 1.75 times less with 8 ranks, at most twice."""
    group = CollectiveGroup(ranks=8, near=8, link=450e9)
    times = ring_all_reduce(group, 1e9) / all_reduce(replace(group, sharp=True), 1e9)
    assert times == pytest.approx(2 * 7 / 8)
    many = replace(group, ranks=72, near=72)
    assert 1.9 < ring_all_reduce(many, 1e9) / all_reduce(replace(many, sharp=True), 1e9) < 2


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    """2 (n-1)/n S / b."""
    group = CollectiveGroup(ranks=8, near=8, link=450e9)
    assert ring_all_reduce(group, 1e9) == 2 * reduce_scatter(group, 1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 450e9)


def test_a_tree_beats_a_ring_for_small_messages():
    """2 log2(n) hops against 2 (n-1); for large messages bandwidth decides, and the ring sends less."""
    group = CollectiveGroup(ranks=64, near=64, link=450e9, link_seconds=3e-6)
    assert tree_all_reduce(group, 1e3) < ring_all_reduce(group, 1e3) / 10
    assert tree_all_reduce(group, 1e12) > ring_all_reduce(group, 1e12)


def test_c4_has_3_sentences_and_lines_of_5_words():
    rules = PRESETS["c4"].c4
    assert (rules.sentences, rules.line_words) == (3, 5)
    assert (C4Rules().sentences, C4Rules().line_words) == (5, 3)  # FineWeb's, of datatrove
    document = Document(id="", url="", source="", file="", record_id="", text="One line has five words.\n" * 2)
    drop = C4(rules)(document)
    assert drop and drop.rule == "c4.sentences"


def test_c4_of_750_gb_is_a_count_of_bytes():
    """750 GB / 4 bytes per token of English: about 190B tokens."""
    assert 750e9 / text_bytes_per_second(1.0) == pytest.approx(187.5e9)


def test_ten_per_cent_of_a_cost_needs_the_cost():
    """10% of GPU-hours x price: of 4.6 million dollars 460,000; of 70B on 1.5T tokens at 45% and $4, 155,000."""
    assert pytest.approx(460_000) == 0.1 * 4.6e6
    days = train_flops_6nd(70e9, 1.5e12) / (1024 * PEAK * 0.45) / 86_400
    assert 0.1 * device_usd(1024, days, 4.0).value == pytest.approx(157e3, rel=0.01)


def test_memory_of_blackwell_by_product():
    """The part of 180 to 192 GB that a driver shows: 178 GiB of a B200, 184 GiB of a GB200."""
    b200, gb200 = (load_cluster(name).memory_bytes for name in ("b200", "gb200"))
    assert b200 == 178 << 30 and gb200 == 184 << 30
    assert b200 < 192e9 < gb200 < 200e9


def test_fp8_gains_28_per_cent_on_8b():
    """8,532 / 6,667 tokens/s on 8 H100."""
    gain = measured("tt-8b-fsdp-8-compile+fp8", "tok_s_gpu") / measured("tt-8b-fsdp-8-compile", "tok_s_gpu")
    assert gain == pytest.approx(1.28, abs=0.005)


def test_compiling_gains_16_per_cent_on_8b():
    """6,667 / 5,762 tokens/s on 8 H100."""
    gain = measured("tt-8b-fsdp-8-compile", "tok_s_gpu") / measured("tt-8b-fsdp-8-eager", "tok_s_gpu")
    assert gain == pytest.approx(1.157, abs=0.001)


def test_flash_attention_saves_the_scores():
    """Unfused attention writes 5as/h of (34 + 5as/h) bytes: 80 of 114 at 2,048 with 96 heads of GPT-3."""
    kept, unfused = (published_block_bytes(2048, 1, 12_288, 96, scores=scores) for scores in (False, True))
    assert 1 - kept / unfused == pytest.approx(80 / 114)


def test_an_asynchronous_checkpoint_stops_for_a_copy():
    """Bytes per GPU / 50 GB/s to the host: 0.02 s for 70B on 1,024; the write itself, on 128 nodes at 1.2 GB/s, 6 s."""
    size = 70e9 * SAVED_STATE_AND_WEIGHTS_BYTES
    assert copy_stall(size, 1024, 50e9).value == pytest.approx(0.019, abs=1e-3)
    assert blocking_stall(size, 128, 1.2e9).value == pytest.approx(6.4, abs=0.1)
    assert blocking_stall(size, 1, 1.2e9).value / 60 == pytest.approx(13.6, abs=0.1)  # 10 to 30 minutes: one node


def test_bytes_of_experts_do_not_grow_with_their_number():
    """2 x top_k x d_model x bytes x (1 - local share) per token and layer."""
    sent = []
    for experts in (64, 256):
        moe = replace(load_model("moe-671b").arch.moe, num_experts=experts, groups=1, top_groups=1)
        arch = replace(load_model("moe-671b").arch, moe=moe)
        lines = step_traffic(position(arch, Parallel(dp_shard=64, ep=64)), "cuda")
        sent.append(sum(line.sent for line in lines if "expert" in str(line) and "all_to_all" in str(line)))
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(("ranks", "times"), [(3, 3.0), (8, 8.0), (64, 64.0)])
def test_zero3_divides_by_the_number_of_ranks(ranks, times):
    """16 B / n: three times less holds for three ranks."""
    whole = state_per_parameter(Parallel(grads="bf16"), "bf16").total
    divided = state_per_parameter(Parallel(dp_shard=ranks, zero=3, grads="bf16"), "bf16").total
    assert whole / divided == pytest.approx(times)


def test_tokens_per_parameter_of_llama3_8b():
    """15e12 / 8.03e9 = 1,868; 20 would be compute-optimal."""
    assert 15e12 / count_parameters(LLAMA3_8B) == pytest.approx(1868, abs=1)
    assert 15e12 / count_parameters(LLAMA3_70B) == pytest.approx(213, abs=1)


def test_parts_of_redpajama():
    """Billions of tokens: 1.21T in all, of which the web is 87%, not the 82% of the mixture that LLaMA drew."""
    parts = {"crawl": 878, "c4": 175, "code": 59, "papers": 28, "books": 26, "wikipedia": 24, "forums": 20}
    drawn = {
        "crawl": 0.67,
        "c4": 0.15,
        "code": 0.045,
        "wikipedia": 0.045,
        "books": 0.045,
        "papers": 0.025,
        "forums": 0.02,
    }
    assert sum(parts.values()) == 1210 and sum(drawn.values()) == pytest.approx(1.0)
    assert (parts["crawl"] + parts["c4"]) / 1210 == pytest.approx(0.87, abs=0.001)
    assert drawn["crawl"] + drawn["c4"] == pytest.approx(0.82) and CLASSIC["web"] == 0.70


@pytest.mark.parametrize(("sequences", "gigabytes"), [(1, 91), (2, 183), (4, 365), (8, 730)])
def test_activations_of_70b_by_number_of_sequences(sequences, gigabytes):
    """34 s b h L without recomputation: 200 to 400 GB are 2 to 4 sequences of 4,096."""
    assert 80 * published_block_bytes(4096, sequences, 8192, 64, scores=False) / 1e9 == pytest.approx(gigabytes, abs=1)


def test_nccl_blocking_wait_has_another_name():
    """PyTorch reads TORCH_NCCL_BLOCKING_WAIT, and the old name only as its alias."""
    found = importlib.util.find_spec("torch")
    if not found or not found.origin:
        pytest.skip("needs the headers of PyTorch")
    header = Path(found.origin).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    if not header.is_file():
        pytest.skip("this build of PyTorch has no headers")
    names = re.findall(r'"([A-Z_]*NCCL_(?:BLOCKING_WAIT|ASYNC_ERROR_HANDLING))"', header.read_text())
    assert names[:2] == ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"]
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in names
