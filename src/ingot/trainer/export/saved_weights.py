"""First weights of a run from a checkpoint of another run, or from its weights alone, in any layout."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ingot.hub.config_file import require_fit
from ingot.schema.arch import Arch
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.checkpoint.folders import find_weights
from ingot.trainer.checkpoint.load import OTHER_MODEL
from ingot.trainer.checkpoint.manifest import read_manifest, verify_files
from ingot.trainer.checkpoint.reader import found_file, read_blocks
from ingot.trainer.checkpoint.rules import damaged
from ingot.trainer.checkpoint.state import BIAS, LOAD, MODEL, StateBlock
from ingot.trainer.export.model_folder import TRAINING_ONLY, FirstValue


def saved_weights(folder: Path, arch: Arch, drawn: FirstValue) -> FirstValue:
    """Return a function that reads a run's first weights from the save `folder`; of a run folder, from its newest one.

    A call reads only the requested block. Each file is verified before its first use. drawn: the function for tensors
    that the save lacks: router biases, and those that only training needs; the loads of experts are never read.
    Collective: rank 0 chooses the save, because a run that still trains may finish another one meanwhile. Raises
    ConfigError unless the save fits a model of `arch`, UsageError if there is none, CheckpointError if it is damaged.
    """
    require_fit(folder, arch)
    path = folder / from_rank_zero(lambda: str(find_weights(folder)[1].relative_to(folder)))
    manifest = read_manifest(path)
    verified: set[str] = set()

    def find(file: str, _: Sequence[str]) -> Path:
        place = found_file(path, manifest, file)
        if file not in verified:
            verify_files(path, manifest, [file])
            verified.add(file)
        return place

    def value(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        entry = manifest.tensors.get(MODEL + name)
        if name.endswith(LOAD) or (entry is None and name.endswith((BIAS, *TRAINING_ONLY))):
            return drawn(name, shape, offsets, sizes)
        if entry is None or entry.shape != tuple(shape):
            has = list(entry.shape) if entry else "no such tensor"
            problem = f"tensor {name} has the shape {list(shape)} in the model, but the checkpoint has {has}"
            raise damaged(path, problem, OTHER_MODEL, tensor=name)
        block = torch.empty(tuple(sizes), dtype=getattr(torch, entry.dtype))
        read_blocks(path, manifest, [StateBlock(MODEL + name, entry.shape, tuple(offsets), block)], find=find)
        return block

    return value
