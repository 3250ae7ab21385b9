"""The abort of NCCL's communicators, on one GPU: the groups are of no use after it, and new ones are."""

import pytest
import torch
import torch.distributed as dist

from ingot.trainer.mesh.start import start, stop
from ingot.trainer.resilience.leaving import is_about_a_peer
from ingot.trainer.torch_private import abort_communicators

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_an_aborted_communicator_raises_and_a_new_one_works(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # as for ranks that keep their processes
    one = torch.ones(1, device=start("cuda", 60).device)
    try:
        dist.all_reduce(one)
        torch.cuda.synchronize()
        assert abort_communicators() == 1
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(one)
        assert is_about_a_peer(str(raised.value))
        stop()
        start("cuda", 60)
        dist.all_reduce(one)
        torch.cuda.synchronize()
        assert one.item() == 1.0
    finally:
        stop()
