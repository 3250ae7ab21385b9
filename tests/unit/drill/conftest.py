"""A small run file and tokens, and trials whose logs are written by hand."""

import json
from random import Random

import pytest
from tests.e2e.conftest import RUN_FILE, write_tokens

from ingot.drill.oracles import Recovery, Verdicts
from ingot.drill.trial import DrilledRun, Trial
from ingot.theory.rules import load_run


@pytest.fixture
def run_file(tmp_path):
    """Return a run file of two ranks and 120 steps, with its tokens."""
    write_tokens(tmp_path / "tokens")
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


@pytest.fixture
def trial(tmp_path):
    """`trial(event, ...)`: a trial that no job runs, whose log has these events, after a fault of rank 1."""

    def make(*log: dict, settings: str = "") -> Trial:
        path = tmp_path / "run.toml"
        path.write_text(RUN_FILE + settings)
        run = DrilledRun(run_file=path, config=load_run(path), step_seconds=0.01)
        made = Trial(run, tmp_path / "trial", Random(0), Verdicts(), name="RS01")
        made.folder.root.mkdir(exist_ok=True)
        lines = [{"time": 10.0 + number, **event} for number, event in enumerate(log)]
        made.folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
        made.named, made.where = (1,), "a fault"
        made.recoveries.append(Recovery(100.0))
        return made

    return make
