"""The operations that make a host wait for its device, seen where there is no device.

HostCopies sees methods that copy a tensor to the host, which are no operations on a CPU. StandIn is a device of fake
tensors that is not the host, so that copies between both are operations, as they are with a GPU.
`python -m tests.host_waits` prints what waits in a step of dense models on it, by layout and rank.
"""

import json
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration

from ingot.rehearse.dryrun.fake import FakeProgram
from ingot.rehearse.dryrun.stand_ins import replaced
from ingot.rehearse.profile.host_reads import HostReads
from ingot.rehearse.profile.ranges import calling_line
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory import memory
from ingot.theory.layout import resolve_parallel
from ingot.trainer import build
from ingot.trainer.loader.loader import Batch
from ingot.trainer.mesh.fake import fake_rank
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.step import train_step
from ingot.trainer.torch_private import UncompiledFakeMode

# A list of numbers becomes a tensor of a device by a copy for which the host waits.
_OF_NUMBERS = {torch.tensor, torch.as_tensor}
_TO_HOST = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}
_NAME = "stand_in"
_register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
HAS_STAND_IN = _register is not None  # not in every release of torch


class HostCopies(TorchFunctionMode):
    """Counts the methods that copy a tensor to the host. found: (method, line) -> times. is_off: they are let pass.

    numbers: also counts lists of numbers that become tensors of a device that is named.
    """

    is_off = False

    def __init__(self, *, numbers: bool = False):
        super().__init__()
        self._numbers = numbers
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        sent = self._numbers and func in _OF_NUMBERS and (kwargs or {}).get("device") is not None
        if (func in _TO_HOST or sent) and not self.is_off:
            self.found[func.__name__, calling_line()] += 1
        return func(*args, **kwargs or {})


class StandIn(FakeProgram):
    """Fake tensors that may be on a device `StandIn.device`. Register it first, in a process of its own."""

    device = torch.device("cpu")
    # PyTorch then makes torch.tensor(.., device=..) from a tensor of the host and a copy, as it does for a GPU.
    avoid_device_init = True

    @classmethod
    def register(cls) -> None:
        """Let PyTorch know the device, until the end of this process."""
        assert _register is not None
        _register(_NAME)
        cls.device = torch.device(_NAME, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        to = (kwargs or {}).get("device")
        if to is not None and torch.device(to).type == _NAME:  # a copy of a real tensor, too, is fake
            return UncompiledFakeMode.__torch_dispatch__(self, func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


LAYOUTS = [  # with the ranks that are traced: a pipeline's first and last one differ
    ({}, (0,)),
    ({"dp_shard": 2}, (1,)),
    ({"tp": 2}, (1,)),
    ({"pp": 2}, (0, 1)),
]


def waits_of_a_step(layout: dict, rank: int) -> list[str]:
    """Train two steps of a dense model on a device in the place of a GPU. Returns what waits in the second: the
    first one sends some constants to the device."""
    arch = Arch(
        vocab_size=64, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, d_ffn=48, max_seq_len=16
    )
    parallel = Parallel(**layout)
    train = Train(
        steps=1, seq_len=16, global_batch=2 * parallel.data_ranks, micro_batch=1, precision="fp16", compile="off"
    )
    run = RunConfig(name="waits", model=arch, data=Data(tokens=""), train=train, parallel=parallel)
    with fake_rank(rank, parallel.world_size), ExitStack() as modes:
        mesh = build_mesh(resolve_parallel(run), "cpu")  # outside the mode: it contains a real tensor of ranks
        chunks = {StandIn.device.type: memory.LOGITS_CHUNK_BYTES["cuda"]}
        modes.enter_context(replaced(build, "build_mesh", lambda *_, **__: mesh))
        modes.enter_context(replaced(memory, "LOGITS_CHUNK_BYTES", chunks))
        modes.enter_context(StandIn())
        parts = build.build_parts(run, StandIn.device, Path(), first_values=False)
        tokens = torch.zeros(2, 1, 17, dtype=torch.int64, device=StandIn.device)
        batch = Batch(1, np.zeros(0, np.int64), tokens[..., :-1], tokens[..., 1:], None, 0.0)
        train_step(parts, batch, 1e-3)
        reads = modes.enter_context(HostReads(StandIn.device))
        train_step(parts, batch, 1e-3)
    assert reads.seen > 1000
    return [f"{name} at {line}" for name, line in reads.found]


def copies_that_wait() -> int:
    """Copy to the device and back, each with a wait and without. Returns how many copies were found."""
    with StandIn(), HostReads(StandIn.device) as reads:
        there = torch.tensor([1.0, 2.0], device=StandIn.device)
        there.copy_(torch.ones(2))
        there.cpu()
        there.to("cpu", non_blocking=True)
        there.copy_(torch.ones(2), non_blocking=True)
        there.double()
    return reads.found.total()


def main() -> None:
    torch.set_num_threads(1)
    StandIn.register()
    found: dict[str, Any] = {"copies": copies_that_wait()}
    for layout, ranks in LAYOUTS:
        for rank in ranks:
            found[f"{layout} rank {rank}"] = waits_of_a_step(layout, rank)
    print(json.dumps(found, indent=1), flush=True)
    os._exit(0)  # autograd's thread of the device cannot end in order


if __name__ == "__main__":
    main()
