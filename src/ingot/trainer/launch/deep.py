"""Checkpoints loaded as a resume loads them, to find those that have their hashes and would be refused all the same.

`ingot ckpt verify --deep`. The run's model and optimizer are built in this process, on the CPU and for one rank: a
checkpoint loads into any layout.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ingot.errors import CheckpointError, ResourceError, RunFailed, UsageError
from ingot.machine.facts import read_machine
from ingot.schema.checkpoint import WEIGHTS, CheckpointManifest
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import load_run
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.load import load_checkpoint, load_model
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, read_manifest
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.reader import restore_random
from ingot.trainer.checkpoint.state import MODEL
from ingot.trainer.launch.here import own_process
from ingot.trainer.launch.inspect import Inspected, inspect_checkpoints
from ingot.trainer.mesh.start import start
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.apply import COMPUTE
from ingot.trainer.parts import StepParts
from ingot.units import format_bytes

_CPU = torch.device("cpu")
_NAMED = 3  # tensors with values that are not finite


def inspect_deep(path: Path, meter: Meter = SILENT, *, stored: bool = False) -> Inspected:
    """Inspect all saves of a run folder, or one save in it: compare every byte with its hash, then load it.

    A full checkpoint is loaded by the code of a resume into the model and the optimizer of the run file, with the
    random states of all its ranks and the records of the callbacks; weights alone as an evaluation loads them. Values
    that are not finite are damage. meter: counts the bytes. stored: as in `inspect_checkpoints`.

    Raises UsageError outside of a run folder, ConfigError for its run file, ResourceError if the memory of this machine
    does not hold the state, and what `inspect_checkpoints` raises.
    """
    folder = _run_of(path)
    config = load_run(folder.config, same_code=True)
    config = replace(config, parallel=Parallel(), train=replace(config.train, device="cpu", compile="off"))

    def load(saves: list[ListedCheckpoint]) -> dict[Path, str]:
        _require_memory([save.manifest for save in saves if save.manifest])
        meter.begin("loading", sum(save.bytes for save in saves))
        with own_process({}, alone=True):
            start("cpu", config.launch.timeout_seconds)
            return dict(_loaded(config, folder, saves, meter))

    return inspect_checkpoints(path, hash_files=True, meter=meter, load=load, stored=stored)


def _run_of(path: Path) -> RunFolder:
    for folder in (RunFolder(path), RunFolder(path.resolve().parent.parent)):
        if folder.config.is_file():
            return folder
    raise UsageError(
        "E-RUN-NOT-FOUND",
        f"{path} is neither a run folder nor a checkpoint in one",
        rule="--deep builds the model of the run file, run.toml in the folder of the run",
        fix="name the folder that ingot train wrote, or leave out --deep to compare the hashes alone",
        path=str(path),
    )


def _require_memory(manifests: list[CheckpointManifest]) -> None:
    """Raise ResourceError if the largest save does not fit: its tensors, and the weights a second time for the dtype in
    which the model computes."""
    needed = 0
    for manifest in manifests:
        weights = sum(file.bytes for file in manifest.files.values())
        needed = max(needed, weights + (weights // 3 if manifest.kind != WEIGHTS else weights))
    available = read_machine().available_bytes
    if needed > available:
        raise ResourceError(
            "E-CKPT-MEMORY",
            f"loading the largest save takes {format_bytes(needed)} of memory, and {format_bytes(available)} are free",
            rule="--deep loads a whole save into the memory of one process",
            fix="use a machine with more memory, name a smaller save, or leave out --deep",
            needed_bytes=needed,
            free_bytes=available,
        )


def _loaded(
    config: RunConfig, folder: RunFolder, saves: list[ListedCheckpoint], meter: Meter
) -> Iterator[tuple[Path, str]]:
    """Load each save, and yield its path with the reason why it would be refused, "" if it would not."""
    parts: StepParts | None = None
    for save in saves:
        try:
            if save.manifest and save.manifest.kind == WEIGHTS:
                problem = _load_weights(config, save.path, save.bytes, meter)
            else:
                parts = parts or build_parts(config, _CPU, folder.config.parent, first_values=False)
                problem = _load_full(parts, save.path, meter)
        except (CheckpointError, RunFailed) as error:
            problem = error.found.partition(": ")[2] or error.found
        yield save.path, problem


def _load_weights(config: RunConfig, path: Path, size: int, meter: Meter) -> str:
    model = Transformer(config.model).to(_CPU, COMPUTE[config.train.precision])
    load_model(path, model)
    meter.add(size)
    return _not_finite((MODEL + name, tensor) for name, tensor in model.state_dict().items())


def _load_full(parts: StepParts, path: Path, meter: Meter) -> str:
    manifest = read_manifest(path)
    load_checkpoint(path, manifest, parts.state, meter.add)
    for rank in range(manifest.world):
        restore_random(path, manifest, rank)
    parts.callbacks.restore(manifest.callbacks)
    blocks = parts.state.blocks(parts.optimizer.moments(), first_rank=True)
    return _not_finite((block.name, block.tensor) for block in blocks if block.name in manifest.tensors)


def _not_finite(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    """Return which of the tensors have a value that is not finite, as the reason of a refusal; "" if none has."""
    names = [name for name, tensor in tensors if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"NaN or infinity in {', '.join(names[:_NAMED])}{more}"
