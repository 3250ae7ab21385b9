"""A model with experts through `ingot train`: what balances them survives a kill and a change of layout."""

import os
import signal

import pytest

from ingot.events import read_events
from ingot.schema import events
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.telemetry.progress import LINE_PATTERN

from .conftest import RUN_FILE, Project, ended, write_tokens

STEPS, EVERY = 40, 10
# The first block is dense; the bias moves far enough in 10 steps to change who is chosen.
MOE = """
[model.moe]
num_experts = 8
top_k = 2
d_expert = 16
shared_experts = 1
first_dense = 1
scores = "sigmoid"
capacity_factor = 1.25
sequence_loss = 0.001
global_loss = 0.01
bias_rate = 0.02

[data]"""
LAYOUTS = {"ep": "dp_shard = 2\nep = 2", "v": 'pp = 2\nschedule = "zb_v"'}


@pytest.fixture(scope="module", params=["ep", pytest.param("v", marks=pytest.mark.nightly)])
def moe_project(request, tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp(f"experts-{request.param}")
    write_tokens(root / "tokens")
    text = RUN_FILE.replace("\n[data]", MOE).replace("steps = 120", f"steps = {STEPS}")
    text = text.replace("every_steps = 20", f"every_steps = {EVERY}")
    text = text.replace("num_layers = 2", "num_layers = 4").replace("dp_shard = 2", LAYOUTS[request.param])
    (root / "run.toml").write_text(text)
    return Project(root)


def loads(project: Project, out: str) -> dict[int, dict]:
    """step -> the event, without its time; the latest where steps were redone."""
    log = read_events(project.folder(out).events, events.EXPERTS)
    return {event["step"]: {name: value for name, value in event.items() if name != "time"} for event in log}


def learned(project: Project, out: str) -> dict[str, str]:
    """Checksums of what the newest checkpoint holds of the balance of experts."""
    manifest = list_checkpoints(project.folder(out).checkpoints)[0].manifest
    assert manifest is not None and manifest.step == STEPS
    names = [name for name in manifest.tensors if name.endswith(("router.bias", "router.load"))]
    return {name: manifest.tensors[name].crc32 for name in names}


@pytest.fixture(scope="module")
def undisturbed(moe_project) -> dict[int, tuple[float, float]]:
    output = moe_project.train("undisturbed")
    found = [match for line in output.splitlines() if (match := LINE_PATTERN.match(line))]
    assert len(found) == STEPS / 2 and all(float(match["max_load"]) >= 1 and match["dropped"] for match in found)
    assert sorted(learned(moe_project, "undisturbed")) == sorted(
        f"model.blocks.{layer}.moe.router.{kind}" for layer in (1, 2, 3) for kind in ("bias", "load")
    )
    return moe_project.facts("undisturbed")


@pytest.mark.slow
def test_every_log_line_has_loads_of_all_layers(moe_project, undisturbed):
    found = loads(moe_project, "undisturbed")
    assert list(found) == list(range(2, STEPS + 1, 2))
    for step, event in found.items():
        assert event["layers"] == [1, 2, 3] and event["steps"] == 2
        assert (event["loads"] is not None) == (step % EVERY == 0)
    for layer in found[STEPS]["loads"]:
        assert sum(layer) == pytest.approx(8, abs=0.01)


@pytest.mark.slow
def test_a_killed_rank_costs_nothing_but_time(moe_project, undisturbed):
    """Losses, norms, loads and biases are the same bits."""
    out = "killed"
    process = moe_project.start(out)
    moe_project.wait_for_step(out, 2 * EVERY + 2, process)
    os.kill(moe_project.rank_pid(out, 1), signal.SIGKILL)
    ended(process, 0)
    resumed = [e["from_step"] for e in read_events(moe_project.folder(out).events, events.RUN_STARTED)]
    assert len(resumed) == 2 and resumed[1] >= 2 * EVERY and resumed[1] % EVERY == 0
    assert moe_project.facts(out) == undisturbed
    assert loads(moe_project, out) == loads(moe_project, "undisturbed")
    assert learned(moe_project, out) == learned(moe_project, "undisturbed")


@pytest.mark.slow
def test_one_rank_goes_on_from_two(moe_project, undisturbed):
    """Sums in another order: 1e-5 relative over 10 steps, if no token sits on an edge between two experts."""
    out = "alone"
    moe_project.train(out, "--until-step", str(EVERY), code=10)
    alone = ("--set", "parallel.dp_shard=1", "--set", "parallel.ep=1", "--set", "parallel.pp=1")
    moe_project.train(out, "--until-step", str(2 * EVERY), *alone, "--set", 'parallel.schedule="1f1b"', code=10)
    facts = moe_project.facts(out)
    assert all(facts[step] == undisturbed[step] for step in range(1, EVERY + 1))
    assert facts[EVERY + 1][0] == pytest.approx(undisturbed[EVERY + 1][0], rel=1e-6)
    for step in range(EVERY + 1, 2 * EVERY + 1):
        assert facts[step][0] == pytest.approx(undisturbed[step][0], rel=1e-3), step
    layouts = [e["layout"] for e in read_events(moe_project.folder(out).events, events.RUN_STARTED)]
    assert layouts[1] == {"dp_shard": 1} != layouts[0]
