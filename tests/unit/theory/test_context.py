"""Context parallelism in numbers: every token once, balanced work, volumes against small sums by hand, the choice."""

from dataclasses import replace
from typing import Any

import pytest
from tests.expect import refused

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Train
from ingot.theory.context import (
    Links,
    explain_context,
    imbalance,
    legal_ulysses,
    rank_positions,
    resolve_context,
    ring_bytes,
    ring_positions,
    seen_pairs,
    token_multiple,
    ulysses_bytes,
)

LLAMA = Arch(vocab_size=128_256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, d_ffn=14_336)
LAYOUTS = ("zigzag", "striped", "contiguous")


def train_of(seq_len, micro_batch=1):
    return Train(steps=1, seq_len=seq_len, global_batch=micro_batch, micro_batch=micro_batch)


def grid(cp, ulysses=1, layout: Any = "zigzag", **more):
    return Parallel(cp=cp, ulysses=ulysses, context_layout=layout, **more)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp, ulysses", [(1, 1), (2, 1), (2, 2), (3, 1), (6, 2), (6, 3), (8, 2), (8, 4), (12, 4)])
def test_every_token_has_one_rank_and_positions_ascend(layout, cp, ulysses):
    parallel = grid(cp, ulysses, layout)
    tokens = 2 * token_multiple(parallel)
    ranks = [[p for part in rank_positions(parallel, i, tokens) for p in part] for i in range(cp)]
    assert all(own == sorted(own) and len(own) == tokens // cp for own in ranks)
    assert sorted(p for own in ranks for p in own) == list(range(tokens))
    for place in range(parallel.ring):
        shared = [p for own in ranks[place * ulysses : (place + 1) * ulysses] for p in own]
        assert shared == [p for part in ring_positions(parallel, place, tokens) for p in part]


def test_layouts_are_those_of_the_papers():
    assert ring_positions(grid(2), 0, 16) == (range(4), range(12, 16))
    assert ring_positions(grid(2, layout="striped"), 1, 8) == (range(1, 8, 2),)
    assert ring_positions(grid(2, layout="contiguous"), 1, 8) == (range(4, 8),)


def test_a_length_that_does_not_divide_names_the_next_legal_ones():
    with refused("E-SEQUENCE-UNEVEN", tokens=12, multiple=8):
        ring_positions(grid(4), 0, 12)
    assert token_multiple(grid(4, layout="striped")) == 4
    assert token_multiple(grid(4, 4)) == 4
    assert token_multiple(grid(4, tp=2)) == 8
    assert token_multiple(grid(4, tp=2, sequence=False, layout="striped")) == 4


@pytest.mark.parametrize("window", [0, 1, 5, 16, 100])
def test_pairs_are_counted_one_by_one(window):
    for layout in LAYOUTS:
        for place in range(4):
            positions = ring_positions(grid(4, layout=layout), place, 32)
            by_hand = sum(min(p + 1, window or p + 1) for part in positions for p in part)
            assert seen_pairs(positions, window) == by_hand


def test_zigzag_and_striped_balance_and_contiguous_does_not():
    assert imbalance(grid(8), 8192) == 1
    assert imbalance(grid(8, layout="striped"), 8192) < 1.02
    assert imbalance(grid(8, layout="contiguous"), 8192) > 1.8


def test_volumes_of_a_small_grid_by_hand():
    arch = replace(LLAMA, num_heads=8, num_kv_heads=2, head_dim=4)
    train = train_of(32, micro_batch=3)
    ring = ring_bytes(arch, train, grid(4))
    message = 3 * 2 * 8 * 4 * 2  # B, keys and values with G heads of T/4 tokens, numbers
    assert (ring.forward_calls, ring.forward) == (3, 3 * message * 2)
    assert (ring.backward_calls, ring.backward) == (6, 3 * message * (2 + 4))
    dealt = ulysses_bytes(arch, train, grid(4, 4))
    # 8 heads of queries, keys and values repeated to 4 heads each, 8 of results; 8 tokens of each rank.
    assert (dealt.forward_calls, dealt.forward) == (2, 3 * 8 * 4 * (8 + 4 + 4 + 8) * 2)
    assert ulysses_bytes(arch, train, grid(4)).forward == ring_bytes(arch, train, grid(4, 4)).backward == 0
    both = grid(4, 2)
    assert ring_bytes(arch, train, both).forward == 1 * 3 * 2 * 1 * 16 * 4 * 2
    assert ulysses_bytes(arch, train, both).forward == 3 * 8 * 4 * (8 + 2 + 2 + 8) * 2


def test_auto_deals_heads_in_a_node_and_passes_keys_between_nodes():
    def chosen(seq_len, **degrees):
        found = resolve_context(LLAMA, train_of(seq_len), Parallel(**degrees))
        return found.context, found.ulysses

    assert chosen(32_768, cp=8) == ("ulysses", 8)
    assert chosen(131_072, cp=16) == ("usp", 8)
    assert chosen(131_072, cp=8, tp=8) == ("ring", 1)
    assert chosen(2**20, cp=4, tp=32) == ("ring", 1)  # one query head on a rank


def test_what_the_run_says_is_kept_and_deciding_twice_changes_nothing():
    train = train_of(32_768)
    asked = Parallel(cp=8, context="ring"), Parallel(cp=8, context="ulysses"), Parallel(cp=8, context="usp", ulysses=2)
    for parallel, (context, ulysses) in zip(asked, (("ring", 1), ("ulysses", 8), ("usp", 2)), strict=True):
        found = resolve_context(LLAMA, train, parallel)
        assert (found.context, found.ulysses) == (context, ulysses)
        assert resolve_context(LLAMA, train, found) == found
    auto = resolve_context(LLAMA, train, Parallel(cp=16))
    assert resolve_context(LLAMA, train, auto) == auto
    assert resolve_context(LLAMA, train, Parallel(cp=8, context="usp")).ulysses in (2, 4)


def test_slow_links_inside_a_node_make_a_ring():
    slow = Links(inside=5e9, flops=50e12)
    parallel = resolve_context(LLAMA, train_of(131_072), Parallel(cp=8), slow)
    assert parallel.context == "ring"


def test_legal_degrees_follow_the_heads_of_a_tensor_parallel_rank():
    assert legal_ulysses(LLAMA, Parallel(cp=8)) == [1, 2, 4, 8]
    assert legal_ulysses(LLAMA, Parallel(cp=8, tp=16)) == [1, 2]
    assert legal_ulysses(replace(LLAMA, num_heads=12), Parallel(cp=8)) == [1, 2, 4]


def test_auto_takes_a_grid_whose_layout_cuts_the_sequence():
    # A zigzag ring of 4 needs multiples of 8 tokens.
    assert resolve_context(LLAMA, train_of(12), Parallel(cp=4), Links(inside=1.0)).ulysses > 1


def test_the_reason_is_a_sentence_with_figures():
    why = explain_context(LLAMA, train_of(131_072), Parallel(cp=16))
    assert why.startswith("Ulysses over 8 in rings of 2 across nodes: all-to-alls send 280.0 MiB in 0.652 ms")
    assert "Ulysses over 4 in rings of 4 1.31 ms" in why
    alone = explain_context(LLAMA, train_of(131_072), Parallel(cp=2, tp=32))
    assert alone.endswith("1 query heads on a rank cannot be dealt to 2 ranks")
