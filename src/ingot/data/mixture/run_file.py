"""Write a mixture into a run file: only its [data.weights] is replaced."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import ConfigError
from ingot.storage import write_atomic
from ingot.theory.rules import load_run, run_from_dict

_HEADER = re.compile(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(#.*)?$")
_WEIGHTS = re.compile(r"\s*[\"']?weights[\"']?\s*[=.]")


def write_weights(run_file: Path, weights: Mapping[str, float]) -> dict[str, float]:
    """Replace data.weights in the TOML file `run_file`, keeping comments and order; return the earlier weights.

    Raises ConfigError, and leaves the file unchanged, if the file is not a valid run file, would be invalid with these
    weights, or has a form that must be edited by hand.
    """
    before = dict(load_run(run_file).data.weights)
    text = run_file.read_text(encoding="utf-8")
    changed = with_weights(text, weights)
    wanted = tomllib.loads(text)
    wanted["data"]["weights"] = dict(weights)
    run_from_dict(wanted, base=run_file.parent)
    if not _parses_to(changed, wanted):
        raise ConfigError(
            "E-WEIGHTS-FORM",
            f"{run_file}: data.weights has a form that ingot cannot edit",
            rule="the weights must be a section [data.weights], or one line weights = { ... } in [data]",
            fix=f"edit the file by hand: {weights_section(weights)!r}",
            path=str(run_file),
        )
    write_atomic(run_file, changed)
    return before


def _parses_to(text: str, values: dict) -> bool:
    try:
        return tomllib.loads(text) == values
    except tomllib.TOMLDecodeError:
        return False


def with_weights(text: str, weights: Mapping[str, float]) -> str:
    """Return the text of a run file with `weights` as its [data.weights], placed after [data]."""
    kept: list[str] = []
    section, end_of_data = "", 0
    for line in text.splitlines():
        if header := _HEADER.match(line):
            section = re.sub(r"[\s\"']", "", header[1])
        if section == "data.weights" or (section == "data" and _WEIGHTS.match(line)):
            continue
        kept.append(line)
        if section == "data" and line.strip():
            end_of_data = len(kept)
    kept[end_of_data:end_of_data] = ["", *weights_section(weights).splitlines()]
    return "\n".join(kept).rstrip() + "\n"


def weights_section(weights: Mapping[str, float]) -> str:
    names = {source: source if re.fullmatch(r"[A-Za-z0-9_-]+", source) else json.dumps(source) for source in weights}
    return "\n".join(["[data.weights]", *(f"{names[source]} = {share!r}" for source, share in weights.items())])
