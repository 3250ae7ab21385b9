"""Garbage is collected between steps, and no step leaves tensors to the collector."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.trainer.build import build_parts
from ingot.trainer.collector import FULL_EVERY, collected_between_steps
from ingot.trainer.loader.loader import Batch
from ingot.trainer.mesh.fake import fake_rank
from ingot.trainer.step import train_step


class Cycle:
    """An object that only the collector frees."""

    def __init__(self, held: object = None):
        self.own, self.held = self, held


def test_the_collector_is_off_in_steps_and_runs_after_them():
    assert gc.isenabled()
    with pytest.raises(KeyError), collected_between_steps() as collect:
        assert not gc.isenabled()
        young, old = weakref.ref(Cycle()), Cycle()
        assert young() is not None
        collect(1)
        assert young() is None
        aged = weakref.ref(old)
        del old
        collect(2)
        assert aged() is not None
        collect(FULL_EVERY)
        assert aged() is None
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize(("frozen", "calls"), [(0, ["freeze", "unfreeze"]), (7, [])])
def test_objects_of_before_are_left_out_unless_some_are_frozen(monkeypatch, frozen, calls):
    found = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "freeze", lambda: found.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: found.append("unfreeze"))
    with collected_between_steps():
        assert found == calls[:1]
    assert found == calls


def tensors_in_cycles(work) -> int:
    """Return how many tensors only the collector would free after `work`."""
    gc.collect()
    gc.disable()
    try:
        work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_tensor_in_a_cycle_is_found():
    assert tensors_in_cycles(lambda: Cycle(torch.ones(1))) == 1


LAYOUTS = [
    {"recompute": "selective", "cp": 2},
    {"recompute": "full", "dp_shard": 2, "zero": 3},
    {"pp": 2, "tp": 2, "schedule": "zb_h1"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(map(str, layout.values())))
def test_a_step_leaves_no_tensor_to_the_collector(layout):
    arch = Arch(
        vocab_size=64, d_model=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, d_ffn=48, max_seq_len=16
    )
    parallel = Parallel(**layout)
    train = Train(steps=1, seq_len=16, global_batch=2 * parallel.data_ranks, micro_batch=1, compile="off")
    run = RunConfig(name="cycles", model=arch, data=Data(tokens=""), train=train, parallel=parallel)
    with fake_rank(0, parallel.world_size):
        parts = build_parts(run, torch.device("cpu"), Path())
        tokens = torch.zeros(2, 1, 17, dtype=torch.int64)
        batch = Batch(1, np.zeros(0, np.int64), tokens[..., :-1], tokens[..., 1:], None, 0.0)
        train_step(parts, batch, 1e-3)  # what is made once may be in cycles
        assert tensors_in_cycles(lambda: train_step(parts, batch, 1e-3)) == 0
