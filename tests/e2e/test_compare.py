"""`ingot compare` on real runs: one that was killed and continued is the same run, and another rate is not."""

import json

import pytest

from .conftest import Project

pytestmark = pytest.mark.slow


def test_a_run_in_two_parts_equals_the_whole_one_and_another_rate_differs(project: Project):
    steps = ("--set", "train.steps=40")
    project.train("whole", *steps)
    project.train("parts", *steps, "--until-step", "20", code=10)
    project.train("parts", *steps)
    project.train("other", *steps, "--set", "optim.lr=0.01")
    runs = [str(project.folder(name).root) for name in ("whole", "parts", "other")]
    found = json.loads(project.ingot("compare", *runs, "--json", "--out", str(project.root / "page.html")))
    assert [one["key"] for one in found["settings"] if one["kind"] == "other numbers"] == ["optim.lr"]
    (loss,) = [one for one in found["points"][-1]["metrics"] if one["name"] == "train/loss"]
    assert loss["differences"][1] == 0.0 and loss["differences"][2] != 0.0
    assert (project.root / "page.html").stat().st_size > 10_000
