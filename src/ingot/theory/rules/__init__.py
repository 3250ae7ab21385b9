"""The rules of layouts, and the functions that read run files and check all rules: those of the schema, then those of
layouts.

Use these functions for every run file and every RunConfig from outside, so that no rule is missed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.config import from_dict, load, load_sections
from ingot.schema.run import RunConfig
from ingot.theory.rules.layout import Problems, layout_rules


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run file `path` with `--set` overrides. Raises a ConfigError that lists every problem with its line."""
    return load(RunConfig, path, overrides, rules=layout_rules)


def run_from_dict(values: dict, *, where=lambda key: key) -> RunConfig:
    """Build a run from nested dicts. Raises a ConfigError that lists every problem; `where(key)` returns its place."""
    return from_dict(RunConfig, values, where=where, rules=layout_rules)


def load_run_sections(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Read a run file despite problems: return (sections without problems by name, "place: problem" of each problem).

    Raises ConfigError if the file cannot be read at all.
    """
    return load_sections(RunConfig, path, overrides, rules=layout_rules)


def run_problems(run: RunConfig) -> Problems:
    """Yield (dotted key, problem and fix) for each broken rule between the sections of `run`."""
    yield from run.problems()
    yield from layout_rules(run)
