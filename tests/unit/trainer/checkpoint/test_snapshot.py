"""The bytes of a snapshot."""

import os

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
