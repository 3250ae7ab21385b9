"""The work of a step against the operations that the trainer's model really starts."""

from dataclasses import replace
from typing import Any

import pytest

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.flops import train_flops_per_token
from ingot.theory.layout import positions
from ingot.theory.work import Work, step_work

ARCH = Arch(
    vocab_size=4096, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=512
)


def started_operations(arch: Arch, sequences: int, seq_len: int) -> int:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from ingot.model.transformer import Transformer

    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += not func.is_view
            return func(*args, **(kwargs or {}))

    torch.set_num_threads(1)
    model = Transformer(arch).bfloat16()
    tokens = torch.zeros(sequences, seq_len, dtype=torch.long)
    with Count() as count:
        model(tokens, tokens).backward()
    return count.operations


def work_of(arch: Arch = ARCH, rank: int = 0, *, sequences: int = 4, accumulation: int = 1, **settings) -> Work:
    parallel = Parallel(**settings)
    batch = sequences * accumulation * parallel.data_ranks
    train = Train(steps=1, seq_len=256, global_batch=batch, micro_batch=sequences)
    run = RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel)
    return step_work(positions(run)[rank])


@pytest.mark.parametrize(
    ("arch", "sequences"),
    [(ARCH, 1), (ARCH, 4), (replace(ARCH, num_layers=6), 1), (replace(ARCH, qk_norm=True, num_layers=4), 1)],
)
def test_operations_are_counted_within_a_tenth(arch, sequences):
    pytest.importorskip("torch")
    once, twice = (work_of(arch, sequences=sequences, accumulation=a).operations for a in (1, 2))
    assert twice - once == pytest.approx(started_operations(arch, sequences, 256), rel=0.1)


def test_products_and_attention_make_the_flops_of_the_step():
    work = work_of(accumulation=3, dp_shard=2)
    tokens = 256 * 4 * 3
    # Attention runs 7 products for the 6 that count as useful.
    assert work.matmul_flops + work.attention_flops * 6 / 7 == pytest.approx(tokens * train_flops_per_token(ARCH, 256))


@pytest.mark.parametrize("settings", [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "stage_layers": (0, 2)}])
def test_ranks_share_the_flops_of_the_model(settings):
    whole = work_of(accumulation=4)
    ranks = [work_of(rank=r, accumulation=4, **settings) for r in range(settings.get("pp", 1))]
    for name in ("matmul_flops", "attention_flops"):
        shared = sum(getattr(work, name) for work in ranks) * settings.get("tp", 1)
        assert shared == pytest.approx(getattr(whole, name))


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
