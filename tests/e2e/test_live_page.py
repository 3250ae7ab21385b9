"""`ingot watch` beside a real `ingot train`: the page and the terminal show its steps as they come, and a page that
hangs and is killed changes no bit of the run, and no step beyond the noise of two undisturbed runs."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from urllib.error import HTTPError

import pytest
from tests.live_page import LivePage
from tests.step_noise import longest_median, machine_is_shared_fairly, step_seconds

from ingot.trainer.checkpoint.manifest import read_manifest

from .conftest import RUN_FILE, Project, ended, write_tokens

pytest.importorskip("starlette", reason="needs the part web: pip install 'ingot[web]'")
STEPS = 300
PACED = """
import time
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

class Paced(StepCallback):
    def on_update(self, step):
        time.sleep(0.04)  # so that the run lasts as long as pages need to open

CALLBACKS.register(CallbackPart(name="paced", make=Paced))
"""
SETTINGS = '\n[callbacks.paced]\n[plugins]\nmodules = ["paced"]\nfolder = "."\n'


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("page")
    write_tokens(root / "tokens")
    (root / "paced.py").write_text(PACED)
    (root / "run.toml").write_text(RUN_FILE.replace("steps = 120", f"steps = {STEPS}") + SETTINGS)
    return Project(root)


@pytest.mark.slow
def test_a_page_that_hangs_and_is_killed_changes_nothing(project: Project):
    pair = [project.folder(name) for name in ("alone", "again")]
    for folder in pair:
        project.train(folder.root.name)
    process, folder = project.start("watched"), project.folder("watched")
    project.wait_for_step("watched", 10, process)
    command = [sys.executable, "-m", "ingot.cli.main", "watch", str(folder.root), "--every", "0.5"]
    terminal = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with LivePage(folder.root) as page:
        with pytest.raises(HTTPError, match="401"):
            page.get("/api/runs", token="wrong")
        messages = page.messages()
        seen = shown_step(messages, 1)
        seen = shown_step(messages, seen + 10)
        (loss,) = [line for line in page.get("/api/chart?key=loss")["lines"] if line["style"] == "raw"]
        assert process.poll() is None, "the run ended before its page was seen"
        page.send(signal.SIGSTOP)
        reached = project.wait_for_step("watched", seen + 40, process)
        page.send(signal.SIGCONT)
        shown_step(messages, reached)
        page.send(signal.SIGKILL)
        page.process.wait()
    assert process.poll() is None, "the run ended before its page was killed"
    with LivePage(folder.root) as page:
        shown_step(page.messages(), reached)
        page.send(signal.SIGINT)
        assert page.process.wait(60) == 0
    assert f"step {STEPS}/{STEPS}" in ended(process, 0)

    facts = project.facts("watched")
    assert len(loss["x"]) >= seen and dict(zip(loss["x"], loss["y"], strict=True)).items() <= {
        (step, own) for step, (own, *_) in facts.items()
    }
    screens, _ = terminal.communicate(timeout=60)
    assert terminal.returncode == 0
    steps = [int(one) for one in re.findall(rf"running  step (\d+) of {STEPS}", screens)]
    assert steps == sorted(steps) and len(set(steps)) >= 3 and f"finished  step {STEPS} of {STEPS}" in screens

    assert facts == project.facts("alone") == project.facts("again")
    tensors = [read_manifest(own.checkpoint(STEPS)).tensors for own in (*pair, folder)]
    assert tensors[0] == tensors[1] == tensors[2]
    if machine_is_shared_fairly():
        own, limit = median(step_seconds(folder)), longest_median([step_seconds(one) for one in pair])
        assert own <= limit, f"a step takes {own:.3f} s beside the page, and up to {limit:.3f} s is noise"


def shown_step(messages: Iterator[dict], least: int) -> int:
    """Return the newest step of the first message that shows at least the step `least`."""
    return next(step for one in messages if (step := one["head"]["step"]) >= least)
