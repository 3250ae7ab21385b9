import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.trainer.telemetry.layer_sizes import LayerSizes


class Reads(TorchDispatchMode):
    """The number of values and tensors that the host reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten._to_copy)
        return func(*args, **(kwargs or {}))


def test_all_measurements_are_read_at_once(monkeypatch):
    """On a GPU each read is a wait for the device: one, however many layers and micro-batches."""
    shards = [
        SimpleNamespace(
            name=f"blocks.{layer}.weight", owner=True, value=torch.ones(3), grad=torch.full((3,), layer + 1.0)
        )
        for layer in range(2)
    ]
    stage = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Identity(), "1": nn.Identity()})})
    sizes = LayerSizes(shards, {0: stage}, layers=2, every=1, request=None)
    copies, plain = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copies.append(tensor.shape), plain(tensor))[1])
    for step in (1, 2):
        with sizes.step(step):
            for micro_batch in range(4):
                for layer, block in enumerate(stage["blocks"].values()):
                    block(torch.full((2, 5), float(layer + micro_batch)))
        sizes.before_update(step, None)
    with Reads() as reads:
        (_, first), (step, second) = sizes.read()
    assert (step, first, reads.count, len(copies)) == (2, second, 0, 1)
    assert first == pytest.approx(
        {
            "layers/0/grad_norm": 3**0.5,
            "layers/1/grad_norm": 12**0.5,
            "layers/other/grad_norm": 0.0,
            "layers/0/activation_rms": ((0 + 1 + 4 + 9) / 4) ** 0.5,
            "layers/1/activation_rms": ((1 + 4 + 9 + 16) / 4) ** 0.5,
        }
    )


def test_hidden_states_at_the_end_of_the_precision_are_counted_by_layer():
    """Half of the largest number of fp16 is 32,752. What is infinite or NaN counts, and float32 has no such limit."""
    stage = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Identity(), "1": nn.Identity()})})
    sizes = LayerSizes([], {0: stage}, layers=2, every=0, request=None, dtype=torch.float16, range_every=4)
    plain = LayerSizes([], {0: stage}, layers=2, every=2, request=None, range_every=1)
    for step in (1, 2, 3, 4):
        with sizes.step(step), plain.step(step):
            first, second = stage["blocks"].values()
            first(torch.tensor([1.0, 3e4, -6e4, 4e4, math.inf], dtype=torch.float16))
            second(torch.tensor([[1.0, math.nan], [0.0, 3e4]], dtype=torch.float16))
        sizes.before_update(step, None)
        plain.before_update(step, None)
    ((step, found),) = sizes.read()
    assert (step, found["layers/0/activation_saturation"], found["layers/1/activation_saturation"]) == (4, 0.6, 0.25)
    measured = plain.read()
    assert [step for step, _ in measured] == [2, 4] and not any("satur" in name for _, own in measured for name in own)
