"""Saving through PyTorch's distributed-checkpoint planners: they decide which rank writes which block of which tensor.

Only the planning is PyTorch's; the files are ours (manifest.py). Its public StorageWriter seam calls, in this order:
every rank `prepare_local_plan`; rank 0 `prepare_global_plan`; every rank `write_data`; rank 0 `finish`. An error on any
rank is raised on all of them.
"""

import math
import os
import shutil
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ingot.checkpoint.manifest import write_manifest
from ingot.checkpoint.retention import SAVING, prune, publish
from ingot.checkpoint.tensor_file import dtype_name, write_tensors
from ingot.errors import CheckpointError, ResourceError
from ingot.schema.checkpoint import CheckpointManifest, Chunk, FileEntry, LedgerSegment, TensorEntry
from ingot.schema.layout import RunFolder
from ingot.storage import fsync_dir, require_free

_ROOM_BYTES = 16 << 20  # for headers, manifest and the ledger


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says about itself besides its tensors. See schema/checkpoint.py."""

    step: int
    tokens: int
    settings: dict
    config_sha256: str
    data_fingerprint: str
    layout: dict[str, int]


@dataclass(frozen=True)
class _Stored:
    chunk: Chunk
    entry: FileEntry


class IngotWriter(StorageWriter):
    """Writes one file per rank into a temporary folder, reads it back, and renames the folder once all is there."""

    def __init__(self, folder: RunFolder, facts: CheckpointFacts, ledger: tuple[LedgerSegment, ...], keep: int):
        self.folder, self.facts, self.ledger, self.keep = folder, facts, ledger, keep
        self.path = folder.checkpoint(facts.step)
        self.temporary = folder.checkpoints / f"{SAVING}{self.path.name}"
        self.rank = 0
        self.rng: tuple[str, ...] = ()

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """One writer saves one checkpoint: there is nothing to reset."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=_random_state())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: collect random states, check the disk, make the temporary folder."""
        self.rng = tuple(plan.storage_data for plan in plans)
        needed = sum(_item_bytes(item) for plan in plans for item in plan.items)
        require_free(self.folder.checkpoints, needed + _ROOM_BYTES, f"the checkpoint of step {self.facts.step}")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = [item for item in plan.items if _item_bytes(item)]
        # Large elements first keeps every tensor of the file aligned.
        items.sort(key=lambda item: (-_properties(item).dtype.itemsize, item.index.fqn, item.index.offset or ()))
        results: list[WriteResult] = []
        if items:
            name = f"rank-{self.rank:05d}.safetensors"
            tensors = [(_key(item), planner.resolve_data(item)) for item in items]
            try:
                entry, checksums = write_tensors(self.temporary / name, tensors)  # pyright: ignore[reportArgumentType]
            except OSError as error:
                raise ResourceError(
                    f"{self.temporary / name} cannot be written ({error.strerror})",
                    rule="a checkpoint is saved whole or not at all; the last one is untouched",
                    fix="free space on that disk or mend it, then run the same command: it continues",
                ) from None
            for item, (key, _), crc32 in zip(items, tensors, checksums, strict=True):
                block = item.tensor_data.chunk  # pyright: ignore[reportOptionalMemberAccess]
                chunk = Chunk(file=name, key=key, offsets=tuple(block.offsets), sizes=tuple(block.sizes), crc32=crc32)
                results.append(WriteResult(item.index, _item_bytes(item), _Stored(chunk, entry)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when every rank has written and verified its file: manifest, rename, then prune."""
        manifest = self._manifest(metadata, [r for of_rank in results for r in of_rank])
        write_manifest(self.temporary, manifest)
        fsync_dir(self.temporary)
        publish(self.folder, self.facts.step)
        prune(self.folder, self.facts.step, self.keep)
        metadata.storage_data = sum(f.bytes for f in manifest.files.values())

    def _manifest(self, metadata: Metadata, results: list[WriteResult]) -> CheckpointManifest:
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        files: dict[str, FileEntry] = {}
        for result in results:
            chunks[result.index.fqn].append(result.storage_data.chunk)
            files[result.storage_data.chunk.file] = result.storage_data.entry
        tensors = {
            name: TensorEntry(
                dtype=dtype_name(tensor.properties.dtype),  # pyright: ignore[reportAttributeAccessIssue]
                shape=tuple(tensor.size),  # pyright: ignore[reportAttributeAccessIssue]
                chunks=tuple(sorted(chunks[name], key=lambda c: c.offsets)),
            )
            for name, tensor in metadata.state_dict_metadata.items()
        }
        facts = {k: getattr(self.facts, k) for k in self.facts.__dataclass_fields__}
        return CheckpointManifest(**facts, files=files, tensors=tensors, rng=self.rng, ledger=self.ledger)


def _properties(item: WriteItem):
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor", rule="checkpoints hold tensors only")
    return item.tensor_data.properties


def _item_bytes(item: WriteItem) -> int:
    properties = _properties(item)
    return math.prod(item.tensor_data.chunk.sizes) * properties.dtype.itemsize  # pyright: ignore[reportOptionalMemberAccess]


def _key(item: WriteItem) -> str:
    """The name in the file: the tensor's, with the offset where it is a block of a larger one."""
    offsets = tuple(item.index.offset or ())
    return f"{item.index.fqn}@{','.join(map(str, offsets))}" if any(offsets) else item.index.fqn


def _random_state() -> str:
    state = torch.get_rng_state().numpy().tobytes().hex()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state += ":" + torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: str) -> None:
    cpu, _, cuda = state.partition(":")
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(cpu), dtype=torch.uint8))
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(cuda), dtype=torch.uint8))
