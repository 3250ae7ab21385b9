import math

import pytest
import torch

from ingot.trainer.optim.gradients import clip_factor, gradient_norm, gradient_norm_and_loss


def clip_grad_norm(shards, max_norm, *, scale=None):
    """Clip as a training step does, but in place, so that a test can read the gradients."""
    norm = gradient_norm(shards, scale=scale)
    factor = clip_factor(norm, max_norm, scale=scale)
    for shard in shards:
        if factor is not None:
            shard.grad.mul_(factor)
    return norm


@pytest.fixture
def shards(blocks):
    def make(*gradients, dtype=torch.float64):
        made = blocks(torch.float64 if dtype == torch.float64 else torch.float32)[: len(gradients)]
        for block, gradient in zip(made, gradients, strict=True):
            block.grad = torch.tensor(gradient, dtype=dtype)
            block.value = torch.zeros(len(gradient), dtype=block.value.dtype)
        return made

    return make


def test_scales_to_the_norm_and_reports_the_one_before(shards):
    made = shards([3.0, 0.0], [4.0], [])
    assert clip_grad_norm(made, 1.0).item() == pytest.approx(5.0)
    assert clip_grad_norm(made, 0.0).item() == pytest.approx(1.0, rel=1e-6)


def test_small_gradients_stay_as_they_are(shards):
    made = shards([0.3, 0.4])
    assert clip_grad_norm(made, 1.0).item() == pytest.approx(0.5)
    assert made[0].grad.tolist() == [0.3, 0.4]


def test_zero_only_measures(shards):
    made = shards([30.0, 40.0])
    assert clip_grad_norm(made, 0.0).item() == pytest.approx(50.0)
    assert made[0].grad.tolist() == [30.0, 40.0]
    assert clip_factor(torch.tensor(50.0), 0.0) is None


def test_a_broken_gradient_shows_in_the_norm(shards):
    assert not clip_grad_norm(shards([1.0, float("nan")]), 1.0).isfinite()
    assert not clip_grad_norm(shards([float("inf")]), 1.0).isfinite()


def test_copies_are_clipped_but_not_counted(shards):
    made = shards([3.0, 4.0], [100.0])
    made[1].owner = False
    assert clip_grad_norm(made, 1.0).item() == pytest.approx(5.0)
    assert made[1].grad.item() == pytest.approx(20.0, rel=1e-5)


def test_the_loss_scale_is_taken_out_exactly(shards):
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(1000, generator=generator, dtype=torch.float32).tolist()
    for max_norm in (0.0, 1.0, 1e6):
        made, scaled = shards(plain, dtype=torch.float32), shards(plain, dtype=torch.float32)
        scaled[0].grad.mul_(2.0**16)
        norm = clip_grad_norm(made, max_norm)
        assert torch.equal(norm, clip_grad_norm(scaled, max_norm, scale=torch.tensor(2.0**16)))
        assert torch.equal(made[0].grad, scaled[0].grad)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
def test_squares_have_at_least_float32(shards, dtype, kept):
    # A sum kept in bfloat16 would stop at 512, and the norm itself would be rounded to 8 bits.
    made = shards([1.5] * 4097, dtype=dtype)
    norm = gradient_norm(made)
    assert norm.dtype == kept
    assert norm.item() == pytest.approx(1.5 * 4097**0.5, rel=1e-6)


def test_float64_stays_float64(shards):
    made = shards([1.0, 1e-9])
    assert gradient_norm(made).dtype == torch.float64
    assert gradient_norm(made).item() == (1 + 1e-18) ** 0.5


def test_norm_and_loss_of_a_step_are_the_same_on_all_ranks(fork_ranks, blocks):
    """Ranks 0 and 2 read tokens; rank 1 holds another stage, whose loss is no number."""

    def measure(rank, world):
        block = blocks(torch.float32)[0]
        block.grad, block.value = torch.full((2,), rank + 1.0), torch.zeros(2)
        loss = torch.tensor([2.0, math.nan, 5.0][rank])
        norm, mean = gradient_norm_and_loss([block], loss, 0.0 if rank == 1 else 0.5)
        return norm.item(), mean.item(), norm.dtype, mean.dtype

    expected = pytest.approx((2 * (1 + 4 + 9)) ** 0.5), 3.5, torch.float32, torch.float64
    assert fork_ranks(measure, 3) == [expected] * 3
