"""Presets by name: models, and clusters put together from a device and a size."""

import difflib
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import ConfigError, UsageError
from ingot.planner.run.propose import Hints
from ingot.schema.arch import Arch
from ingot.theory.devices import devices


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """parameters, active_parameters: the publisher's figures, 0 for shapes of our own and for dense ones.
    train: what is known to work with this model."""

    arch: Arch
    about: str = ""
    source: str = ""
    parameters: int = 0
    active_parameters: int = 0
    train: Hints = field(default_factory=Hints)


def _table(name: str) -> dict:
    return tomllib.loads(resources.files("ingot.planner.request").joinpath(name).read_text(encoding="utf-8"))


def model_names() -> tuple[str, ...]:
    return tuple(_table("models.toml"))


def load_model(name_or_file: str) -> ModelPreset:
    """A preset's name, or a TOML file with an [arch] section (and [train] hints if wanted). Raises UsageError."""
    path = Path(name_or_file)
    if path.suffix == ".toml":
        return _model_file(path)
    table = _table("models.toml")
    if name_or_file not in table:
        raise unknown("model preset", name_or_file, tuple(table), "or give a .toml file with an [arch] section")
    return from_dict(ModelPreset, table[name_or_file], where=lambda key: f"models.toml ({name_or_file}.{key})")


def _model_file(path: Path) -> ModelPreset:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the model file {path}: {error.strerror}", fix="give a preset or a file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", rule="a model file is TOML with an [arch] section") from None
    return from_dict(ModelPreset, values, where=lambda key: f"{path} ({key})")


def device_names() -> tuple[str, ...]:
    return tuple(devices())


def unknown(what: str, given: str, known: tuple[str, ...], else_: str) -> UsageError:
    """With the nearest names, best first."""
    close = [repr(name) for name in difflib.get_close_matches(given, known, n=3, cutoff=0.4)]
    fix = (f"did you mean {' or '.join(close)}? " if close else "") + else_
    return UsageError(f"no {what} {given!r}", rule=f"known: {', '.join(known)}", fix=fix)
