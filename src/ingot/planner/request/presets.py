"""Models to plan for: presets by name, model files, folders of weights, and models known by their size alone."""

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
from ingot.schema.arch import Arch
from ingot.theory.params import count_parameters
from ingot.units import format_count

# The shape of a preset is used for a bare number of parameters if their sizes differ by less than this share.
_NEAR = 0.04
_PROPORTIONS = "usual proportions"
# Models of at least this size rarely have shorter sequences.
_LARGE, _USUAL_SEQUENCE = 1e9, 4096


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model of models.toml or of a model file.

    parameters, active_parameters: the publisher's figures, 0 for ingot's own shapes (and active ones for dense models).
    train: settings known to work with this model.
    """

    arch: Arch
    about: str = ""
    source: str = ""
    parameters: int = 0
    active_parameters: int = 0
    train: Hints = field(default_factory=Hints)


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model that a plan is for.

    parameters: the size of a model known by its size alone, 0 otherwise. shape: for such a model, the name of the
    preset whose shape `arch` is. init: a folder with the first weights of the run.
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
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            "E-MODEL-READ",
            f"cannot read the model file {path}: {error.strerror}",
            rule="a name that ends in .toml is a model file",
            fix="give the name of a preset, or an existing file",
            path=str(path),
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            "E-MODEL-FORMAT",
            f"{path}: {error}",
            rule="a model file is TOML with an [arch] section",
            fix="correct the file",
            path=str(path),
        ) from None
    return from_dict(ModelPreset, values, where=lambda key: f"{path} ({key})")


def unknown(code: str, what: str, given: str, known: tuple[str, ...], fix: str = "") -> UsageError:
    """Return the error for an unknown name, with the nearest known names before `fix`."""
    close = difflib.get_close_matches(given, known, n=3, cutoff=0.4)
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
    """Return the model that exactly one of the arguments names.

    model: a preset or a model file. parameters: the size of a dense model. init: a Hugging Face model folder.
    Raises UsageError, for files ConfigError.
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
    """Return a dense model of a size, with the shape of a preset of this size, else with usual proportions.

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
