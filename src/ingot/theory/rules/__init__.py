"""The rules of layouts and chosen parts, and the functions that read run files and check all rules: those of the
schema, then those of parts, then those of layouts.

Use these functions for every run file and every RunConfig from outside, so that no rule is missed. All of them but
`recorded_run` import the plug-ins of the run file.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.config import from_dict, load, load_sections
from ingot.errors import ConfigError
from ingot.plugins.load import load_plugins
from ingot.schema.run import RunConfig
from ingot.theory.rules.layout import Problems, layout_rules
from ingot.theory.rules.parts import part_rules


def load_run(path: Path, overrides: Sequence[str] = (), *, same_code: bool = False) -> RunConfig:
    """Read the run file `path` with `--set` overrides. Raises a ConfigError that lists every problem with its line.

    same_code: raise ConfigError if the code of a plug-in is not what the file recorded when the run began.
    """
    run = _with_code(load(RunConfig, path, overrides, rules=_rules(path.parent)), path.parent)
    if same_code:
        _require_same_code(recorded_run(path), run)
    return run


def recorded_run(path: Path) -> RunConfig:
    """Read the run file `path` without importing its plug-ins: for commands that only look at a run."""
    return load(RunConfig, path, rules=layout_rules)


def run_from_dict(values: dict, *, where=lambda key: key, base: Path = Path()) -> RunConfig:
    """Build a run from nested dicts. Raises a ConfigError that lists every problem; `where(key)` returns its place.

    base: the folder to which plugins.folder is relative.
    """
    return _with_code(from_dict(RunConfig, values, where=where, rules=_rules(base)), base)


def load_run_sections(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Read a run file despite problems: return (sections without problems by name, "place: problem" of each problem).

    Raises ConfigError if the file cannot be read at all.
    """
    return load_sections(RunConfig, path, overrides, rules=_rules(path.parent))


def run_problems(run: RunConfig) -> Problems:
    """Yield (dotted key, problem and fix) for each broken rule between the sections of `run`."""
    yield from run.problems()
    yield from part_rules(run)
    yield from layout_rules(run)


def _rules(base: Path) -> Callable[[RunConfig], Problems]:
    """Return the rules that are not in the schema. They begin with the import of the plug-ins. base: the folder of the
    run file."""

    def rules(run: RunConfig) -> Problems:
        if not any(run.plugins.problems()):
            load_plugins(run.plugins.modules, base / run.plugins.folder)
        yield from part_rules(run)
        yield from layout_rules(run)

    return rules


def _with_code(run: RunConfig, base: Path) -> RunConfig:
    """Return `run` with the identity of the code of its plug-ins, whatever the file recorded."""
    code = load_plugins(run.plugins.modules, base / run.plugins.folder)
    return replace(run, plugins=replace(run.plugins, code=code)) if code != run.plugins.code else run


def _require_same_code(recorded: RunConfig, here: RunConfig) -> None:
    differ = [name for name, code in here.plugins.code.items() if recorded.plugins.code.get(name) != code]
    if differ:
        name = differ[0]
        raise ConfigError(
            "E-PLUGIN-DIFFERS",
            f"plug-in {name!r} has the code {here.plugins.code[name]} here, but the run has "
            f"{recorded.plugins.code.get(name, 'none')}",
            rule="every rank of a run imports the code with which the run was started, also after a restart",
            fix="restore the module, or run the command again, which asks whether the run continues with the changed "
            "code; on several machines, copy it to each",
            module=name,
        )
