"""What is planned: a model by name, by file, by a folder of weights, or by nothing but its number of parameters."""

from dataclasses import dataclass
from pathlib import Path

from ingot.errors import UsageError
from ingot.hub.config_file import read_arch
from ingot.planner.request.presets import load_model, model_names
from ingot.planner.run.propose import NO_HINTS, Hints
from ingot.planner.run.shapes import shape_of
from ingot.schema.arch import Arch
from ingot.theory.params import count_parameters
from ingot.units import format_count

# A preset of about the size stands in for a bare number of parameters: its shape was trained.
_NEAR = 0.04
_PROPORTIONS = "usual proportions"
# Sequences of models of this size and more are rarely shorter.
_LARGE, _USUAL_SEQUENCE = 1e9, 4096


@dataclass(frozen=True, kw_only=True)
class Subject:
    """parameters: the number that was given in place of a shape, 0 otherwise. shape: then, whose shape stands in.
    init: a folder of weights that the run begins with."""

    name: str
    arch: Arch
    hints: Hints = NO_HINTS
    parameters: int = 0
    shape: str = ""
    init: Path | None = None


def find_subject(model: str = "", *, parameters: int = 0, init: Path | None = None) -> Subject:
    """One of the three. Raises UsageError, for files ConfigError."""
    if sum(map(bool, (model, parameters, init))) != 1:
        raise UsageError("give one of --model, --params or --init", fix="--model llama3-8b, or --params 70b")
    if init:
        return Subject(name=init.resolve().name, arch=read_arch(init), init=init)
    if model:
        preset = load_model(model)
        name = Path(model).stem if model.endswith(".toml") else model
        return Subject(name=name, arch=preset.arch, hints=preset.train)
    return by_size(parameters)


def by_size(parameters: int) -> Subject:
    """A dense model of so many parameters, in the shape of a preset of that size, else in one of common proportions."""
    name = f"{format_count(parameters).lower()}"
    presets = [(other, load_model(other)) for other in model_names()]
    dense = [(other, p) for other, p in presets if not p.arch.is_moe and other != "tiny"]
    near = min(dense, key=lambda item: abs(count_parameters(item[1].arch) / parameters - 1))
    if abs(count_parameters(near[1].arch) / parameters - 1) < _NEAR:
        return Subject(name=name, arch=near[1].arch, hints=near[1].train, parameters=parameters, shape=near[0])
    hints = Hints(seq_len=_USUAL_SEQUENCE) if parameters >= _LARGE else NO_HINTS
    return Subject(name=name, arch=shape_of(parameters), hints=hints, parameters=parameters, shape=_PROPORTIONS)
