"""Hashes of tensors on a GPU: the bits of those on a CPU, and no wait for the device."""

import pytest
import torch

from ingot.trainer.integrity.hashing import TensorHasher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_hashes_are_those_of_a_cpu_and_the_host_does_not_wait():
    torch.manual_seed(0)
    host = [torch.randn(3, 5), torch.randn(1 << 14, 9).bfloat16(), torch.ones(()), torch.randn(40_001, 7)]
    device = [tensor.cuda() for tensor in host]
    hasher = TensorHasher(device)
    hasher.hashes()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = hasher.hashes()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.cpu().tolist() == TensorHasher(host).hashes().tolist()
