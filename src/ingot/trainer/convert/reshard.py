"""Write a checkpoint as if the run had saved it in another layout, in the folder of a run that continues from it.

Loading does not need this: every layout loads every checkpoint. But a rank then reads parts of many files; of a
checkpoint in its own layout it reads its own file. Tensors keep their bits. In memory are the blocks that are copied
together (64 MiB, or one larger block) and the stored block that they are read from.
"""

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from ingot.config import to_dict, to_toml
from ingot.errors import EXIT_OK, UsageError
from ingot.schema.accepted import read_accepted, write_accepted
from ingot.schema.changes import CLASSES, ChangeClass
from ingot.schema.checkpoint import CheckpointManifest, file_of
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic
from ingot.theory.rules import load_run
from ingot.toml import toml_value
from ingot.trainer.checkpoint.files import CheckpointFiles, FileContents
from ingot.trainer.checkpoint.folders import find_checkpoint, publish
from ingot.trainer.checkpoint.load import other_model
from ingot.trainer.checkpoint.manifest import VERSION, read_manifest, verify_checkpoint, write_manifest
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.part import RankBlocks, assemble
from ingot.trainer.checkpoint.reader import found_file, read_blocks
from ingot.trainer.checkpoint.rules import tensor_bytes
from ingot.trainer.checkpoint.segments import verify_segments
from ingot.trainer.checkpoint.state import CPU, CUDA, StateBlock
from ingot.trainer.checkpoint.tensors import bytes_of, part_of
from ingot.trainer.convert.layout_blocks import rank_contents
from ingot.trainer.convert.new_folder import new_folder
from ingot.trainer.launch.prepare import with_paths_from

_TOGETHER_BYTES = 64 << 20
# Settings of [parallel] that a new layout keeps from the old one: where a rank has its memory.
_KEPT = ("recompute", "recompute_every", "offload", "offload_parameters")
_MICRO_BATCH = "micro_batch"
LAYOUT_SETTINGS = (
    _MICRO_BATCH,
    *(
        key.removeprefix("parallel.")
        for key, kind in CLASSES
        if key.startswith("parallel.") and kind == ChangeClass.SAME_MATHEMATICS
    ),
)


@dataclass(frozen=True, kw_only=True)
class Resharded:
    """A checkpoint in another layout. run: the new run folder. checkpoint: the folder in it. layout: its degrees.
    ranks: its number of files. bytes: of these files. store: the store of the old run, which the new one does not use.
    """

    run: Path
    checkpoint: Path
    step: int
    layout: dict[str, int]
    ranks: int
    bytes: int
    store: str

    def as_dict(self) -> dict:
        paths = {"run": str(self.run), "checkpoint": str(self.checkpoint)}
        return asdict(self) | paths | {"exit_code": EXIT_OK}


def reshard_checkpoint(source: Path, out: Path, layout: Mapping[str, str], meter: Meter = SILENT) -> Resharded:
    """Write the checkpoint `source` (of a run folder the newest) in another layout, into the new run folder `out`.

    layout: settings of LAYOUT_SETTINGS with their values as after --set; those that are not given have their defaults
    (degrees 1), except _KEPT. `out` gets the run file with this layout and without a store, the ledger and the accepted
    changes. Random states are kept if the number of ranks is the same, as when a run continues in another layout.
    meter: counts the bytes. The process must not have a process group. Raises UsageError for an unknown setting or if
    `out` is not new, ConfigError for a layout that breaks a rule, CheckpointError if the checkpoint is damaged or of
    another model than the run file, ResourceError without enough space.
    """
    folder, checkpoint = find_checkpoint(source)
    overrides = layout_overrides(layout)
    config = load_run(folder.config, [f"{key}={value}" for key, value in overrides.items()])
    with new_folder(out) as temporary:
        manifest = read_manifest(checkpoint)
        meter.begin("verifying", sum(file.bytes for file in manifest.files.values()))
        manifest = verify_checkpoint(checkpoint, meter.add)
        new = RunFolder(temporary)
        files = CheckpointFiles(new, manifest.step)
        meter.begin("writing", sum(map(tensor_bytes, manifest.tensors.values())))
        resharded = _write_files(files, checkpoint, manifest, config, meter)
        own = config.settings()
        resharded = replace(
            resharded, settings={k: own[k] if k in overrides else v for k, v in manifest.settings.items()}
        )
        write_manifest(files.temporary, resharded)
        publish(files.temporary, files.path)
        _copy_ledger(folder, new, files.path, resharded)
        earlier = manifest.accepted
        if earlier is None:  # a checkpoint of an earlier version of ingot
            earlier = [one for one in read_accepted(folder.accepted) if one.step < manifest.step]
        write_accepted(new.accepted, list(earlier))
        remote = replace(config.checkpoint.remote, url="")
        moved = with_paths_from(config, folder.root, out)
        write_atomic(new.config, to_toml(replace(moved, checkpoint=replace(config.checkpoint, remote=remote))))
    return Resharded(
        run=out,
        checkpoint=RunFolder(out).checkpoint(manifest.step),
        step=manifest.step,
        layout=resharded.layout,
        ranks=resharded.world,
        bytes=sum(file.bytes for file in resharded.files.values()),
        store=config.checkpoint.remote.url,
    )


def read_layout(text: str) -> dict[str, str]:
    """Return the settings in `text`, like "dp_shard=4 tp=2", or as `ingot ckpt ls` shows a layout, "dp 4 tp 2": dp is
    dp_shard, and "dp 2x4" two copies (dp_replicate), each divided among four ranks. Raises UsageError."""
    words = text.replace(",", " ").replace("=", " ").split()
    if not words or len(words) % 2:
        raise UsageError(
            "E-RESHARD-LAYOUT",
            f"the layout {text[:60]!r} does not consist of settings",
            rule="a layout is a text of NAME=VALUE, with spaces between them, or what ingot ckpt ls shows as layout",
            fix="write for example --layout 'dp_shard=4 tp=2' or --layout 'dp 4 tp 2'",
            name=text,
        )
    layout = dict(zip(words[::2], words[1::2], strict=True))
    if (ranks := layout.pop("dp", None)) is not None:
        copies, _, shards = ranks.rpartition("x")
        layout |= {"dp_shard": shards} | ({"dp_replicate": copies} if copies else {})
    return layout


def layout_overrides(layout: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a run file, with their values, that make its layout `layout`. Raises UsageError for a name
    that is not in LAYOUT_SETTINGS."""
    for name in layout:
        if name not in LAYOUT_SETTINGS:
            raise UsageError(
                "E-RESHARD-LAYOUT",
                f"{name[:60]!r} is not a setting of a layout",
                rule=f"a layout is given by {', '.join(sorted(LAYOUT_SETTINGS))}",
                fix="give degrees like dp_shard=4 tp=2, as in [parallel] of a run file",
                name=name,
            )
    standard = to_dict(Parallel())
    values = {name: toml_value(standard[name]) for name in LAYOUT_SETTINGS if name in standard and name not in _KEPT}
    return {
        ("train." if name == _MICRO_BATCH else "parallel.") + name: value
        for name, value in {**values, **layout}.items()
    }


def _write_files(
    files: CheckpointFiles, checkpoint: Path, manifest: CheckpointManifest, config: RunConfig, meter: Meter
) -> CheckpointManifest:
    """Write the file of each rank of `config`, and return the manifest with these files."""
    world = config.parallel.world_size
    same_world = world == manifest.world
    files.make_folder([file.bytes for file in manifest.files.values()])
    parts: list[RankBlocks] = []
    layout: dict[str, int] = {}
    for rank in range(world):
        found = rank_contents(config, manifest, rank)
        layout = layout or found.layout
        contents = found.contents
        _require_same_kinds(checkpoint, manifest, contents)
        random = (
            _random_states(found_file(checkpoint, manifest, file_of(rank))) if same_world and not manifest.rng else []
        )
        whole = replace(contents, parts=(*contents.parts, *(part_of(key, tensor) for key, tensor in random)))
        stored = _stored_bytes(checkpoint, manifest, contents, meter)
        states = bytes_of([tensor for _, tensor in random])
        parts.append(files.write(rank, whole, itertools.chain(stored, states)))
    cuts, tensors = assemble(parts)
    if missing := sorted(manifest.tensors.keys() - tensors.keys()):
        raise other_model(checkpoint, missing[0], "the model of the run file has no such tensor")
    return replace(
        manifest,
        version=VERSION,
        epoch=0,  # no attempt saved it
        layout=layout,
        world=world,
        files={file_of(rank): part.file for rank, part in enumerate(parts)},
        cuts=cuts,
        tensors=tensors,
        rng=manifest.rng if same_world else (),
    )


def _stored_bytes(
    checkpoint: Path, manifest: CheckpointManifest, contents: FileContents, meter: Meter
) -> Iterator[memoryview]:
    """Yield the bytes of the blocks of a new file, read from the old ones, some blocks at a time."""
    waiting: list[StateBlock] = []
    held = 0
    for (name, offsets, sizes), part in zip(contents.written, contents.parts, strict=False):
        entry = manifest.tensors[name]
        if waiting and held + part.bytes > _TOGETHER_BYTES:
            yield from _read(checkpoint, manifest, waiting)
            meter.add(held)
            waiting, held = [], 0
        waiting.append(StateBlock(name, entry.shape, offsets, torch.empty(sizes, dtype=getattr(torch, entry.dtype))))
        held += part.bytes
    yield from _read(checkpoint, manifest, waiting)
    meter.add(held)


def _read(checkpoint: Path, manifest: CheckpointManifest, blocks: Sequence[StateBlock]) -> Iterator[memoryview]:
    read_blocks(checkpoint, manifest, blocks)
    return bytes_of([block.tensor for block in blocks])


def _random_states(file: Path) -> list[tuple[str, Tensor]]:
    with safetensors.safe_open(file, framework="pt", device="cpu") as tensors:
        return [(key, tensors.get_tensor(key)) for key in (CPU, CUDA) if key in tensors.keys()]  # noqa: SIM118


def _require_same_kinds(checkpoint: Path, manifest: CheckpointManifest, contents: FileContents) -> None:
    """Raise CheckpointError if a rank of the new layout has a tensor that the checkpoint lacks, or in another form."""
    for name, (dtype, shape) in contents.kinds.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            raise other_model(checkpoint, name, "the checkpoint lacks it")
        if (entry.dtype, entry.shape) != (dtype, tuple(shape)):
            stored, wanted = f"{entry.dtype}{list(entry.shape)}", f"{dtype}{list(shape)}"
            raise other_model(checkpoint, name, f"it is {stored} in the checkpoint, {wanted} in the model")


def _copy_ledger(old: RunFolder, new: RunFolder, checkpoint: Path, manifest: CheckpointManifest) -> None:
    """Copy the files of the ledger that `manifest` lists, and compare them with their hashes."""
    new.ledger.mkdir()
    for segment in manifest.ledger:
        shutil.copyfile(old.ledger / segment.file, new.ledger / segment.file)
        with (new.ledger / segment.file).open("rb") as file:
            os.fsync(file.fileno())
    verify_segments(checkpoint, manifest, manifest.ledger)
