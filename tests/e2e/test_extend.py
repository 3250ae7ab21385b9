"""The trainer examples of examples/extend through real `ingot train` processes: killed, resumed, on another layout."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from ingot.events import read_events
from ingot.schema import events
from ingot.theory.rules import recorded_run

from .conftest import RUN_FILE, Project, ended, write_tokens

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
MODULES = ("muon", "inverse_sqrt", "noise_scale", "loss_metric", "squared_relu", "parallel_block")
STEPS = 30
OWN = f"""
[optim]
kind = "muon"
[optim.options]
momentum = 0.9

[schedule]
kind = "inverse_sqrt"
warmup_steps = 5
[schedule.options]
timescale = 25

[callbacks.noise_scale]
[callbacks.best_loss]
patience = 1000

[plugins]
modules = {list(MODULES)}
folder = "lab"
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("lab")
    write_tokens(root / "tokens")
    (root / "lab").mkdir()
    for module in MODULES:
        shutil.copyfile(EXAMPLES / f"{module}.py", root / "lab" / f"{module}.py")
    text = RUN_FILE.replace("steps = 120", f"steps = {STEPS}").replace('"fp32"', '"fp64"')
    text = text.replace("every_steps = 20", "every_steps = 10")
    text = text.replace("d_ffn = 64", 'd_ffn = 64\nfeed_forward = "squared_relu"\nblock = "parallel"')
    (root / "run.toml").write_text(text + OWN)
    return Project(root)


@pytest.fixture(scope="module")
def undisturbed(lab: Project) -> tuple[dict, dict]:
    lab.train("whole")
    return lab.facts("whole"), metrics(lab, "whole")


@pytest.fixture(scope="module")
def half(lab: Project) -> str:
    """A run that ended at step 10, for copies that continue in different ways."""
    lab.train("half", "--until-step", "10", code=10)
    return "half"


def copied(lab: Project, run: str, out: str) -> str:
    shutil.copytree(lab.root / run, lab.root / out, symlinks=True)
    return out


def metrics(lab: Project, out: str) -> dict:
    """(step, callback) -> its metrics, the latest where a step was redone."""
    log = read_events(lab.folder(out).events, events.METRICS)
    return {(e["step"], e["by"]): e["values"] for e in log}


@pytest.mark.slow
def test_a_killed_rank_costs_no_bit_of_optimizer_and_callbacks(lab, undisturbed):
    process = lab.start("killed")
    lab.wait_for_step("killed", 12, process)
    os.kill(lab.rank_pid("killed", 1), signal.SIGKILL)
    ended(process, 0)
    assert len(list(read_events(lab.folder("killed").events, events.RESTART))) == 1
    facts, own = undisturbed
    assert lab.facts("killed") == facts and metrics(lab, "killed") == own
    assert own[STEPS, "best_loss"]["mean_loss"] == pytest.approx(sum(f[0] for f in facts.values()) / STEPS)
    assert own[STEPS, "noise_scale"]["noise_scale_tokens"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["dp_shard=1 tp=2", "dp_shard=2 zero=3"])
def test_another_layout_continues_with_the_same_numbers(lab, undisturbed, half, layout):
    out, (facts, own) = copied(lab, half, layout.replace(" ", "-")), undisturbed
    lab.train(out, *[word for one in layout.split() for word in ("--set", f"parallel.{one}")])
    for step, numbers in facts.items():
        assert lab.facts(out)[step] == pytest.approx(numbers, rel=1e-9), step
    for key, values in own.items():
        assert metrics(lab, out)[key] == pytest.approx(values, rel=1e-7), key


@pytest.mark.slow
def test_changed_code_needs_consent_and_readers_need_no_code(lab, undisturbed, half):
    copied(lab, half, "changed")
    source = lab.root / "lab" / "noise_scale.py"
    text = source.read_text()
    source.write_text(text + "\n# another version\n")
    try:
        refused = lab.train("changed", code=11)
        assert "plugins.code" in refused and "--accept-change plugins.code" in refused
        lab.train("changed", "--accept-change", "plugins.code")
    finally:
        source.write_text(text)
    assert lab.facts("changed") == undisturbed[0]
    shutil.move(lab.root / "lab", lab.root / "away")
    try:
        run = recorded_run(lab.folder("changed").config)
        assert run.plugins.code.keys() == set(MODULES)
        for command in ("status", "report", "ckpt ls", "ckpt prove"):
            lab.ingot(*command.split(), str(lab.root / "changed"))
        assert "no module 'muon'" in lab.ingot("check", str(lab.run_file), code=3)
    finally:
        shutil.move(lab.root / "away", lab.root / "lab")
