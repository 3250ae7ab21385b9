"""Compositions of parallelism that train on with wrong numbers: the kinds that Megatron-LM issue 7452 found by a fuzz.

Each kind is shown on ranks with plain torch: the wrong result is not the one of a single process, and nothing raises.
The same slip is planted in ingot (tests/proof, tests/mutants), where the comparison with one process has to see it.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.mutants.parallel import MUTANTS
from tests.proof import faults, faults_long  # noqa: F401  (they fill FAULTS)
from tests.proof.cases import case_named, core_cases
from tests.proof.planting import FAULTS
from torch import Tensor

TOKENS_TD = torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()
WEIGHT_D = torch.tensor([1.0, 0.5], dtype=torch.float64)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def gradient_of_heads(heads: list[Tensor]) -> Tensor:
    """The gradient of a weight that all heads share, from some of them."""
    weight = WEIGHT_D.clone().requires_grad_()
    for head_TD in heads:
        (head_TD * weight).pow(3).sum().backward()
    assert weight.grad is not None
    return weight.grad


def shared_by_heads(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight on every tensor-parallel rank, whose heads are divided: its gradient needs a sum (finding 11)."""
    heads = list(TOKENS_TD[:, :4].chunk(ranks, dim=1))
    own = gradient_of_heads([heads[rank]])
    return own, sum_over_ranks(own), gradient_of_heads(heads)


def divided_in_the_norm(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient of which each rank has a part. Without its mark, it counts as a copy: on rank 0 alone (finding 8)."""
    part = TOKENS_TD.chunk(ranks, dim=1)[rank]
    own = part.square().sum()
    as_a_copy = own if rank == 0 else 0 * own
    return sum_over_ranks(as_a_copy).sqrt(), sum_over_ranks(own).sqrt(), TOKENS_TD.norm()


def copied_in_the_norm(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient that every rank has whole. With the mark of divided ones, it counts once per rank."""
    square = TOKENS_TD.square().sum()
    once = square if rank == 0 else 0 * square
    return sum_over_ranks(square).sqrt(), sum_over_ranks(once).sqrt(), TOKENS_TD.norm()


def divided_by_local_tokens(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """A mean over each rank's valid tokens, then over ranks: not the mean if their numbers differ (findings 3, 9)."""
    losses_T = TOKENS_TD[0, :4]
    own = losses_T[:1] if rank == 0 else losses_T[1:]
    count = torch.tensor(float(len(own)), dtype=torch.float64)
    return sum_over_ranks(own.mean()) / ranks, sum_over_ranks(own.sum()) / sum_over_ranks(count), losses_T.mean()


def count_overwritten_by_its_sum(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens, counted, and summed over ranks in place; the scale of its own loss then takes the sum for its
    count (finding 10)."""
    own = torch.tensor(3.0 if rank == 0 else 1.0, dtype=torch.float64)
    count, expected = own.clone(), own / 4
    everyone = count
    dist.all_reduce(everyone)
    return count / everyone, own / everyone, expected


def experts_averaged_like_the_rest(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """An expert on one rank, to which all ranks send tokens, so that its gradient is a sum over ranks already. Its mean
    over the ranks that have the expert, one, leaves it too large by their number (issue 5656)."""
    own = TOKENS_TD.chunk(ranks)[rank].square().mean()
    arrived = sum_over_ranks(own)
    return arrived, arrived / ranks, TOKENS_TD.square().mean()


def scattered_over_another_group(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens are scattered over the default groups (0, 1), (2, 3) and gathered over the explicit ones (0, 2), (1, 3):
    after both they are other tokens (finding 7)."""
    explicit = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]
    tokens = torch.arange(4.0, dtype=torch.float64) + 10 * (rank % 2)

    def after_the_gather(index: int) -> Tensor:
        parts = [torch.empty(2, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(parts, tokens.chunk(2)[index].contiguous(), group=explicit)
        return torch.cat(parts)

    return after_the_gather(rank % 2), after_the_gather(dist.get_rank(explicit)), tokens


# What happens elsewhere, its ranks, and the same slip in ingot: a fault of the proof, or a mutant.
KINDS = {
    "a shared weight's partial gradients are not summed": (shared_by_heads, 2, "head_norms_left_partial"),
    "a divided gradient counts on one rank": (divided_in_the_norm, 2, "divided_blocks_counted_once"),
    "experts of other ranks do not count": (divided_in_the_norm, 2, "experts_counted_on_one_rank"),
    "copies count once per rank": (copied_in_the_norm, 2, "copies_in_the_norm"),
    "a mean of means": (divided_by_local_tokens, 2, "tokens_of_a_micro_batch"),
    "a count is overwritten by its sum": (count_overwritten_by_its_sum, 2, "loads-of-own-tokens"),
    "experts are averaged like the rest": (experts_averaged_like_the_rest, 2, "divided_by_ep"),
    "another group": (scattered_over_another_group, 4, "scattered_on_the_wrong_group"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_happens_in_silence_and_is_seen_by_the_proof(fork_ranks, kind):
    bug, ranks, planted = KINDS[kind]
    # As lists: a tensor that is sent stays in the memory of its process, which ends.
    results = fork_ranks(lambda rank, world: [x.tolist() for x in bug(rank, world)], ranks)
    assert not any(np.allclose(wrong, expected) for wrong, _, expected in results)
    assert all(np.allclose(right, expected, rtol=1e-12) for _, right, expected in results)
    if planted in FAULTS:  # tests/proof/test_faults.py plants it
        assert case_named(FAULTS[planted].where) in core_cases() and FAULTS[planted].shows
    else:  # .ci/nightly plants it
        assert any("tests/proof/" in test for mutant in MUTANTS if mutant.name == planted for test in mutant.tests)


def test_copies_without_the_sum_drift_apart_and_with_it_stay_equal(fork_ranks):
    """The report's measurement: after 20 steps the two copies of the norm's weight differ (finding 11)."""

    def train(rank: int, ranks: int) -> list[list[float]]:
        found = []
        for reduce in (lambda g: g, sum_over_ranks):
            weight = torch.nn.Parameter(WEIGHT_D.clone())
            optimizer = torch.optim.Adam([weight], lr=0.01)
            for _ in range(20):
                weight.grad = reduce(shared_by_heads(rank, ranks)[0] * weight.detach())
                optimizer.step()
            found.append(weight.tolist())
        return found

    (first_alone, first_summed), (second_alone, second_summed) = fork_ranks(train, 2)
    assert np.abs(np.subtract(first_alone, second_alone)).max() > 1e-3
    assert first_summed == second_summed
