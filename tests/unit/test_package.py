"""The package itself: instant, and with a planner."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ingot
from ingot.errors import PARTS

ROOT = Path(__file__).parents[2]
# What a command of README.md needs, by the words in it; a build of data and a run's verbs, by the verb.
NEEDS = {"--web": "web", "--runner ray": "ray", "=trafilatura": "trafilatura", " data ": "data", " train ": "train"}
NEEDS |= {" quickstart": "train", " export ": "train", " --simulate": "train", " eval ": "train", " sample ": "train"}


def test_importing_ingot_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import ingot; "
        "print(sorted(m for m in set(sys.modules) - before if m != 'ingot'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_plan_is_there_when_it_is_asked_for():
    from ingot import plan

    assert ingot.plan is plan and callable(plan)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = ingot.plam  # type: ignore[attr-defined]


def test_the_installation_in_the_readme_has_what_its_commands_need():
    readme = (ROOT / "README.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        inner = [re.fullmatch(r"ingot\[(.*)\]", wanted) for wanted in extras[extra]]
        nested = [packages(name) for match in inner if match for name in match[1].split(",")]
        return {re.split("[><=]", wanted)[0].lower() for wanted in extras[extra]}.union(*nested)

    (installed,) = re.findall(r"pip install -c constraints.txt -e '\.\[(.*?)\]'", readme)
    commands = [line for line in readme.splitlines() if line.lstrip().startswith("ingot ")]
    needed = {part for line in commands for words, part in NEEDS.items() if words in f"{line} "}
    assert (
        {"web", "data", "train"} <= needed and set(NEEDS.values()) <= set(extras) and set(PARTS.values()) <= set(extras)
    )
    assert {part: packages(part) - packages(installed) for part in needed} == {part: set() for part in needed}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {name for name in packages("test") if not name.startswith("ingot[")} <= pinned
