"""The first weights of a run that begins with a model from elsewhere."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ingot.hub.config_file import require_fit
from ingot.schema.arch import Arch
from ingot.trainer.export.model_folder import ModelFolder
from ingot.trainer.export.tensors import TRAINING_ONLY
from ingot.trainer.model.init import ROUTER_BIAS

# (name, whole shape, offsets, sizes) -> that block of a parameter or buffer
FirstValue = Callable[[str, Sequence[int], Sequence[int], Sequence[int]], Tensor]


def first_weights(folder: Path, arch: Arch, drawn: FirstValue) -> FirstValue:
    """Blocks of the model in the Hugging Face folder `folder`, in its dtypes; each call reads what it needs, no more.

    drawn: what the folder cannot have because it serves training only (loads, the expert of tokens beyond a capacity),
    and biases of routers where its model has none. Raises ConfigError unless it fits a model of `arch`, CheckpointError
    for damaged files.
    """
    require_fit(folder, arch)
    there = ModelFolder(folder)

    def value(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if name.endswith(TRAINING_ONLY) or (name.endswith(ROUTER_BIAS) and name not in there.shapes):
            return drawn(name, shape, offsets, sizes)
        return there.read_block(name, offsets, sizes)

    return value
