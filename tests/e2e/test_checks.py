"""Real `ingot train` launchers that check their machines before ranks start, of which one computes wrong."""

import json
import os

import pytest

from ingot.errors import NodeUnhealthy
from ingot.events import read_events
from ingot.schema import events

from .conftest import ended

# In the process that measures, and in no other one, every product differs from the first.
PLANT = """
import sys
if "ingot.trainer.fleet.measure" in sys.orig_argv:
    import torch
    torch.equal = lambda first, second: False
"""
CHECKED = [word for one in ("check_every=1", "check_seconds=0.2") for word in ("--set", f"launch.{one}")]


@pytest.fixture
def broken(tmp_path) -> dict[str, str]:
    """The environment of a launcher whose machine computes wrong."""
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


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
