"""Model families: which Hugging Face class computes a model, its config.json and its tensor names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.plugins.registry import Part, Registry
from ingot.schema.arch import Arch


@dataclass(frozen=True, kw_only=True)
class FamilyPart(Part):
    """A family, named by the `model_type` of config.json. A model is exported as the first family that computes it.

    class_name: the class in `architectures`. title: the name in a model card.
    problems(arch): yields, as text, each setting of `arch` that the class computes differently; none: it fits.
    config(arch): returns the keys of config.json that describe the shape.
    model(config): returns (fields of [model] in a run file, nested; settings that ingot does not compute, as text) of a
      config.json: the inverse of `config`. An export is read back and must give the logits of the trained model.
    names: a tensor of a block in ingot, without "blocks.N." and ".weight" -> the name in the class, without
      "model.layers.N."; the names of Llama hold for those that are not here. `outside`: the same for embed, norm, head.
    """

    class_name: str
    title: str
    problems: Callable[[Arch], Iterable[str]]
    config: Callable[[Arch], Mapping[str, Any]]
    model: Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], Sequence[str]]]
    names: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)


# hub/arch_config.py adds those of ingot.
FAMILIES = Registry[FamilyPart]("model family", "model_type")
