import safetensors
import torch
from tests.expect import refused

from ingot.trainer.checkpoint import reader
from ingot.trainer.checkpoint.manifest import read_manifest
from ingot.trainer.checkpoint.state import StateBlock

from .conftest import save, values


def quarter(name: str, whole: torch.Tensor, row: int, column: int) -> StateBlock:
    rows, columns = -(-whole.shape[0] // 2), -(-whole.shape[1] // 2)
    part = whole[row * rows :][:rows, column * columns :][:, :columns]
    return StateBlock(name, tuple(whole.shape), (row * rows, column * columns), torch.zeros(part.shape))


def test_a_block_reads_no_more_than_itself(folder, training, monkeypatch):
    """Every tensor of the file is whole, every block a quarter: what the library returns is never larger."""
    path = save(folder, 10, *training).path
    whole = values(*training)["model.0.weight"]
    largest, safe_open = [], safetensors.safe_open

    class Watched:
        def __init__(self, file):
            self.file = file

        def get_tensor(self, key):
            tensor = self.file.get_tensor(key)
            largest.append(tensor.numel())
            return tensor

        def get_slice(self, key):
            part = self.file.get_slice(key)

            class Slice:
                def __getitem__(self, where):
                    largest.append(part[where].numel())
                    return part[where]

            return Slice()

    class Opened:
        def __init__(self, *arguments, **keywords):
            self.file = safe_open(*arguments, **keywords)

        def __enter__(self):
            return Watched(self.file.__enter__())

        def __exit__(self, *error):
            return self.file.__exit__(*error)

    monkeypatch.setattr(reader.safetensors, "safe_open", Opened)
    blocks = [quarter("model.0.weight", whole, row, column) for row in (0, 1) for column in (0, 1)]
    reader.read_blocks(path, read_manifest(path), blocks)
    assert sorted(largest) == sorted(block.tensor.numel() for block in blocks)
    assert torch.equal(torch.cat([torch.cat([b.tensor for b in pair], 1) for pair in (blocks[:2], blocks[2:])]), whole)


def test_fills_views_and_other_types(folder, training):
    """A block may be part of a larger buffer, in another memory order, of another type."""
    path = save(folder, 10, *training).path
    whole = values(*training)["model.0.weight"]
    buffer = torch.full((3, 4, 2), -1.0, dtype=torch.bfloat16)
    view = buffer[:, :3, 0].T  # [3, 3], stride (2, 8)
    reader.read_blocks(path, read_manifest(path), [StateBlock("model.0.weight", (5, 6), (2, 1), view)])
    assert torch.equal(view, whole[2:5, 1:4].to(torch.bfloat16))
    assert (buffer == -1).sum() == buffer.numel() - 9


def test_an_empty_block_reads_nothing_and_a_file_that_vanished_is_named(folder, training):
    path = save(folder, 10, *training).path
    manifest = read_manifest(path)
    (path / "rank-00000.safetensors").unlink()
    reader.read_blocks(path, manifest, [StateBlock("model.0.weight", (5, 6), (5, 0), torch.zeros(0, 6))])
    with refused("E-CKPT-READ"):
        reader.read_blocks(path, manifest, [StateBlock("model.0.weight", (5, 6), (4, 0), torch.zeros(1, 6))])
