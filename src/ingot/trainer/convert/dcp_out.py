"""Export a checkpoint as a folder of torch.distributed.checkpoint (DCP), which torch's own writer makes.

    .metadata, __0_0.distcp    written by torch.distributed.checkpoint.save without a process group
    config.json                the model's shape, for `ingot ckpt import DIR OUT --model DIR`

Tensors have the plain names of their module in the other system (names.py), the optimizer's the names that
torch.distributed.checkpoint.state_dict gives a flat state of AdamW, under "optimizer":

    optimizer.state.NAME.exp_avg         the first moment of the parameter NAME; exp_avg_sq, and step, a scalar
    optimizer.param_groups.NAME.lr       the other settings of torch.optim.AdamW likewise

torch gets tensors without values, and asks for their values one after the other. So an export needs a few times the
memory of the largest tensor: as it is stored, in the other order and dtype, and as it was written.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ingot.config import from_dict
from ingot.errors import EXIT_OK, CheckpointError
from ingot.hub.arch_config import huggingface_config
from ingot.hub.config_file import CONFIG
from ingot.schema.arch import Arch
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.guard_record import lr_factor
from ingot.schema.run import DEFAULTS, Optim, RunConfig, Schedule
from ingot.schema.tokens import read_token_manifest
from ingot.storage import fsync_dir, require_free, write_json
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.folders import find_checkpoint, find_weights
from ingot.trainer.checkpoint.load import other_model
from ingot.trainer.checkpoint.manifest import read_manifest, verify_tensors
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.reader import read_blocks
from ingot.trainer.checkpoint.state import BIAS as ROUTER_BIAS
from ingot.trainer.checkpoint.state import MODEL, OPTIM, StateBlock
from ingot.trainer.convert.dcp import DcpFolder
from ingot.trainer.convert.names import Naming, naming_of
from ingot.trainer.convert.new_folder import new_folder
from ingot.trainer.export.model_folder import DTYPES, TRAINING_ONLY, tensor_shapes
from ingot.trainer.optim.schedule import learning_rate

_OPTIMIZER, _STEP = "optimizer", "step"
_KINDS = ("exp_avg", "exp_avg_sq", _STEP)
_SMALL_FILES_BYTES = 16 << 20
T = TypeVar("T", Optim, Schedule)


@dataclass(frozen=True, kw_only=True)
class ExportedDcp:
    """A finished export. path: the folder. step: of the checkpoint. system: whose names the tensors have. dtype: of the
    weights. tensors: their number, with those of the optimizer. bytes: of these tensors. optimizer: its state is there.
    """

    path: Path
    step: int
    system: str
    dtype: str
    tensors: int
    bytes: int
    optimizer: bool

    def as_dict(self) -> dict:
        return asdict(self) | {"path": str(self.path), "exit_code": EXIT_OK}


@dataclass(frozen=True)
class _Source:
    """A tensor of the export: rows of the tensor `stored` of the checkpoint ("": zeros), in another order.

    ours: ingot's name of the parameter. part, parts: which of equally many rows. shape, dtype: of the tensor.
    """

    stored: str
    ours: str
    part: int
    parts: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def like(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def bytes(self) -> int:
        return self.like.numel() * self.dtype.itemsize


def export_dcp(
    source: Path,
    out: Path,
    *,
    names: str = "huggingface",
    dtype: str = "float32",
    optimizer: bool = False,
    meter: Meter = SILENT,
) -> ExportedDcp:
    """Write the weights of a save (of the run folder `source` the newest one) as the DCP folder `out`, read every
    tensor back and compare its bits.

    names: "huggingface", or "torchtitan" for a Llama. dtype: of the weights; router biases are float32. optimizer: also
    write the state of AdamW, in its own dtypes, with the settings of the last step, for which a checkpoint is needed.
    meter: counts the bytes. Raises UsageError if `out` is not new, or for names that the other side does not have,
    ConfigError for a model without a Hugging Face class, CheckpointError if the save is damaged, of another model than
    its run file or of another optimizer, ResourceError without enough space.
    """
    folder, checkpoint = (find_checkpoint if optimizer else find_weights)(source)
    run = load_run(folder.config)
    naming = naming_of(run.model, names)
    with new_folder(out) as temporary:
        manifest = read_manifest(checkpoint)
        meter.begin("verifying", sum(file.bytes for file in manifest.files.values()))
        manifest = verify_tensors(checkpoint, meter.add)
        weights = _weights(checkpoint, manifest, run.model, naming, DTYPES[dtype])
        moments = _moments(checkpoint, manifest, run, naming) if optimizer else {}
        tensors = weights | {f"{_OPTIMIZER}.{name}": one for name, one in moments.items()}
        size = sum(one.bytes for one in tensors.values())
        require_free(out, size + _SMALL_FILES_BYTES, f"the export to {out}")
        eot_id = read_token_manifest(folder.root / run.data.tokens).eot_id
        config = huggingface_config(run.model, eot_id=eot_id, dtype=dtype)
        values = _Values(checkpoint, manifest, naming, tensors)
        state: dict[str, Any] = {name: one.like for name, one in weights.items()}
        if optimizer:
            flat = {name: one.like for name, one in moments.items()}
            state[_OPTIMIZER] = flat | _settings(manifest, run, weights, naming)
        meter.begin("writing", size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
            planner = _Planner(values, tensors, meter)
            save(state, storage_writer=FileSystemWriter(temporary), planner=planner, no_dist=True)
        write_json(temporary / CONFIG, config)
        _require_written(temporary, tensors, values, meter, size)
        fsync_dir(temporary)
    return ExportedDcp(
        path=out,
        step=manifest.step,
        system=naming.system,
        dtype=dtype,
        tensors=len(tensors),
        bytes=size,
        optimizer=optimizer,
    )


class _Values:
    """The values of the tensors `tensors`, read from the verified checkpoint."""

    def __init__(self, checkpoint: Path, manifest: CheckpointManifest, naming: Naming, tensors: Mapping[str, _Source]):
        self._checkpoint, self._manifest = checkpoint, manifest
        self._naming, self._tensors = naming, tensors

    def read(self, name: str) -> Tensor:
        one = self._tensors[name]
        if not one.stored:
            return torch.zeros(one.shape, dtype=one.dtype)
        entry = self._manifest.tensors[one.stored]
        offsets = (one.part * one.shape[0], *(0,) * (len(one.shape) - 1)) if one.shape else ()
        values = torch.empty(one.shape, dtype=getattr(torch, entry.dtype))
        read_blocks(self._checkpoint, self._manifest, [StateBlock(one.stored, entry.shape, offsets, values)])
        ordered = self._naming.order(one.ours, values) if one.shape and one.parts == 1 else values
        return ordered.to(one.dtype).contiguous()


class _Planner(DefaultSavePlanner):
    """torch's plan of a save, whose tensors get their values when they are written."""

    def __init__(self, values: _Values, tensors: Mapping[str, _Source], meter: Meter):
        super().__init__()
        self._values, self._sources, self._meter = values, tensors, meter

    def lookup_object(self, index: Any) -> Any:
        if index.fqn not in self._sources:
            return super().lookup_object(index)
        value = self._values.read(index.fqn)
        self._meter.add(value.nbytes)
        return value


def _weights(
    checkpoint: Path, manifest: CheckpointManifest, arch: Arch, naming: Naming, dtype: torch.dtype
) -> dict[str, _Source]:
    """Return their name -> where its values are, for all weights."""
    found: dict[str, _Source] = {}
    shapes = tensor_shapes(arch)
    own = {name.removeprefix(MODEL) for name in manifest.tensors if name.startswith(MODEL)} - shapes.keys()
    if odd := sorted(name for name in own if not name.endswith((*TRAINING_ONLY, ROUTER_BIAS))):
        raise other_model(checkpoint, MODEL + odd[0], "the model of the run file has no such tensor")
    for ours, shape in shapes.items():
        kept = torch.float32 if ours.endswith(ROUTER_BIAS) else dtype
        found |= _parts(checkpoint, manifest, naming, MODEL + ours, ours, shape, kept)
    for copy, original in naming.copies.items():
        found[copy] = found[original]
    for name in naming.zeros:  # tensors that only the other system has
        found[name] = _Source("", "", 0, 1, (arch.moe.num_experts,), torch.float32)
    return found


def _moments(checkpoint: Path, manifest: CheckpointManifest, run: RunConfig, naming: Naming) -> dict[str, _Source]:
    """Return the name in a flat state of AdamW -> where its values are. Raises CheckpointError for any other."""
    shapes, found = tensor_shapes(run.model), {}
    stored = [name.removeprefix(OPTIM).partition(".") for name in manifest.tensors if name.startswith(OPTIM)]
    kind, kinds = manifest.settings.get("optim.kind", DEFAULTS["optim.kind"]), {kind for kind, _, _ in stored}
    if kind != DEFAULTS["optim.kind"] or kinds != set(_KINDS):
        raise CheckpointError(
            "E-DCP-OPTIMIZER",
            f"the optimizer {kind!r} keeps {', '.join(sorted(kinds)) or 'nothing'} for its parameters",
            rule=f"the exported state is that of torch.optim.AdamW: {', '.join(_KINDS)}",
            fix="leave --optimizer out: the weights alone are exported",
            path=str(checkpoint),
            optimizer=kind,
            kinds=sorted(kinds),
        )
    for ours, shape in shapes.items():
        if ours.endswith(ROUTER_BIAS):
            continue
        for kind in _KINDS:
            own = () if kind == _STEP else shape
            name = f"{OPTIM}{kind}.{ours}"
            kept = getattr(torch, manifest.tensors[name].dtype) if name in manifest.tensors else torch.float32
            for theirs, one in _parts(checkpoint, manifest, naming, name, ours, own, kept).items():
                found[f"state.{theirs}.{kind}"] = one
    return found


def _parts(
    checkpoint: Path,
    manifest: CheckpointManifest,
    naming: Naming,
    stored: str,
    ours: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[str, _Source]:
    """Return their name -> where its values are, for the tensor `stored` of the checkpoint."""
    names = naming.names[ours]
    if stored not in manifest.tensors and ours.endswith(ROUTER_BIAS):  # the run begins to use it later: zeros till then
        return {names[0]: _Source("", "", 0, 1, shape, dtype)}
    if (entry := manifest.tensors.get(stored)) is None or entry.shape != shape:
        found = "it lacks it" if entry is None else f"it has the shape {list(entry.shape)}, the run file {list(shape)}"
        raise other_model(checkpoint, stored, found)
    own = (shape[0] // len(names), *shape[1:]) if shape else ()
    return {theirs: _Source(stored, ours, i, len(names), own, dtype) for i, theirs in enumerate(names)}


def _settings(
    manifest: CheckpointManifest, run: RunConfig, weights: Mapping[str, _Source], naming: Naming
) -> dict[str, Any]:
    """Return the settings of torch.optim.AdamW for each parameter, with which the last step was trained: the run file
    may have changed since then."""
    step, optim = manifest.step, _section(Optim, "optim", manifest.settings)
    steps = manifest.settings.get("train.steps", run.train.steps)
    lr = learning_rate(steps, optim.lr, _section(Schedule, "schedule", manifest.settings))(step)
    lr *= lr_factor(manifest.guard.measures, step, optim.lr)
    found: dict[str, Any] = {}
    for name, one in weights.items():
        if not one.stored or one.ours.endswith(ROUTER_BIAS) or name in naming.copies:
            continue
        made = torch.optim.AdamW(
            [torch.nn.Parameter(one.like)],
            lr=lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay if len(one.shape) > 1 else 0.0,
        )
        group = {key: value for key, value in made.param_groups[0].items() if key != "params"}
        found |= {f"param_groups.{name}.{key}": value for key, value in group.items()}
    return found


def _section(kind: type[T], name: str, settings: Mapping[str, Any]) -> T:
    """Return a section of the run file, from the flat settings of a checkpoint."""
    own: dict[str, Any] = {}
    for key, value in settings.items():
        if key.startswith(f"{name}."):
            *path, last = key.split(".")[1:]
            inside = own
            for part in path:
                inside = inside.setdefault(part, {})
            inside[last] = value
    return from_dict(kind, {each.name: own[each.name] for each in fields(kind) if each.name in own})


def _require_written(folder: Path, tensors: Mapping[str, _Source], values: _Values, meter: Meter, size: int) -> None:
    """Raise CheckpointError unless `folder` has the tensors of the checkpoint, bit for bit."""
    written = DcpFolder(folder)
    meter.begin("comparing", size)
    for name in tensors:
        found, expected = written.read(name), values.read(name)
        if found.dtype != expected.dtype or not torch.equal(_bits(found), _bits(expected)):
            raise CheckpointError(
                "E-CKPT-READ-BACK",
                f"{name}, read back from {folder}, differs from what was written",
                rule="weights count as exported only after they have been read back and compared",
                fix="check this disk; nothing was exported",
                path=str(folder),
                tensor=name,
            )
        meter.add(found.nbytes)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
