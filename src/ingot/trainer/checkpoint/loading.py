"""Resume from the newest checkpoint that verifies, or load one for a single process."""

import json
from collections.abc import Callable
from pathlib import Path

from torch.nn import Module

from ingot.errors import CheckpointError, ConfirmationNeeded
from ingot.schema.checkpoint import CheckpointManifest, file_of
from ingot.schema.run import settings_sha256
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.agree import from_all_ranks, from_rank_zero, on_all_ranks, rank, world
from ingot.trainer.checkpoint.manifest import (
    candidate_folders,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
    verify_files,
)
from ingot.trainer.checkpoint.random_state import restore_random_state, restore_random_text
from ingot.trainer.checkpoint.reader import read_blocks
from ingot.trainer.checkpoint.state import BIAS, LOAD, MODEL, Block, TrainingState
from ingot.trainer.checkpoint.tensor_file import dtype_name

__all__ = ["list_checkpoints", "load_model", "resume", "verify_checkpoint"]


def resume(
    folder: RunFolder,
    state: TrainingState,
    *,
    config_sha256: str,
    data_fingerprint: str,
    on_refused: Callable[[int, Path, str], None],
) -> CheckpointManifest | None:
    """Fill `state` from the newest checkpoint of `folder` that verifies. None only if there has never been one.

    Collective. Parameters in compute precision do not follow by themselves: the caller sees to that.

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
            _load(path, manifest, state)
        except CheckpointError as error:
            step = int(path.name.removeprefix("step-"))
            on_refused(step, path, error.found)
            refused.append(error.found)
            continue
        if manifest.world == world():
            if manifest.rng:
                restore_random_text(manifest.rng[rank()])
            else:
                restore_random_state(path / file_of(rank()))
        return manifest
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder.checkpoints} can be used:\n  "
            + "\n  ".join(refused),
            rule="a run that has checkpoints never starts again from step 0 by itself",
            fix="restore one of them, or start anew beside them: ingot train ... --fresh --archive",
        )
    return None


def _verified_by_all(path: Path) -> CheckpointManifest:
    """Every rank hashes its share of the files; the first problem that any of them finds is raised on all."""
    manifest = from_rank_zero(lambda: read_manifest(path))

    on_all_ranks(lambda: verify_files(path, manifest, sorted(manifest.files)[rank() :: world()]))
    return manifest


def _check_same_experiment(folder: RunFolder, manifest: CheckpointManifest, config_sha256: str, data: str) -> None:
    # The launcher compares key by key and records what the user accepted; this is the last gate before the weights.
    def check() -> None:
        # What was written down while less was left out counts by what it says.
        same = config_sha256 in (manifest.config_sha256, settings_sha256(manifest.settings))
        if same and manifest.data_fingerprint == data:
            return
        accepted = json.loads(folder.accepted.read_text()) if folder.accepted.exists() else []
        if not any((a["config_sha256"], a["data_fingerprint"]) == (config_sha256, data) for a in accepted):
            what = "data" if same else "settings"
            raise ConfirmationNeeded(
                f"the run's {what} are not those of its checkpoint at step {manifest.step}",
                rule="a change of the experiment is made on purpose",
                fix="ingot train shows the changed keys and how to accept them",
            )

    from_rank_zero(check)


def _load(path: Path, manifest: CheckpointManifest, state: TrainingState) -> None:
    """Names, shapes and types of all ranks are compared before a byte is read: nothing foreign is ever put in."""
    names = sorted(name for name in manifest.tensors if not state.is_skipped(name))
    moments = on_all_ranks(state.optimizer.moments)
    blocks: list[Block] = []

    def mine() -> int:
        every = state.blocks(moments, first_rank=rank() == 0)
        blocks.extend(b for b in every if b.name in manifest.tensors or not b.optional)
        _check_fits(path, manifest, blocks)
        own = {block.name for block in blocks}
        return sum(1 << i for i, name in enumerate(names) if name in own)  # one bit per name: cheap from 16k ranks

    def covered(by_rank: list[int]) -> None:
        for i, name in enumerate(names):
            if not any(bits >> i & 1 for bits in by_rank):
                raise CheckpointError(f"checkpoint {path} is of another model: it also holds {name}")

    def fill() -> None:
        read_blocks(path, manifest, blocks)
        state.optimizer.put_moments(moments)

    from_all_ranks(mine, covered)
    on_all_ranks(fill)


def _check_fits(path: Path, manifest: CheckpointManifest, blocks: list[Block]) -> None:
    for block in blocks:
        if block.name not in manifest.tensors:
            raise CheckpointError(f"checkpoint {path} is of another model: it lacks {block.name}")
        entry, dtype = manifest.tensors[block.name], dtype_name(block.tensor.dtype)
        if (entry.shape, entry.dtype) != (block.shape, dtype):
            raise CheckpointError(
                f"checkpoint {path} holds {block.name} as {entry.dtype}{list(entry.shape)}, "
                f"the model has {dtype}{list(block.shape)}"
            )


def load_model(checkpoint: Path, model: Module) -> CheckpointManifest:
    """Verify `checkpoint` and load its weights into `model` in this one process; no process group, any device.

    The tensors of `model` keep their type: fp32 master weights become bf16 where the model is bf16. Loads of experts,
    which training alone looks at, are left as they are, and so are biases of routers that the checkpoint lacks: the run
    began to steer them after it. Raises CheckpointError when the checkpoint does not verify or is of another model.
    """
    manifest = verify_checkpoint(checkpoint)
    targets = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(LOAD)}
    stored = {k.removeprefix(MODEL): v for k, v in manifest.tensors.items() if k.startswith(MODEL)}
    stored = {name: entry for name, entry in stored.items() if not name.endswith(LOAD)}
    if not any(name.endswith(BIAS) for name in stored):
        targets = {name: tensor for name, tensor in targets.items() if not name.endswith(BIAS)}
    for name in sorted(targets.keys() ^ stored.keys()):
        where = "the model has no such tensor" if name in stored else "the checkpoint lacks it"
        raise CheckpointError(f"checkpoint {checkpoint} is of another model: {name}: {where}")
    blocks = []
    for name, entry in stored.items():
        target = targets[name]
        if tuple(target.shape) != entry.shape:
            raise CheckpointError(
                f"checkpoint {checkpoint} holds {name} as {list(entry.shape)}, the model has {list(target.shape)}"
            )
        blocks.append(Block(MODEL + name, entry.shape, (0,) * target.dim(), target))
    read_blocks(checkpoint, manifest, blocks)
    return manifest
