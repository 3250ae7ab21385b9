"""Loading through PyTorch's distributed-checkpoint planners: they find which stored blocks a rank's shards need.

What they plan from is our JSON manifest; what is read are slices of safetensors files. Nothing is unpickled.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import safetensors
import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ingot.schema.checkpoint import CheckpointManifest, Chunk


class IngotReader(StorageReader):
    """Reads checkpoint `path`, whose `manifest` was verified."""

    def __init__(self, path: Path, manifest: CheckpointManifest):
        self.path = path
        self.metadata = _metadata(manifest)
        self.chunks = {
            MetadataIndex(name, torch.Size(chunk.offsets)): chunk
            for name, entry in manifest.tensors.items()
            for chunk in entry.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """One reader reads one checkpoint: there is nothing to reset."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args, **kwargs) -> None:
        """Everything needed was given to the constructor."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with contextlib.ExitStack() as opened:
            files = {}
            for item in plan.items:
                chunk = self.chunks[_index(item)]
                if chunk.file not in files:
                    file = safetensors.safe_open(self.path / chunk.file, framework="pt", device="cpu")
                    files[chunk.file] = opened.enter_context(file)
                source = read_block(files[chunk.file], chunk, item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_block(file, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The part of `chunk` that starts at `offsets` within it; only these bytes are read."""
    if tuple(sizes) == chunk.sizes:
        return file.get_tensor(chunk.key)
    return file.get_slice(chunk.key)[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


def _index(item: ReadItem) -> MetadataIndex:
    return MetadataIndex(item.storage_index.fqn, item.storage_index.offset)


def _metadata(manifest: CheckpointManifest) -> Metadata:
    entries: dict[str, STORAGE_TYPES] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
            size=torch.Size(entry.shape),
            chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
        )
        for name, entry in manifest.tensors.items()
    }
    return Metadata(state_dict_metadata=entries)
