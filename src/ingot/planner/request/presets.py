"""Models to plan for: named presets, model files, Hugging Face folders, and models given only by their size."""

import difflib
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import ConfigError, UsageError
from ingot.hub.config_file import read_arch
from ingot.planner.run.propose import NO_HINTS, Hints
from ingot.planner.run.scaling import shape_of
from ingot.ranges import Count
from ingot.schema.arch import Arch
from ingot.theory.params import count_parameters
from ingot.toml import parse_toml
from ingot.units import format_count

# A model given only by its size has a preset's shape if the two sizes differ by less than this share.
_NEAR = 0.04
_PROPORTIONS = "usual proportions"
# Models of at least _LARGE parameters are rarely trained on shorter sequences than _USUAL_SEQUENCE tokens.
_LARGE, _USUAL_SEQUENCE = 1e9, 4096


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model from models.toml or from a model file.

    parameters, active_parameters: counts that the publisher reports; 0 for ingot's own shapes. active_parameters is
    also 0 for dense models. train: training settings known to work with this model.
    """

    arch: Arch
    about: str = ""
    source: str = ""
    parameters: Count = 0
    active_parameters: Count = 0
    train: Hints = field(default_factory=Hints)


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model that a plan is for.

    parameters: the size of a model given only by its size, otherwise 0. shape: for such a model, the preset whose
    shape `arch` has, or "usual proportions". init: a Hugging Face folder with the run's initial weights.
    """

    name: str
    arch: Arch
    hints: Hints = NO_HINTS
    parameters: int = 0
    shape: str = ""
    init: Path | None = None


def _presets() -> dict:
    return tomllib.loads(resources.files("ingot.planner.request").joinpath("models.toml").read_text(encoding="utf-8"))


def model_names() -> tuple[str, ...]:
    return tuple(_presets())


def load_model(name_or_file: str) -> ModelPreset:
    """Return a preset by name, or the model of a TOML file with an [arch] section (and optional [train] hints).

    Raises UsageError for an unknown name or an unreadable file, ConfigError for wrong contents.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml":
        return _model_file(path)
    presets = _presets()
    if name_or_file not in presets:
        fix = "or give a .toml file with an [arch] section"
        raise unknown("E-MODEL-UNKNOWN", "model preset", name_or_file, tuple(presets), fix)
    return from_dict(ModelPreset, presets[name_or_file], where=lambda key: f"models.toml ({name_or_file}.{key})")


def _model_file(path: Path) -> ModelPreset:
    try:
        values = parse_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(
            "E-MODEL-READ",
            f"cannot read the model file {path}: {error.strerror}",
            rule="a name that ends in .toml is a model file",
            fix="give the name of a preset, or an existing file",
            path=str(path),
        ) from None
    except (UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(
            "E-MODEL-FORMAT",
            error.found if isinstance(error, ConfigError) else f"{path}: {error}",
            rule="a model file is TOML with an [arch] section",
            fix="correct the file",
            path=str(path),
        ) from None
    return from_dict(ModelPreset, values, where=lambda key: f"{path} ({key})")


def unknown(
    code: str, what: str, given: str, known: tuple[str, ...], fix: str = "", *, near: list[str] | None = None
) -> UsageError:
    """Return the error for an unknown name. Its fix proposes the nearest known names, followed by `fix`.

    what: the kind of thing that `given` should name, like "device". near: the nearest names; if None, they are found
    by their letters.
    """
    given = given if len(given) <= 100 else f"{given[:100]}..."
    close = difflib.get_close_matches(given, known, n=3, cutoff=0.4) if near is None else near
    fixes = [f"did you mean {' or '.join(map(repr, close))}?"] if close else []
    fixes += [fix] if fix else []
    return UsageError(
        code,
        f"no {what} {given!r}",
        rule=f"known: {', '.join(known)}",
        fix=" ".join(fixes),
        given=given,
        nearest=close,
    )


def choose_model(model: str = "", *, parameters: int = 0, init: Path | None = None) -> ModelChoice:
    """Return the model that exactly one of the three arguments names.

    model: a preset or a model file. parameters: the size of a dense model. init: a Hugging Face model folder.
    Raises UsageError, or ConfigError for wrong file contents.
    """
    if (given := sum(map(bool, (model, parameters, init)))) != 1:
        raise UsageError(
            "E-MODEL-CHOICE",
            f"{given} of --model, --params and --init are given",
            rule="exactly one of them names the model",
            fix="--model llama3-8b, or --params 70b, or --init DIR",
            given=given,
        )
    if init:
        return ModelChoice(name=init.resolve().name, arch=read_arch(init), init=init)
    if model:
        preset = load_model(model)
        name = Path(model).stem if model.endswith(".toml") else model
        return ModelChoice(name=name, arch=preset.arch, hints=preset.train)
    return model_of_size(parameters)


def model_of_size(parameters: int) -> ModelChoice:
    """Return a dense model with about `parameters` parameters: the shape of the nearest preset if it is within 4%,
    otherwise one with usual proportions.

    Raises ConfigError for fewer than 1M or more than 100T parameters.
    """
    name = f"{format_count(parameters).lower()}"
    presets = [(other, load_model(other)) for other in model_names()]
    dense = [(other, p) for other, p in presets if not p.arch.is_moe and other != "tiny"]
    near = min(dense, key=lambda item: abs(count_parameters(item[1].arch) / parameters - 1))
    if abs(count_parameters(near[1].arch) / parameters - 1) < _NEAR:
        return ModelChoice(name=name, arch=near[1].arch, hints=near[1].train, parameters=parameters, shape=near[0])
    hints = Hints(seq_len=_USUAL_SEQUENCE) if parameters >= _LARGE else NO_HINTS
    return ModelChoice(name=name, arch=shape_of(parameters), hints=hints, parameters=parameters, shape=_PROPORTIONS)
