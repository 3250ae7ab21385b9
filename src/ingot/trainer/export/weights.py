"""The tensors of a Hugging Face folder: `model.safetensors` or, above a size limit, numbered files and an index.

Before a tensor is loaded, names, shapes and dtypes are compared with those of the model. Only safetensors files are
read, never pickle files.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ingot.errors import CheckpointError, ConfigError
from ingot.storage import write_json
from ingot.trainer.checkpoint.meter import SILENT, Meter

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
_INDEX_LIMIT_BYTES = 64 << 20


def write_weights(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    max_file_bytes: int,
    *,
    wide: str,
    meter: Meter = SILENT,
) -> list[str]:
    """Write `tensors` as `dtype` into `folder`; no file exceeds `max_file_bytes` unless one tensor does.

    wide: the suffix of the names of tensors that are always stored as float32. meter: counts the bytes. Returns the
    file names. Only the converted tensors of one file are in memory at a time.
    """
    dtypes = {name: torch.float32 if name.endswith(wide) else dtype for name in tensors}
    groups, total_bytes = _split({n: t.numel() * dtypes[n].itemsize for n, t in tensors.items()}, max_file_bytes)
    names = [SINGLE] if len(groups) == 1 else _numbered(len(groups))
    weight_map = {}
    meter.begin("writing", total_bytes)
    for file_name, group in zip(names, groups, strict=True):
        cast = {name: tensors[name].detach().to("cpu", dtypes[name]).contiguous() for name in group}
        _save(cast, folder / file_name)
        weight_map |= dict.fromkeys(group, file_name)
        meter.add(sum(tensor.nbytes for tensor in cast.values()))
    if len(groups) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return names


def _split(sizes: dict[str, int], max_file_bytes: int) -> tuple[list[list[str]], int]:
    groups, filled, total_bytes = [[]], 0, 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
        total_bytes += size
    return groups, total_bytes


def _numbered(count: int) -> list[str]:
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes files that only their owner may read, whatever the umask
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class StoredWeights:
    """The tensors of `folder`, which must be exactly those of `shapes`; each is read on request.

    copies: extra tensor -> the tensor it must equal if it is stored ({"lm_head.weight": embedding} if tied). Raises
    ConfigError if there is no safetensors file, CheckpointError if the files differ from `shapes`.
    """

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]], copies: dict[str, str] | None = None):
        copies = copies or {}
        self.folder = folder
        self._places = _places(folder, shapes | {copy: shapes[original] for copy, original in copies.items()})
        missing = [f"{name} is missing" for name in shapes if name not in self._places]
        if missing:
            raise _mismatch(folder, missing)
        self._copies = {original: copy for copy, original in copies.items() if copy in self._places}

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor in the dtype on disk."""
        tensor = self._load(name)
        copy = self._copies.get(name)
        if copy is not None and not torch.equal(self._load(copy), tensor):
            problem = f"{copy} differs from {name}, but config.json says that they are tied"
            raise _mismatch(self.folder, [problem])
        return tensor

    def _load(self, name: str) -> torch.Tensor:
        with safe_open(self._places[name], framework="pt") as file:
            return file.get_tensor(name)


def _places(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Path]:
    """Return tensor name -> file, from the headers alone. Raises CheckpointError if tensors do not fit `shapes`."""
    problems, places = [], {}
    for path in _files(folder):
        for name, found_shape, dtype in _headers(path):
            if name in places:
                problems.append(f"{name} is in {places[name].name} and in {path.name}")
            elif name not in shapes:
                problems.append(f"{path.name} has {name}, which the model of config.json does not have")
            elif found_shape != shapes[name]:
                problems.append(f"{name} has shape {list(found_shape)}, but config.json gives {list(shapes[name])}")
            elif dtype not in _DTYPES:
                problems.append(f"{name} is stored as {dtype}; supported: {', '.join(_DTYPES)}")
            places[name] = path
    if problems:
        raise _mismatch(folder, problems)
    return places


def _mismatch(folder: Path, problems: list[str]) -> CheckpointError:
    more = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
    return CheckpointError(
        "E-WEIGHTS-MISMATCH",
        f"{folder}: " + "\n".join(problems[:8]) + more,
        rule="the tensors are exactly those that config.json describes",
        fix="copy or export the folder again",
        path=str(folder),
        problems=problems,
    )


def _headers(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                yield name, tuple(part.get_shape()), part.get_dtype()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            "E-WEIGHTS-READ",
            f"{path} cannot be read: {error}",
            rule="weights are complete safetensors files",
            fix="copy or export the folder again",
            path=str(path),
        ) from None


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files of `folder`. An index may only name files inside `folder`."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
        raise ConfigError(
            "E-WEIGHTS-NONE",
            f"{folder} has no {SINGLE}" + (f", only {', '.join(pickled[:3])}" if pickled else ""),
            rule="ingot reads only safetensors files: a pickle file can run code when it is opened",
            fix="use the model's safetensors files",
            path=str(folder),
            pickled=pickled,
        )
    names = _index_names(folder / INDEX)
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise CheckpointError(
                "E-WEIGHTS-INDEX",
                f"{folder / INDEX} points to {name!r}",
                rule="an index lists safetensors files as plain file names in its own folder, not as paths",
                fix="copy or export the folder again",
                path=str(folder / INDEX),
            )
        if not (folder / name).is_file():
            raise CheckpointError(
                "E-WEIGHTS-FILE-MISSING",
                f"{folder / name} is missing",
                rule=f"every file that {INDEX} names exists",
                fix="copy or export the folder again",
                path=str(folder / name),
            )
    return [folder / name for name in names]


def _index_names(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _INDEX_LIMIT_BYTES:
            raise ValueError("the file is larger than 64 MiB")
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "E-WEIGHTS-INDEX",
            f"{path} is not an index of weights: {error}",
            rule="an index maps tensor names to safetensors files",
            fix="copy or export the folder again",
            path=str(path),
        ) from None
