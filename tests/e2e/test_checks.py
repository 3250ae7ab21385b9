"""Real `ingot train` launchers that check their machines before ranks start, of which one computes wrong."""

import json
import os
import signal
import subprocess
from pathlib import Path
from textwrap import indent

import pytest

from ingot.errors import NodeUnhealthy
from ingot.events import read_events
from ingot.schema import events

from .conftest import Project, ended

# In the process that measures, and in no other one, every product differs from the first.
PLANT = """
import sys
if "ingot.trainer.fleet.measure" in sys.orig_argv:
    import torch
    torch.equal = lambda first, second: False
"""
CHECKED = [word for one in ("check_every=1", "check_seconds=0.2") for word in ("--set", f"launch.{one}")]


def planted(folder: Path, text: str) -> dict[str, str]:
    """Return the environment of a launcher whose Python runs `text` first. folder: for a file with it."""
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def broken(tmp_path) -> dict[str, str]:
    """The environment of a launcher whose machine computes wrong."""
    return planted(tmp_path, PLANT)


@pytest.mark.slow
def test_two_machines_are_measured_and_the_wrong_one_is_named(project, broken):
    """Only reported here: two launchers of a loaded machine may be found slow, too."""
    options = [*CHECKED, "--set", "launch.nodes=2", "--set", "launch.on_bad_health=warn", "--set", "train.steps=20"]
    first = project.start("checked", *options, SLURMD_NODENAME="node-a")
    second = project.start("checked", *options, SLURMD_NODENAME="node-b", **broken)
    outputs = [ended(one, 0) for one in (first, second)]
    assert any("node-b: matmul: " in output for output in outputs)
    log = project.folder("checked").events
    (check,) = read_events(log, events.FLEET_CHECK)
    wrong = {one["node"]: one["wrong"] for one in check["fleet"]}
    assert wrong["node-b"]["matmul"] > 0 and wrong["node-a"] == {"matmul": 0, "memory": 0, "disk": 0}
    assert [link["rate"] > 0 for link in check["links"]] == [True]
    assert all(rate > 0 for one in check["fleet"] for rate in one["rates"].values())
    (start,) = read_events(log, events.START_TIMES)
    assert 0 < start["seconds"]["check"] <= check["seconds"] + 1.0
    status = json.loads(project.ingot("status", str(project.folder("checked").root), "--json"))
    assert status["fleet_check"]["unfit"] == check["unfit"]


@pytest.mark.slow
def test_a_machine_that_computes_wrong_starts_no_rank(project, broken):
    output = ended(project.start("wrong", *CHECKED, **broken), NodeUnhealthy.exit_code)
    assert "E-NODES-UNFIT" in output and "matmul" in output
    assert not list(read_events(project.folder("wrong").events, events.RANK_STARTED))


@pytest.mark.slow
def test_machines_are_checked_after_every_second_restart(project, tmp_path):
    """The machine computes wrong after the first check: the first restart trains on it all the same."""
    wrong = tmp_path / "wrong"
    found = planted(tmp_path, f"import os\nif os.path.exists({str(wrong)!r}):\n{indent(PLANT, '    ')}")
    settings = ("check_every=2", "check_seconds=0.2", "max_restarts=3")
    options = [word for one in settings for word in ("--set", f"launch.{one}")]
    process = project.start("second", *options, "--set", "train.steps=2000", **found)
    _kill_rank_after(project, process, 20)
    wrong.touch()
    _kill_rank_after(project, process, 100)
    output = ended(process, NodeUnhealthy.exit_code)
    assert "E-NODES-UNFIT" in output and "matmul" in output
    kinds = (events.FLEET_CHECK, events.RUN_STARTED, events.RESTART)
    check, started, restart = kinds
    log = [event["kind"] for event in read_events(project.folder("second").events, *kinds)]
    assert log == [check, started, restart, started, restart, check]


def _kill_rank_after(project: Project, process: subprocess.Popen, step: int) -> None:
    project.wait_for_step("second", step, process)
    os.kill(project.rank_pid("second", 0), signal.SIGKILL)
