"""The snapshot of a state on a GPU: its bytes, its page-locked memory, and a runtime that refuses it."""

import os

import pytest
import torch

from ingot.trainer.checkpoint import snapshot
from ingot.trainer.checkpoint.snapshot import Snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class WatchedRuntime:
    """The functions of the CUDA runtime. registered: how often memory was page-locked. twice: page-lock it twice, which
    the runtime refuses with an error."""

    def __init__(self, twice: bool = False):
        self._runtime, self._twice, self.registered = torch.cuda.cudart(), twice, 0

    def cudaHostRegister(self, *arguments):
        self.registered += 1
        answer = self._runtime.cudaHostRegister(*arguments)
        return self._runtime.cudaHostRegister(*arguments) if self._twice else answer

    def cudaHostUnregister(self, address):
        return self._runtime.cudaHostUnregister(address)


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    large = torch.randn(1 << 20, 5, device="cuda", generator=generator)
    return [torch.arange(5, device="cuda"), large, large[:7, :3].T, torch.randn(3), large[:9].bfloat16()]


def bytes_of(found: list[torch.Tensor]) -> bytes:
    return b"".join(bytes(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()) for t in found)


def test_snapshots_have_the_bits_of_the_device_in_page_locked_memory_that_is_used_again(monkeypatch):
    runtime = WatchedRuntime()
    monkeypatch.setattr(snapshot, "_runtime", lambda: runtime)
    own = Snapshot(torch.device("cuda"))
    for seed in (1, 2):
        state = tensors(seed)
        expected = bytes_of(state)
        size = own.take(state)
        for tensor in state:
            tensor.zero_()  # training goes on
        assert own._image.is_pinned() and os.pread(own.fd, size, 0) == expected
        assert (runtime.registered, own.refusal) == (1, 0)
    image = own._image
    own.close()
    assert not image.is_pinned()


def test_a_refused_registration_changes_no_bit_and_fails_no_later_kernel(monkeypatch):
    monkeypatch.setattr(snapshot, "_runtime", lambda: WatchedRuntime(twice=True))
    own = Snapshot(torch.device("cuda"))
    state = tensors(3)
    size = own.take(state)
    assert own.refusal > 0
    assert os.pread(own.fd, size, 0) == bytes_of(state)
    assert torch.full((3,), 2.0, device="cuda").sum().item() == 6.0
    torch.cuda.cudart().cudaHostUnregister(own._image.data_ptr())  # of the first registration of this test
    own.close()
