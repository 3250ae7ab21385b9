"""The model part of a Hugging Face folder: config.json, generation_config.json and safetensors, written and read."""

import json
from pathlib import Path

import torch

from ingot.errors import CheckpointError, ConfigError, UsageError
from ingot.huggingface.arch_config import arch_of, huggingface_config
from ingot.huggingface.tensors import (
    TRAINING_ONLY,
    WIDE,
    from_huggingface,
    huggingface_shapes,
    tensor_shapes,
    to_huggingface,
)
from ingot.huggingface.weights import read_weights, write_weights
from ingot.schema.arch import Arch
from ingot.storage import write_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CONFIG_LIMIT_BYTES = 1 << 20


def write_model(
    folder: Path,
    arch: Arch,
    state: dict[str, torch.Tensor],
    *,
    eot_id: int,
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write `state` (ingot's names; what serves training only is left out) as `dtype` into the existing `folder`.

    Raises CheckpointError when `state` is not what `arch` says, ConfigError for a shape Hugging Face has no class for.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} cannot be exported", rule=f"one of {', '.join(DTYPES)}")
    config = huggingface_config(arch, eot_id=eot_id, dtype=dtype)
    expected = tensor_shapes(arch)
    state = {name: tensor for name, tensor in state.items() if not name.endswith(TRAINING_ONLY)}
    if expected.keys() != state.keys():
        odd = sorted(expected.keys() ^ state.keys())
        raise CheckpointError(
            f"{len(odd)} parameters differ from the architecture: {', '.join(odd[:5])}",
            rule="a checkpoint holds exactly the parameters of the run's [model]",
        )
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": eot_id, "eos_token_id": eot_id, "do_sample": False})
    write_weights(folder, to_huggingface(arch, state), DTYPES[dtype], max_file_bytes, wide=WIDE)


def import_huggingface(folder: Path) -> tuple[Arch, dict[str, torch.Tensor]]:
    """The shape and the parameters (ingot's names, dtypes as stored) of a Hugging Face folder of one of the
    classes in huggingface/kinds.py.

    Raises ConfigError for a model that ingot does not compute exactly, CheckpointError for damaged files.
    """
    config = _read_config(folder / "config.json")
    arch = arch_of(config, str(folder / "config.json"))
    tied_copy = {"lm_head.weight": "model.embed_tokens.weight"} if arch.tied_embeddings else {}
    tensors = read_weights(folder, huggingface_shapes(arch), copies=tied_copy)
    return arch, from_huggingface(arch, tensors, pairs=config.get("rope_interleave", True))


def _read_config(path: Path) -> dict:
    try:
        if path.stat().st_size > _CONFIG_LIMIT_BYTES:
            raise ValueError("it is larger than any model configuration")
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} has no config.json",
            rule="a Hugging Face model folder has config.json and *.safetensors",
            fix="name the folder that holds them",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", rule="config.json is a JSON object") from None
    return config
