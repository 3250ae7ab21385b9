import math

import pytest
import torch

from ingot.plugins.piece import ParameterShard
from ingot.trainer.optim import update_size
from ingot.trainer.optim.update_size import UpdateSize


def shards(*sizes, owner=True):
    torch.manual_seed(0)
    return [ParameterShard(f"p{n}", (size,), (0,), (size,), torch.randn(size), owner) for n, size in enumerate(sizes)]


def updated(own, step, scale):
    size = UpdateSize(own, 5, most=1000)
    size.before_update(step)
    for shard in own:
        shard.value += scale * torch.randn_like(shard.value)
    size.after_update()
    return size


def test_a_step_that_is_not_measured_has_no_update():
    size = updated(shards(100, 50), 7, 0.1)
    weights, update = size.read()
    assert weights > 0 and math.isnan(update)


def test_a_few_elements_stand_for_all():
    """1,000 of 40,000 elements are near the truth; all of 1,000 are the truth."""
    many = shards(30_000, 10_000)
    size = updated(many, 5, 0.1)
    assert sum(len(kept) for kept in map(size._sample, many)) == 1000
    assert size.read()[1] == pytest.approx(40_000 * 0.01, rel=0.1)
    few = shards(600, 400)
    before = [shard.value.clone() for shard in few]
    size = updated(few, 5, 0.1)
    change = sum(((shard.value - old).double() ** 2).sum() for shard, old in zip(few, before, strict=True))
    assert size.read()[1] == pytest.approx(float(change), rel=1e-6)
    assert math.isnan(size.read()[1])  # it was read


def test_weights_in_host_memory_are_not_read_whole_while_a_gpu_waits(monkeypatch):
    monkeypatch.setattr(update_size, "MOST_ON_HOST", 500)
    own = shards(30_000, 10_000)
    size = UpdateSize(own, 5, device=torch.device("cuda"))
    assert sum(len(size._sample(shard)) for shard in own) == 500
    assert size.read()[0] == pytest.approx(sum(float((shard.value**2).sum()) for shard in own), rel=0.2)
    whole = UpdateSize(own, 5, device=torch.device("cpu"))
    assert whole.read()[0] == pytest.approx(sum(float((shard.value.double() ** 2).sum()) for shard in own), rel=1e-6)


def test_a_rank_that_owns_nothing_adds_nothing():
    assert updated(shards(10, owner=False), 5, 0.1).read() == (0.0, 0.0)
