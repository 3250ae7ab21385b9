"""Resume from the newest undamaged checkpoint, or load a checkpoint into a model in a single process."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.nn import Module

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import CheckpointManifest, StoredBlock, file_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.accepted import require_accepted
from ingot.trainer.checkpoint.agree import from_all_ranks, from_rank_zero, on_all_ranks, rank, world
from ingot.trainer.checkpoint.fence import TOO_LATE
from ingot.trainer.checkpoint.manifest import (
    candidate_folders,
    grade_of_doubt,
    is_finished,
    late_folders,
    read_manifest,
    verify_files,
    verify_tensors,
)
from ingot.trainer.checkpoint.message import pack_json, unpack_manifest
from ingot.trainer.checkpoint.nodes import (
    FILE_LOST,
    SMALL_BYTES,
    Brought,
    FetchFile,
    NeededFiles,
    NodeFetch,
    bring_files,
)
from ingot.trainer.checkpoint.places import Places
from ingot.trainer.checkpoint.reader import (
    Find,
    OnBytes,
    SmallBlocks,
    chunks_by_file,
    read_blocks,
    restore_random,
)
from ingot.trainer.checkpoint.replicas import MemoryCheckpoint
from ingot.trainer.checkpoint.rules import DTYPES
from ingot.trainer.checkpoint.segments import verify_segments
from ingot.trainer.checkpoint.state import (
    BIAS,
    GENERATORS,
    LOAD,
    MODEL,
    StateBlock,
    TrainingState,
)
from ingot.trainer.checkpoint.tensors import dtype_name
from ingot.trainer.checkpoint.vanished import require_checkpoints

FetchInstead = Callable[..., tuple[int, list[str]]]  # as tiers.fetch_instead
OnRefused = Callable[[int, Path, str, bool], None]  # step, path, reason, again: the store is asked for the same step
OTHER_MODEL = "E-CKPT-OTHER-MODEL"


def resume(
    folder: RunFolder,
    state: TrainingState,
    *,
    settings: Mapping[str, Any],
    data_fingerprint: str,
    on_refused: OnRefused,
    fetch_instead: FetchInstead = lambda step, seen, following, *, again: (0, []),
    fetch_file: FetchFile | None = None,
    on_fetched: Callable[[CheckpointManifest, NodeFetch], None] = lambda manifest, fetched: None,
    on_bytes: OnBytes | None = None,
) -> CheckpointManifest | None:
    """Fill `state` from the newest usable checkpoint of `folder`. Returns None if the run has none. Collective.

    settings: all settings of the run, flat. Only master weights are filled; the caller updates the parameters in
    compute precision.

    A checkpoint that is damaged or of another model is reported by `on_refused(step, path, reason, again)` on every
    rank, and the next one is tried, on the disk or in the store: `fetch_instead` on rank 0 fetches one in place of a
    damaged one (tiers.py), again: first the same one. Random states are restored if the number of ranks is the same.
    fetch_file, on_fetched: for files on disks of nodes (nodes.py); the second is called on every rank, for each node
    that fetched some. on_bytes: called with the bytes of each block that this rank reads from the disk, also of a
    checkpoint that is refused then. Raises CheckpointError if no existing checkpoint can be used or saved checkpoints
    vanished, ConfirmationNeeded if settings or data differ from those of the checkpoint.
    """
    for name in from_rank_zero(lambda: [path.name for path in late_folders(folder.checkpoints)]):
        path = folder.checkpoints / name
        on_refused(int(name.removeprefix("step-")), path, f"checkpoint {path}: {TOO_LATE}", False)
    # Those in doubt come last; the sort keeps the order of others, newest first.
    names = from_rank_zero(lambda: [path.name for path in sorted(_candidates(folder), key=grade_of_doubt)])
    candidates = [folder.checkpoints / name for name in names]
    refused, causes, fetched = [], [], set[int]()
    waiting = deque(candidates)
    while waiting:
        path = waiting.popleft()
        try:
            manifest, brought = _verified_by_all(path, state, fetch_file)
            for one in brought.fetched:
                on_fetched(manifest, one)
            from_rank_zero(partial(require_accepted, folder, manifest, settings, data_fingerprint))
            _load(path, manifest, state, brought.small, on_bytes=on_bytes)
        except CheckpointError as error:
            step = int(path.name.removeprefix("step-"))
            again = error.code not in (OTHER_MODEL, FILE_LOST) and step not in fetched
            on_refused(step, path, error.found, again)
            refused.append(error.found)
            causes.append({"code": error.code} | error.facts)
            if error.code != OTHER_MODEL:  # the store has no other one
                seen = {int(name.removeprefix("step-")) for name in names} | fetched
                following = waiting[0] if waiting else None
                found, reasons = from_rank_zero(partial(fetch_instead, step, seen, following, again=again))
                refused.extend(reasons)
                if found:
                    fetched.add(found)
                    waiting.appendleft(folder.checkpoint(found))
            continue
        if manifest.world == world():
            restore_random(path, manifest, rank())
        return manifest
    if candidates:
        weights = next((one for one in candidate_folders(folder.weights.checkpoints) if is_finished(one)), None)
        raise CheckpointError(
            "E-CKPT-NONE-USABLE",
            f"none of the {len(candidates)} checkpoints in {folder.checkpoints} can be used:\n  "
            + "\n  ".join(refused),
            rule="a run that has checkpoints never starts again from step 0 on its own",
            fix=f"ingot ckpt repair {folder.root}, which writes the damaged ledger files again"
            if any(str(cause.get("file", "")).startswith("ledger/") for cause in causes)
            else "restore a checkpoint, or start again and keep the old run: ingot train ... --fresh --archive"
            + _from_weights(folder, weights, settings),
            folder=str(folder.checkpoints),
            checkpoints=len(candidates),
            causes=causes,
            weights=str(weights or ""),
        )
    return None


def _from_weights(folder: RunFolder, save: Path | None, settings: Mapping[str, Any]) -> str:
    """Return the command that begins a new run from a save of the weights alone; "" if there is none."""
    if save is None:
        return ""
    store = " --set checkpoint.remote.url=NEW_PLACE" if settings.get("checkpoint.remote.url") else ""
    command = f"ingot train {folder.config} --out NEW_DIR --set init={save.absolute()}{store}"
    return f"; or begin a new run from the weights of step {save.name.removeprefix('step-').lstrip('0')}: {command}"


def _candidates(folder: RunFolder) -> list[Path]:
    require_checkpoints(folder)
    return candidate_folders(folder.checkpoints)


def _verified_by_all(
    path: Path, state: TrainingState, fetch_file: FetchFile | None
) -> tuple[CheckpointManifest, Brought]:
    """Verify `path` and its ledger on all ranks: each hashes its share of the files, or of those that its node needs if
    files are on disks of nodes. An error on one rank is raised on all ranks."""
    manifest = from_rank_zero(lambda: read_manifest(path), pack_json, unpack_manifest)
    striped = Places(path).striped

    def verify_share() -> None:
        if not striped:
            verify_files(path, manifest, sorted(manifest.files)[rank() :: world()])
        verify_segments(path, manifest, manifest.ledger[rank() :: world()])

    on_all_ranks(verify_share)
    if not striped:
        return manifest, Brought([], {})
    return manifest, bring_files(path, manifest, lambda: _needed_files(manifest, state), fetch_file)


def _needed_files(manifest: CheckpointManifest, state: TrainingState) -> NeededFiles:
    """Return the files that this rank reads if it loads `manifest`. Blocks that do not fit are left to the load."""
    blocks = state.blocks(state.optimizer.moments(), first_rank=rank() == 0)
    fitting = [one for one in blocks if one.name in manifest.tensors and manifest.tensors[one.name].shape == one.shape]
    own = {file_of(rank())} if manifest.world == world() and not manifest.rng else set()
    wanted = chunks_by_file(manifest, fitting)
    large = own | {name for name, pairs in wanted.items() if any(_is_large(manifest, *pair) for pair in pairs)}
    return NeededFiles(large, wanted.keys() - large)


def _is_large(manifest: CheckpointManifest, block: StateBlock, chunk: StoredBlock) -> bool:
    return math.prod(chunk.sizes) * DTYPES[manifest.tensors[block.name].dtype][0] > SMALL_BYTES


def resume_from_memory(
    folder: RunFolder,
    memory: MemoryCheckpoint,
    state: TrainingState,
    *,
    settings: Mapping[str, Any],
    data_fingerprint: str,
) -> CheckpointManifest:
    """Fill `state` from snapshots in the memory of the nodes, as `resume` does from a checkpoint. Collective.

    No file of a checkpoint is read; the samples in the ledger are compared with their hashes. Raises CheckpointError on
    every rank if a snapshot was lost or changed meanwhile, or is of another model, and ConfirmationNeeded.
    """
    manifest, path = memory.manifest, memory.path
    on_all_ranks(lambda: verify_segments(folder.checkpoints / path.name, manifest, manifest.ledger[rank() :: world()]))
    from_rank_zero(partial(require_accepted, folder, manifest, settings, data_fingerprint))
    if manifest.world == world():
        on_all_ranks(lambda: memory.find(file_of(rank()), GENERATORS))
    _load(path, manifest, state, find=memory.find)
    if manifest.world == world():
        on_all_ranks(lambda: restore_random(path, manifest, rank(), memory.find))
    return manifest


def load_checkpoint(path: Path, manifest: CheckpointManifest, state: TrainingState, on_bytes: OnBytes) -> None:
    """Fill `state` from the verified checkpoint `path`, as `resume` does with the one that it takes.

    on_bytes: called with the bytes of each block that was read. Raises CheckpointError if the checkpoint is of another
    model; `state` is then as before. Collective.
    """
    _load(path, manifest, state, on_bytes=on_bytes)


def _load(
    path: Path,
    manifest: CheckpointManifest,
    state: TrainingState,
    small: SmallBlocks = MappingProxyType({}),
    find: Find | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Load all blocks after all ranks have compared names, shapes and dtypes: another model is never loaded in part."""
    names = sorted(name for name in manifest.tensors if not state.is_skipped(name))
    moments = on_all_ranks(state.optimizer.moments)
    blocks: list[StateBlock] = []

    def own_names() -> str:
        every = state.blocks(moments, first_rank=rank() == 0)
        blocks.extend(b for b in every if b.name in manifest.tensors or not b.optional)
        _check_fits(path, manifest, blocks)
        own = {block.name for block in blocks}
        return (
            f"{sum(1 << i for i, name in enumerate(names) if name in own):x}"  # one bit per name: small with 16k ranks
        )

    def covered(by_rank: list[str]) -> None:
        bits = [int(one, 16) for one in by_rank]
        for i, name in enumerate(names):
            if not any(own >> i & 1 for own in bits):
                raise other_model(path, name, "the model has no such tensor", lacking="model")

    def fill() -> None:
        read_blocks(path, manifest, blocks, small, find, on_bytes)
        state.optimizer.put_moments(moments)

    def bring() -> None:
        if find is not None:
            for name, pairs in chunks_by_file(manifest, blocks).items():
                find(name, [chunk.key for _, chunk in pairs])

    from_all_ranks(own_names, covered)
    on_all_ranks(bring)  # all of it before the first value changes: after a failure the state is as it was
    on_all_ranks(fill)


def _check_fits(path: Path, manifest: CheckpointManifest, blocks: list[StateBlock]) -> None:
    for block in blocks:
        if block.name not in manifest.tensors:
            raise other_model(path, block.name, "the checkpoint lacks it", lacking="checkpoint")
        entry, dtype = manifest.tensors[block.name], dtype_name(block.tensor.dtype)
        if (entry.shape, entry.dtype) != (block.shape, dtype):
            found, wanted = f"{entry.dtype}{list(entry.shape)}", f"{dtype}{list(block.shape)}"
            difference = f"it is {found} in the checkpoint, {wanted} in the model"
            raise other_model(path, block.name, difference, found=found, wanted=wanted)


def other_model(path: Path, name: str, difference: str, **facts: object) -> CheckpointError:
    """Return the error of a checkpoint whose tensor `name` does not fit the model. difference: in what, for people."""
    return CheckpointError(
        OTHER_MODEL,
        f"checkpoint {path} is of another model: tensor {name}: {difference}",
        rule="a checkpoint is loaded into a model with the same tensors",
        fix="use the run file that the checkpoint was trained with",
        path=str(path),
        tensor=name,
        **facts,
    )


def load_model(checkpoint: Path, model: Module) -> CheckpointManifest:
    """Verify `checkpoint` and load its weights into `model`, on any device, in one process without a process group.

    The tensors of `model` keep their dtype: fp32 master weights become bf16 if the model is bf16. The loads of experts,
    which only training uses, are not loaded. Router biases keep their value if the checkpoint has none, because the run
    began to use them later. Raises CheckpointError if the checkpoint is damaged or of another model.
    """
    manifest = verify_tensors(checkpoint)
    targets = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(LOAD)}
    stored = {k.removeprefix(MODEL): v for k, v in manifest.tensors.items() if k.startswith(MODEL)}
    stored = {name: entry for name, entry in stored.items() if not name.endswith(LOAD)}
    if not any(name.endswith(BIAS) for name in stored):
        targets = {name: tensor for name, tensor in targets.items() if not name.endswith(BIAS)}
    for name in sorted(targets.keys() ^ stored.keys()):
        where = "the model has no such tensor" if name in stored else "the checkpoint lacks it"
        raise other_model(checkpoint, name, where, lacking="model" if name in stored else "checkpoint")
    blocks = []
    for name, entry in stored.items():
        target = targets[name]
        if tuple(target.shape) != entry.shape:
            found, wanted = f"{list(entry.shape)}", f"{list(target.shape)}"
            difference = f"it is {found} in the checkpoint, {wanted} in the model"
            raise other_model(checkpoint, name, difference, found=found, wanted=wanted)
        blocks.append(StateBlock(MODEL + name, entry.shape, (0,) * target.dim(), target))
    read_blocks(checkpoint, manifest, blocks)
    return manifest
