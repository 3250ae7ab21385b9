"""Read the config.json of a Hugging Face folder, and check that a run can start from the folder's model. Folders of
runs, and of checkpoints in one, are read, too.

This module does not import torch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.config import to_dict
from ingot.errors import ConfigError
from ingot.hub.arch_config import arch_of
from ingot.schema.arch import Arch
from ingot.schema.checkpoint import WEIGHTS
from ingot.schema.run_folder import CHECKPOINTS, RunFolder
from ingot.theory.rules import recorded_run

CONFIG = "config.json"
_LIMIT_BYTES = 1 << 20
# Settings that have an effect only in training, so a run may differ in them from the model that it starts from.
_TRAINING_ONLY = (
    *("moe.noise", "moe.capacity_factor", "moe.overflow"),
    *("moe.sequence_loss", "moe.global_loss", "moe.z_loss", "moe.bias_steps"),
)


def read_config(folder: Path) -> dict:
    """Read config.json. Raises ConfigError if the folder or the file is missing, or is not a JSON object."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, more than any model configuration")
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            "E-HF-FOLDER",
            f"{folder} has no {CONFIG}" if folder.is_dir() else f"there is no folder {folder}",
            rule=f"a Hugging Face model folder has {CONFIG} and *.safetensors",
            fix="give the folder that contains these files; or, for first weights, a run folder or a checkpoint in one",
            folder=str(folder),
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "E-HF-CONFIG",
            f"{path} cannot be read: {error}",
            rule=f"{CONFIG} is a JSON object of at most 1 MiB",
            fix="download the file again",
            path=str(path),
        ) from None
    return config


def run_of(folder: Path) -> RunFolder | None:
    """Return the run of `folder`: if that is a run folder, or a checkpoint or save of the weights alone in one.

    Returns None for every other folder, such as a Hugging Face folder.
    """
    place = folder.resolve()
    if (place / CONFIG).is_file():
        return None
    saved = place.parent.name in (CHECKPOINTS, WEIGHTS) and not RunFolder(place).config.is_file()
    run = RunFolder(place.parent.parent if saved else place)
    return run if run.config.is_file() else None


def read_arch(folder: Path) -> Arch:
    """Return the `Arch` of the model in `folder`, a Hugging Face folder or one of a run or checkpoint (`run_of`).

    Raises ConfigError if ingot does not compute exactly this model.
    """
    if run := run_of(folder):
        return recorded_run(run.config).model
    return arch_of(read_config(folder), str(folder / CONFIG))


def require_fit(folder: Path, arch: Arch) -> None:
    """Check that a model of `arch` computes the same as the model in `folder`. Raises a ConfigError that lists all
    differences.
    """
    problems = list(_differences(arch, read_arch(folder)))
    if problems:
        raise ConfigError(
            "E-HF-INIT-DIFFERS",
            f"init: the model in {folder} differs from the run's: " + "; ".join(problems),
            rule="[model] equals the model of the folder, except for settings that have an effect only in training",
            fix="copy the folder's values (`ingot plan --init FOLDER` writes a run file with them), or remove init",
            folder=str(folder),
            problems=problems,
        )


def _differences(ours: Arch, theirs: Arch) -> Iterator[str]:
    wanted, found = _flat(to_dict(ours)), _flat(to_dict(theirs))
    for key, value in wanted.items():
        match key:
            case "max_seq_len":
                fits = value <= found[key]
            case "moe.bias_rate":
                # The rate may differ, but biases must exist in both models or in neither, because they choose experts.
                fits = value > 0 or found[key] == 0
            case _:
                fits = key in _TRAINING_ONLY or value == found[key]
        if not fits:
            yield f"model.{key} is {value!r}, but {found[key]!r} in the folder"


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten sections: {"moe": {"top_k": 2}} -> {"moe.top_k": 2}."""
    flat = {key: value for key, value in values.items() if not isinstance(value, dict)}
    for section in values.keys() - flat.keys():
        flat |= {f"{section}.{key}": value for key, value in values[section].items()}
    return flat
