"""Import a model from a folder of torch.distributed.checkpoint: a Hugging Face folder, from which a run can start."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ingot.errors import EXIT_OK, CheckpointError
from ingot.schema.arch import Arch
from ingot.storage import require_free
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.state import BIAS as ROUTER_BIAS
from ingot.trainer.convert.dcp import DcpFolder
from ingot.trainer.convert.names import NamedModel, find_model
from ingot.trainer.convert.new_folder import new_folder
from ingot.trainer.export.model_folder import ModelFolder, tensor_shapes, write_model

_SMALL_FILES_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Imported:
    """An imported model. path: the written folder. system: whose names the tensors had. prefix: before these names.
    dtype: of the stored weights. parameters: their number. left: the number of entries of the folder that are not of
    the model, such as moments of the optimizer.
    """

    path: Path
    system: str
    prefix: str
    dtype: str
    parameters: int
    left: int

    def as_dict(self) -> dict:
        return asdict(self) | {"path": str(self.path), "exit_code": EXIT_OK}


def import_dcp(
    source: Path, out: Path, arch: Arch, *, eot_id: int, prefix: str | None = None, meter: Meter = SILENT
) -> Imported:
    """Write the model of `arch` in the DCP folder `source` as the Hugging Face folder `out`, and compare every value.

    eot_id: the end-of-text token, for config.json. prefix: of the names of the model's tensors; None: found. meter:
    counts the bytes. The weights keep their values: they are stored as bfloat16 if all of them are, else as float32
    (router biases always). All of them are in memory at once. Nothing in `source` is executed. Raises UsageError if
    `out` is not new, CheckpointError if `source` is damaged, cannot be read safely, or does not hold this model,
    ConfigError for a model without a Hugging Face class, ResourceError without enough space.
    """
    with new_folder(out) as temporary:
        there = DcpFolder(source)
        model = find_model(arch, {name: one.shape for name, one in there.tensors.items()}, prefix, str(source))
        _require_equal_copies(there, model)
        state = _read(there, model, arch, meter)
        narrow = all(one.dtype == torch.bfloat16 for name, one in state.items() if not name.endswith(ROUTER_BIAS))
        dtype = "bfloat16" if narrow else "float32"
        count = sum(tensor.numel() for tensor in state.values())
        require_free(out, count * getattr(torch, dtype).itemsize + _SMALL_FILES_BYTES, f"the import to {out}")
        write_model(temporary, arch, state, eot_id=eot_id, dtype=dtype, meter=meter)
        _require_written(temporary, state, meter)
    used = {name for names in model.naming.names.values() for name in names} | model.naming.copies.keys()
    left = len(there.others) + len(there.tensors.keys() - {model.names[name] for name in used if name in model.names})
    return Imported(path=out, system=model.naming.system, prefix=model.prefix, dtype=dtype, parameters=count, left=left)


def _read(there: DcpFolder, model: NamedModel, arch: Arch, meter: Meter) -> dict[str, torch.Tensor]:
    """Return all tensors of the model, by ingot's names, with their dtypes on disk."""
    shapes = tensor_shapes(arch)
    wanted = [model.names[theirs] for ours in shapes for theirs in model.naming.names[ours]]
    meter.begin("reading", sum(there.tensors[name].bytes for name in wanted))
    state = {}
    for ours in shapes:
        state[ours] = model.read(ours, there.read)
        meter.add(state[ours].nbytes)
    return state


def _require_equal_copies(there: DcpFolder, model: NamedModel) -> None:
    for copy, original in model.naming.copies.items():
        if copy in model.names and not torch.equal(there.read(model.names[copy]), there.read(model.names[original])):
            raise CheckpointError(
                "E-DCP-MODEL",
                f"{there.folder}: {model.names[copy]} differs from {model.names[original]}, but the model ties them",
                rule="a model with tied embeddings has one matrix for both",
                fix="name a model without tied embeddings with --model",
                path=str(there.folder),
                problems=[f"{model.names[copy]} differs from {model.names[original]}"],
            )


def _require_written(folder: Path, state: dict[str, torch.Tensor], meter: Meter) -> None:
    """Raise CheckpointError unless the weights in `folder` are those of `state`, bit for bit."""
    written = ModelFolder(folder)
    meter.begin("comparing", sum(tensor.nbytes for tensor in state.values()))
    for name, tensor in state.items():
        found = written.read(name)
        if not torch.equal(_bits(found), _bits(tensor.to(found.dtype))):
            raise CheckpointError(
                "E-CKPT-READ-BACK",
                f"{name}, read back from {folder}, differs from what was written",
                rule="weights count as imported only after they have been read back and compared",
                fix="check this disk; nothing was imported",
                path=str(folder),
                tensor=name,
            )
        meter.add(tensor.nbytes)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
