"""State bytes per parameter are those of the paper, for each form and precision."""

import pytest

from ingot.schema.parallel import Parallel
from ingot.theory.params import state_per_parameter


@pytest.mark.parametrize("n", [1, 2, 8, 64])
@pytest.mark.parametrize(
    ("zero", "grads", "expected"),
    [
        (1, "bf16", lambda n: 4 + 12 / n),
        (1, "fp32", lambda n: 6 + 12 / n),
        (2, "bf16", lambda n: 2 + 14 / n),
        (2, "fp32", lambda n: 2 + 16 / n),
        (3, "bf16", lambda n: 16 / n),
        (3, "fp32", lambda n: 16 / n),
    ],
)
def test_bytes_of_each_zero_stage(n, zero, grads, expected):
    """Rajbhandari et al. 2020, figure 1, with K = 12; fp32 gradients cost 2 more where they are whole or kept."""
    for precision in ("bf16", "fp16"):
        parallel = Parallel(dp_shard=n, zero=zero, grads=grads)
        assert state_per_parameter(parallel, precision).total == pytest.approx(expected(n))


def test_ranks_of_context_parallelism_divide_state_unless_sums_are_canonical():
    data, context = Parallel(dp_shard=8, zero=1), Parallel(dp_shard=2, cp=4, zero=1)
    assert state_per_parameter(context, "bf16") == state_per_parameter(data, "bf16")
    canonical = Parallel(dp_replicate=2, cp=4, reduce="canonical", virtual_ranks=2, zero=1)
    assert state_per_parameter(canonical, "bf16").total == 18


def test_experts_are_divided_by_the_ranks_that_hold_the_same_ones():
    parallel = Parallel(dp_shard=2, cp=2, tp=2, ep=4, zero=1)
    assert parallel.expert_ranks == 2
    assert state_per_parameter(parallel, "bf16", parallel.expert_ranks).total == 6 + 12 / 2
    assert state_per_parameter(parallel, "bf16").total == 6 + 12 / 4


@pytest.mark.parametrize("grads", ["bf16", "fp32"])
def test_without_sharding_every_stage_is_ddp(grads):
    for zero in (1, 2):
        copies = Parallel(dp_replicate=4, zero=zero, grads=grads)
        assert state_per_parameter(copies, "bf16").total == (16 if grads == "bf16" else 18)


@pytest.mark.parametrize(("precision", "s"), [("fp32", 4), ("fp64", 8)])
def test_a_wide_parameter_is_its_own_master(precision, s):
    assert state_per_parameter(Parallel(), precision).total == 4 * s
    assert state_per_parameter(Parallel(dp_shard=4, zero=1), precision).total == 2 * s + 2 * s / 4
    assert state_per_parameter(Parallel(dp_shard=4, zero=2), precision).total == s + 3 * s / 4
    assert state_per_parameter(Parallel(dp_shard=4, zero=3), precision).total == 4 * s / 4


def test_offload_takes_moments_off_the_device_and_parameters_if_asked():
    on, off = (state_per_parameter(Parallel(dp_shard=2, zero=1, offload=o), "bf16") for o in ("none", "cpu"))
    assert off.moments == 0 and on.total - off.total == on.moments
    everything = Parallel(dp_shard=2, zero=3, offload="cpu", offload_parameters=True)
    assert state_per_parameter(everything, "bf16").total == 0
