"""Resume from the newest checkpoint that verifies, or load one for a single process."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import Module
from torch.optim import Optimizer

from ingot.checkpoint.agree import first_error, from_rank_zero, planned_together
from ingot.checkpoint.manifest import (
    candidate_folders,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
    verify_file,
)
from ingot.checkpoint.reader import IngotReader, read_block
from ingot.checkpoint.state import MODEL, put_training_state, training_state
from ingot.checkpoint.tensor_file import dtype_name
from ingot.checkpoint.writer import restore_random_state
from ingot.errors import CheckpointError, ConfirmationNeeded
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.layout import RunFolder

__all__ = ["list_checkpoints", "load_model", "resume", "verify_checkpoint"]


def resume(
    folder: RunFolder,
    model: Module,
    optimizer: Optimizer,
    *,
    config_sha256: str,
    data_fingerprint: str,
    on_refused: Callable[[int, Path, str], None],
) -> CheckpointManifest | None:
    """Load the newest checkpoint of `folder` that verifies. None only if there has never been one. Collective.

    A checkpoint that does not verify is reported by `on_refused(step, path, reason)` on every rank, and the next older
    one is tried. Random states come back where the number of ranks is the same. Raises CheckpointError if there are
    checkpoints and none can be used, ConfirmationNeeded if the run's settings or data are not those it was trained on.
    """
    candidates = from_rank_zero(lambda: candidate_folders(folder.checkpoints))
    refused = []
    for path in candidates:
        try:
            manifest = _verified_by_all(path)
            _check_same_experiment(folder, manifest, config_sha256, data_fingerprint)
            _load(path, manifest, model, optimizer)
        except CheckpointError as error:
            step = int(path.name.removeprefix("step-"))
            on_refused(step, path, error.found)
            refused.append(error.found)
            continue
        if len(manifest.rng) == _world():
            restore_random_state(manifest.rng[dist.get_rank() if dist.is_initialized() else 0])
        return manifest
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder.checkpoints} can be used:\n  "
            + "\n  ".join(refused),
            rule="a run that has checkpoints never starts again from step 0 by itself",
            fix="restore one of them, or start anew beside them: ingot train ... --fresh --archive",
        )
    return None


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _verified_by_all(path: Path) -> CheckpointManifest:
    """Every rank hashes its share of the files; the first problem that any of them finds is raised on all."""
    manifest = from_rank_zero(lambda: read_manifest(path))
    rank = dist.get_rank() if dist.is_initialized() else 0

    def check() -> None:
        for name in sorted(manifest.files)[rank :: _world()]:
            verify_file(path, manifest, name)

    if error := first_error(check):
        raise error
    return manifest


def _check_same_experiment(folder: RunFolder, manifest: CheckpointManifest, config_sha256: str, data: str) -> None:
    # The launcher compares key by key and records what the user accepted; this is the last gate before the weights.
    def check() -> None:
        if (manifest.config_sha256, manifest.data_fingerprint) == (config_sha256, data):
            return
        accepted = json.loads(folder.accepted.read_text()) if folder.accepted.exists() else []
        if not any((a["config_sha256"], a["data_fingerprint"]) == (config_sha256, data) for a in accepted):
            what = "settings" if manifest.config_sha256 != config_sha256 else "data"
            raise ConfirmationNeeded(
                f"the run's {what} are not those of its checkpoint at step {manifest.step}",
                rule="a change of the experiment is made on purpose",
                fix="ingot train shows the changed keys and how to accept them",
            )

    from_rank_zero(check)


def _load(path: Path, manifest: CheckpointManifest, model: Module, optimizer: Optimizer) -> None:
    state = training_state(model, optimizer)
    _check_fits(path, manifest, state)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with planned_together():
        load(state, storage_reader=IngotReader(path, manifest), planner=planner, no_dist=not dist.is_initialized())
    put_training_state(model, optimizer, state)


def _check_fits(path: Path, manifest: CheckpointManifest, state: dict[str, Tensor]) -> None:
    """Names, shapes and types are compared before a byte is read: nothing of the wrong size is ever allocated."""
    missing = sorted(state.keys() - manifest.tensors.keys())
    unknown = sorted(manifest.tensors.keys() - state.keys())
    if missing or unknown:
        parts = [f"{word} {names[0]}" for word, names in (("it lacks", missing), ("it also holds", unknown)) if names]
        raise CheckpointError(f"checkpoint {path} is of another model: {', '.join(parts)}")
    for name, tensor in state.items():
        entry = manifest.tensors[name]
        if (entry.shape, entry.dtype) != (tuple(tensor.shape), dtype_name(tensor.dtype)):
            raise CheckpointError(
                f"checkpoint {path} holds {name} as {entry.dtype}{list(entry.shape)}, "
                f"the model has {dtype_name(tensor.dtype)}{list(tensor.shape)}"
            )


def load_model(checkpoint: Path, model: Module) -> CheckpointManifest:
    """Verify `checkpoint` and load its weights into `model` in this one process; no process group, any device.

    The tensors of `model` keep their type: fp32 master weights become bf16 where the model is bf16. Raises
    CheckpointError when the checkpoint does not verify or is of another model.
    """
    manifest = verify_checkpoint(checkpoint)
    targets = model.state_dict()
    stored = {k.removeprefix(MODEL): v for k, v in manifest.tensors.items() if k.startswith(MODEL)}
    for name in sorted(targets.keys() ^ stored.keys()):
        where = "the model has no such tensor" if name in stored else "the checkpoint lacks it"
        raise CheckpointError(f"checkpoint {checkpoint} is of another model: {name}: {where}")
    with contextlib.ExitStack() as opened, torch.no_grad():
        files = {
            name: opened.enter_context(safetensors.safe_open(checkpoint / name, framework="pt", device="cpu"))
            for name in manifest.files
        }
        for name, entry in stored.items():
            target = targets[name]
            if tuple(target.shape) != entry.shape:
                raise CheckpointError(
                    f"checkpoint {checkpoint} holds {name} as {list(entry.shape)}, the model has {list(target.shape)}"
                )
            for chunk in entry.chunks:
                where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                target[where].copy_(read_block(files[chunk.file], chunk, (0,) * len(chunk.sizes), chunk.sizes))
    return manifest
