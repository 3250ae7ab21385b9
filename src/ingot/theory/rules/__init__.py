"""The rules of layouts, and the reading of run files with all their rules: the rules of the schema, then those of
layouts.

Every run file and every RunConfig from outside is read here, so that no reader misses a rule.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.config import from_dict, load, load_sections
from ingot.schema.run import RunConfig
from ingot.theory.rules.layout import Problems, layout_rules


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run file `path` with `--set` overrides. Raises ConfigError that lists every problem with its line."""
    return load(RunConfig, path, overrides, rules=layout_rules)


def run_from_dict(values: dict, *, where=lambda key: key) -> RunConfig:
    """Build a run from nested dicts. Raises ConfigError that lists every problem; `where(key)` names the place."""
    return from_dict(RunConfig, values, where=where, rules=layout_rules)


def load_run_sections(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Read a run file in spite of problems: (the sound sections by name, "place: problem" of each problem).

    Raises ConfigError when the file cannot be read at all.
    """
    return load_sections(RunConfig, path, overrides, rules=layout_rules)


def run_problems(run: RunConfig) -> Problems:
    """Yield (dotted key, what is wrong and the way out) for each broken rule between the sections of `run`."""
    yield from run.problems()
    yield from layout_rules(run)
