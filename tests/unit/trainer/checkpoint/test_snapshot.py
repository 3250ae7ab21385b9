"""The bytes of a snapshot, and its page-locked memory, with a runtime of CUDA that only counts."""

import os
from types import SimpleNamespace

import pytest
import torch

from ingot.trainer.checkpoint import snapshot
from ingot.trainer.checkpoint.snapshot import Snapshot

TENSORS = [
    torch.arange(6, dtype=torch.float64).reshape(2, 3),
    torch.tensor(3.5),
    torch.arange(12, dtype=torch.float32).reshape(3, 4).T,  # not contiguous
    torch.arange(5).bfloat16(),
    torch.tensor([True, False, True]),
]


@pytest.mark.parametrize("threads_pay", [0, 1 << 20])
def test_a_snapshot_holds_the_bytes_of_all_tensors_in_their_order(monkeypatch, threads_pay):
    monkeypatch.setattr(snapshot, "_THREADS_PAY_BYTES", threads_pay)
    own = Snapshot(torch.device("cpu"))
    expected = [b"".join(bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist()) for t in TENSORS)]
    expected.append(expected[0] + bytes(8))  # a larger one after it
    for tensors, content in zip((TENSORS, [*TENSORS, torch.zeros(8, dtype=torch.uint8)]), expected, strict=True):
        assert own.take(tensors) == len(content)
        assert os.pread(own.fd, 1 << 20, 0) == content
    own.close()


class CountingRuntime:
    """The two functions of the CUDA runtime; `code` is the answer of the first one. locked: the addresses and sizes
    that are page-locked now; calls: how often each function was called."""

    def __init__(self, code: int = 0):
        self.code, self.locked, self.calls = code, {}, [0, 0]

    def cudaHostRegister(self, address, size, flags):
        self.calls[0] += 1
        if not self.code:
            assert address not in self.locked and flags == 0
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address):
        self.calls[1] += 1
        del self.locked[address]
        return 0


def gpu_snapshot(monkeypatch, runtime: CountingRuntime) -> tuple[Snapshot, list[str]]:
    """Return a snapshot that takes itself for one of a GPU, and the devices on which it launched a kernel."""
    launched: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(snapshot, "_runtime", lambda: runtime)
    monkeypatch.setattr(snapshot.torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(snapshot.torch, "ones", lambda *_, device: launched.append(device.type))
    return Snapshot(torch.device("cuda")), launched


def test_the_memory_is_page_locked_once_and_again_when_it_grows(monkeypatch):
    runtime = CountingRuntime()
    own, launched = gpu_snapshot(monkeypatch, runtime)
    small, large = [torch.zeros(4)], [torch.zeros(4), torch.zeros(6)]
    for tensors, calls, size in ((small, [1, 0], 16), (small, [1, 0], 16), (large, [2, 1], 40), (small, [2, 1], 40)):
        own.take(tensors)
        assert runtime.calls == calls and list(runtime.locked.values()) == [size]
    own.close()
    assert runtime.calls == [2, 2] and not runtime.locked and own.refusal == 0 and not launched


def test_memory_that_cannot_be_page_locked_is_used_and_its_error_reaches_no_other_kernel(monkeypatch):
    runtime = CountingRuntime(code=2)
    own, launched = gpu_snapshot(monkeypatch, runtime)
    own.take([torch.arange(4.0)])
    assert own.refusal == 2 and launched == ["cuda"]  # the kernel that takes the runtime's stale error
    assert os.pread(own.fd, 16, 0) == torch.arange(4.0).numpy().tobytes()
    runtime.code = 0
    own.take([torch.arange(8.0)])
    assert own.refusal == 0 and runtime.calls == [2, 0]  # what was not locked is not unlocked
    own.close()
    assert runtime.calls == [2, 1]
