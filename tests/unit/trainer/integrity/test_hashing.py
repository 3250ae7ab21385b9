"""Hashes of tensors: every flipped bit changes them, and says where it is."""

import pytest
import torch

from ingot.trainer.integrity.hashing import BufferHasher, TensorHasher, multipliers

ROW = 1 << 14


def flip(tensor, element, bit):
    words = tensor.view(-1).view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize])
    words[element] ^= torch.tensor(1, dtype=words.dtype) << bit


def reference(tensor):
    """The definition, with Python's integers."""
    words = tensor.reshape(-1).view({2: torch.int16}.get(tensor.itemsize, torch.int32)).tolist()
    rows = multipliers(0, -(-len(words) // ROW), stream=1).tolist()
    columns = multipliers(0, ROW).tolist()
    total = sum(x * columns[i % ROW] * rows[i // ROW] for i, x in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_flip_of_one_bit_is_found_and_located(dtype):
    torch.manual_seed(0)
    small, large, scalar = torch.randn(3, 5).to(dtype), torch.randn(ROW + 7, 2).to(dtype), torch.ones(()).to(dtype)
    tensors = [small, large, scalar, torch.empty(0, dtype=dtype)]
    hasher = TensorHasher(tensors)
    before = hasher.hashes()
    assert before.tolist() == [reference(tensor) for tensor in tensors]
    for index, element in ((0, 14), (1, 0), (1, 2 * ROW + 13), (2, 0)):
        for bit in range(8 * small.itemsize):
            flip(tensors[index], element, bit)
            difference = hasher.hashes() - before
            assert difference.nonzero().flatten().tolist() == [index], (index, bit)
            if bit in (0, 8 * small.itemsize - 1):
                assert hasher.locate(index, int(difference[index])) == (element, bit)
            flip(tensors[index], element, bit)
    assert torch.equal(hasher.hashes(), before)


def test_tensors_that_are_hashed_together_have_the_hashes_of_each_alone():
    torch.manual_seed(0)
    sizes = [3 * ROW + 5, ROW, 7 * ROW + 1, 20 * ROW + 9, 5, ROW + 1, 0, ROW - 1]  # parts of several runs of rows
    tensors = [torch.randint(-128, 127, (size,), dtype=torch.int32).view(torch.float32) for size in sizes]
    alone = BufferHasher(torch.device("cpu"))
    hashes = TensorHasher(tensors).hashes().tolist()
    assert hashes == [int(alone.hash(tensor)) for tensor in tensors]
    assert hashes[-3:] == [reference(tensor) for tensor in tensors[-3:]]
    strided = torch.randn(4, ROW)[:, ::2]
    hasher = TensorHasher([strided])
    strided += 1
    assert hasher.hashes().tolist() == [reference(strided.contiguous())]


def test_swaps_and_pairs_of_sign_bits_are_found():
    x = torch.randn(4 * ROW)
    hasher = TensorHasher([x])
    before = hasher.hashes()
    generator = torch.Generator().manual_seed(1)
    for a, b in torch.randint(0, len(x), (200, 2), generator=generator).tolist():
        if a != b:
            x[[a, b]] = x[[b, a]]
            assert not torch.equal(hasher.hashes(), before)
            x[[a, b]] = x[[b, a]]
            x[[a, b]] *= -1
            assert not torch.equal(hasher.hashes(), before) and hasher.locate(0, int(hasher.hashes() - before)) is None
            x[[a, b]] *= -1
    assert torch.equal(hasher.hashes(), before)


def test_multipliers_are_odd_and_continue():
    words = multipliers(0, 1000)
    assert (words & 1).all() and len(set(words.tolist())) == 1000
    assert multipliers(990, 10).tolist() == words[990:].tolist()
    assert not set(multipliers(0, 1000, stream=1).tolist()) & set(words.tolist())
