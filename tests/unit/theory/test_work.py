"""The work of a step against the operations that the trainer's model really starts."""

from dataclasses import replace

import pytest

from ingot.schema.arch import Arch
from ingot.theory.flops import train_flops_per_token
from ingot.theory.memory import chunks
from ingot.theory.work import collective_bytes, micro_batch_operations, step_work

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


@pytest.mark.parametrize(
    ("arch", "sequences"),
    [(ARCH, 1), (ARCH, 4), (replace(ARCH, num_layers=6), 1), (replace(ARCH, qk_norm=True, num_layers=4), 1)],
)
def test_operations_are_counted_within_a_tenth(arch, sequences):
    pytest.importorskip("torch")
    predicted = micro_batch_operations(arch, sequences * 256, "cpu")
    assert predicted == pytest.approx(started_operations(arch, sequences, 256), rel=0.1)


def test_products_and_attention_make_the_flops_of_the_step():
    work = step_work(ARCH, precision="bf16", seq_len=256, micro_batch=4, accumulation=3, ranks=2)
    tokens = 256 * 4 * 3
    # Attention runs 7 products for the 6 that count as useful.
    assert work.matmul_flops + work.attention_flops * 6 / 7 == pytest.approx(tokens * train_flops_per_token(ARCH, 256))


def test_accumulation_repeats_everything_but_the_update():
    once, thrice = (
        step_work(ARCH, precision="bf16", seq_len=256, micro_batch=4, accumulation=a, ranks=2) for a in (1, 3)
    )
    assert thrice.matmul_flops == 3 * once.matmul_flops
    assert once.moved_bytes < thrice.moved_bytes < 3 * once.moved_bytes
    assert thrice.sent_bytes == once.sent_bytes  # one unit: gathered and reduced once


def test_one_rank_sends_nothing_and_blocks_are_gathered_twice():
    large = replace(ARCH, d_model=2048, d_ffn=8192, num_layers=8)
    assert collective_bytes(large, "bf16", 1, 4) == 0
    assert collective_bytes(large, "bf16", 8, 4) == 4 * collective_bytes(large, "bf16", 8, 1)


def test_chunks_cover_all_tokens():
    assert chunks(ARCH, 256, "cpu") == 1
    assert chunks(ARCH, 257, "cpu") == 2
