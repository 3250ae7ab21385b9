"""The work of a step against the operations that the trainer's model really starts."""

from dataclasses import replace
from typing import Any

import pytest

from ingot.planner.published.shape import ForeignArch
from ingot.schema.arch import Arch, Mla, Moe
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.flops import train_flops_per_token
from ingot.theory.layout import positions
from ingot.theory.params import count_parameters
from ingot.theory.work import Work, step_work

ARCH = Arch(
    vocab_size=4096, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=512
)
SPARSE = replace(ARCH, moe=Moe(num_experts=8, top_k=2, d_expert=48, shared_experts=1, first_dense=1))
LATENT = replace(ARCH, num_kv_heads=4, head_dim=24, mla=Mla(q_rank=32, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=24))
CAPPED = replace(ARCH, num_layers=4, moe=Moe(num_experts=8, top_k=4, d_expert=48, capacity_factor=2.0))


def started_operations(arch: Arch, sequences: int, seq_len: int) -> int:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from ingot.trainer.model.routing import RouterLoss
    from ingot.trainer.model.transformer import Transformer

    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += not func.is_view
            return func(*args, **(kwargs or {}))

    torch.set_num_threads(1)
    model = Transformer(arch).bfloat16()
    tokens = torch.randint(0, arch.vocab_size, (sequences, seq_len))
    extra = {"router_loss": RouterLoss(torch.arange(sequences), torch.ones(()))} if arch.is_moe else {}
    with Count() as count:
        model(tokens, tokens, **extra).backward()
    return count.operations


def work_of(arch: Arch = ARCH, rank: int = 0, *, sequences: int = 4, accumulation: int = 1, **settings) -> Work:
    parallel = Parallel(**settings)
    batch = sequences * accumulation * parallel.data_ranks
    train = Train(steps=1, seq_len=256, global_batch=batch, micro_batch=sequences)
    run = RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel)
    return step_work(positions(run)[rank])


@pytest.mark.parametrize(
    ("arch", "sequences"),
    [
        (ARCH, 1),
        (ARCH, 4),
        (replace(ARCH, num_layers=6), 1),
        (replace(ARCH, qk_norm=True, num_layers=4), 1),
        (replace(SPARSE, num_layers=4), 1),
        (CAPPED, 1),
        (replace(LATENT, num_layers=4), 1),
        (replace(ARCH, logit_softcap=30.0), 1),
    ],
)
def test_operations_are_counted_within_a_tenth(arch, sequences):
    pytest.importorskip("torch")
    once, twice = (work_of(arch, sequences=sequences, accumulation=a).operations for a in (1, 2))
    assert twice - once == pytest.approx(started_operations(arch, sequences, 256), rel=0.1)


@pytest.mark.parametrize(
    "arch", [ARCH, SPARSE, LATENT, replace(ARCH, sliding_window=64)], ids=["dense", "experts", "latents", "window"]
)
def test_products_and_attention_make_the_flops_of_the_step(arch):
    work = work_of(arch, accumulation=3, dp_shard=2)
    tokens = 256 * 4 * 3
    # Attention runs 7 products for the 6 that count as useful.
    assert work.matmul_flops + work.attention_flops * 6 / 7 == pytest.approx(tokens * train_flops_per_token(arch, 256))


@pytest.mark.parametrize("arch", [SPARSE, replace(LATENT, tied_embeddings=False)], ids=["experts", "latents"])
def test_products_are_those_that_a_step_runs(arch):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from ingot.trainer.model.transformer import Transformer

    torch.set_num_threads(1)
    model = Transformer(arch).double()  # float64 has one product for each expert, which the counter knows
    tokens = torch.randint(0, arch.vocab_size, (4, 256))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for op, flops in counted.items() if "attention" not in str(op))
    assert work_of(arch).matmul_flops == pytest.approx(products)


def test_the_update_moves_eight_numbers_of_every_parameter_that_a_rank_owns():
    """Four are read, three written, and the gradient is read once more, for its norm; all are float32."""
    whole, half = (work_of(dp_shard=ranks, zero=1).moved_bytes for ranks in (1, 2))
    assert whole - half == count_parameters(ARCH) / 2 * 8 * 4


def test_values_of_latent_attention_are_padded_and_the_padding_is_work():
    narrow = replace(LATENT, mla=replace(LATENT.mla, v_dim=8))
    assert work_of(narrow).attention_flops == work_of(LATENT).attention_flops
    assert train_flops_per_token(narrow, 256) < train_flops_per_token(LATENT, 256)


@pytest.mark.parametrize("settings", [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "stage_layers": (0, 2)}])
@pytest.mark.parametrize("arch", [ARCH, SPARSE], ids=["dense", "experts"])
def test_ranks_share_the_flops_of_the_model(arch, settings):
    whole = work_of(arch, accumulation=4)
    ranks = [work_of(arch, rank=r, accumulation=4, **settings) for r in range(settings.get("pp", 1))]
    for name in ("matmul_flops", "attention_flops"):
        shared = sum(getattr(work, name) for work in ranks) * settings.get("tp", 1)
        assert shared == pytest.approx(getattr(whole, name))


def test_every_rank_of_tensor_parallelism_computes_latents():
    whole, half = (work_of(LATENT, tp=tp) for tp in (1, 2))
    down = 3 * 2 * 4 * 256 * LATENT.num_layers * LATENT.d_model * (32 + 16 + 8)
    assert 2 * half.matmul_flops - whole.matmul_flops == pytest.approx(down)


@pytest.mark.parametrize("settings", [{"context": "ulysses"}, {"context": "ring"}])
def test_ranks_of_context_parallelism_share_all_work_evenly(settings):
    whole, part = work_of(SPARSE), work_of(SPARSE, cp=4, **settings)
    assert 4 * part.matmul_flops == pytest.approx(whole.matmul_flops)
    assert 4 * part.attention_flops == pytest.approx(whole.attention_flops)


def test_contiguous_parts_leave_the_last_rank_most_of_the_attention():
    """The last rank has the last quarter of queries, which see 7/8 of the keys on average; the mean is half."""
    even, last = (work_of(cp=4, context="ring", context_layout=how) for how in ("zigzag", "contiguous"))
    assert last.attention_flops / even.attention_flops == pytest.approx(7 / 4, rel=0.01)
    # A window of 32 tokens is as long for all ranks but the first, whose first tokens see fewer.
    near = replace(ARCH, sliding_window=32)
    whole, last = work_of(near), work_of(near, cp=4, context="ring", context_layout="contiguous")
    assert 1 < 4 * last.attention_flops / whole.attention_flops < 1.1


def test_experts_beyond_their_capacity_are_no_work_and_overflow_is():
    half = Moe(num_experts=8, top_k=2, d_expert=48, capacity_factor=0.5)
    dropped, whole = work_of(replace(ARCH, moe=half)), work_of(replace(ARCH, moe=replace(half, capacity_factor=0.0)))
    experts = 3 * 2 * 4 * 256 * ARCH.num_layers * 2 * 3 * ARCH.d_model * 48
    assert whole.matmul_flops - dropped.matmul_flops == pytest.approx(experts / 2)
    fallback = work_of(replace(ARCH, moe=replace(half, overflow="fallback")))
    assert fallback.matmul_flops == pytest.approx(whole.matmul_flops)


def test_full_recompute_is_a_third_more_but_for_the_last_product_and_the_head():
    arch = replace(ARCH, num_layers=6)
    plain, full, selective = (work_of(arch, recompute=how) for how in ("none", "full", "selective"))
    tokens = 4 * 256
    head, last = tokens * 2 * ARCH.vocab_size * ARCH.d_model, tokens * 2 * ARCH.d_ffn * ARCH.d_model * 6
    assert full.matmul_flops == pytest.approx(plain.matmul_flops * 4 / 3 - head - last)
    assert full.attention_flops == pytest.approx(plain.attention_flops * 9 / 7)  # 2 more products for 7
    assert (selective.matmul_flops, selective.attention_flops) == (plain.matmul_flops, plain.attention_flops)
    assert plain.moved_bytes < selective.moved_bytes <= full.moved_bytes


def test_selective_recompute_runs_only_products_again_that_are_cut_by_rows():
    """The o matrix; and down, where a split backward cannot stop before it. Counted in tests/unit/parallel."""
    tokens, blocks = 4 * 4 * 256, ARCH.num_layers
    o, down = (tokens * 2 * width * ARCH.d_model * blocks / 2 for width in (ARCH.num_heads * ARCH.head_dim, ARCH.d_ffn))
    halves: dict[str, Any] = {"pp": 2, "schedule": "zb_h1"}
    for settings, ranks, expected in (({}, 1, o), (halves, 2, o + down)):
        again = 0.0
        for rank in range(ranks):
            plain, selective = (
                work_of(rank=rank, accumulation=4, tp=2, recompute=how, **settings) for how in ("none", "selective")
            )
            assert selective.attention_flops == plain.attention_flops
            again += selective.matmul_flops - plain.matmul_flops
        assert again == pytest.approx(expected)


def test_accumulation_repeats_everything_but_the_update():
    once, thrice = (work_of(accumulation=a, dp_shard=2) for a in (1, 3))
    assert thrice.matmul_flops == 3 * once.matmul_flops
    assert once.moved_bytes < thrice.moved_bytes < 3 * once.moved_bytes


def test_recomputed_experts_run_whole_and_selectively_not_at_all():
    """Results of experts are weighted after the last product, so full recompute leaves only the dense block's out."""
    arch = replace(SPARSE, num_layers=6)
    plain, full, selective = (work_of(arch, recompute=how) for how in ("none", "full", "selective"))
    tokens = 4 * 256
    head, last = tokens * 2 * ARCH.vocab_size * ARCH.d_model, tokens * 2 * ARCH.d_ffn * ARCH.d_model
    assert full.matmul_flops == pytest.approx(plain.matmul_flops * 4 / 3 - head - last)
    assert selective.matmul_flops == plain.matmul_flops


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_every_pass_of_the_head_is_the_same_work(softcap):
    """Models with multi-token prediction use the head several times (published runs); each pass counts once."""
    one, two, three = (
        work_of(ForeignArch(**{**vars(replace(ARCH, logit_softcap=softcap)), "head_passes": passes}))
        for passes in (1, 2, 3)
    )
    head = 4 * 256 * 6 * ARCH.vocab_size * ARCH.d_model
    assert one == work_of(replace(ARCH, logit_softcap=softcap))
    assert two.matmul_flops - one.matmul_flops == head
    for name in ("matmul_flops", "moved_bytes", "operations"):
        first, second, third = (getattr(work, name) for work in (one, two, three))
        assert third - second == pytest.approx(second - first)
        assert second > first
