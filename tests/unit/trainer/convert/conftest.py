"""Folders as torch.distributed.checkpoint writes them, and the same with metadata that its writer would not make."""

import pickle
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def save_dcp(tmp_path):
    """`save_dcp(state)` saves a state in this process and returns the folder."""
    import torch.distributed.checkpoint as dcp

    def save(state, name: str = "dcp") -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    return save


@pytest.fixture
def with_metadata():
    """`with_metadata(folder, change)` calls change(metadata) and writes what is then in `metadata`."""
    from torch.distributed.checkpoint import FileSystemReader

    def write(folder: Path, change) -> Path:
        metadata = FileSystemReader(folder).read_metadata()
        changed = change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))
        return folder

    return write
