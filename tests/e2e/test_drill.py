"""`ingot drill` on a small run: green on a sound one, red if a resume loses samples, and nothing outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.e2e.conftest import RUN_FILE, Project, write_tokens

from ingot.drill.job import RUN_VARIABLE, gone_within, processes_with, send

pytestmark = pytest.mark.slow
# A run that continues reads other samples than one that was never interrupted.
LOSSY = """
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

class Lossy(StepCallback):
    def __init__(self, run, options):
        from ingot.trainer.loader.loader import Loader  # a launcher, which imports this module too, needs no torch

        original = Loader.__init__

        def init(self, *args, **settings):
            if settings.get("first_step", 1) > 1:
                settings["seed"] += 1
            original(self, *args, **settings)

        Loader.__init__ = init

CALLBACKS.register(CallbackPart(name="lossy", make=Lossy))
"""


def new_project(root: Path) -> Project:
    write_tokens(root / "tokens")
    (root / "run.toml").write_text(RUN_FILE)
    return Project(root)


@pytest.fixture
def project(tmp_path) -> Project:
    """Return a project that the test may change."""
    return new_project(tmp_path)


def start(project, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ingot.cli.main", "drill", str(project.run_file), "--steps", "40", *options]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def drilled(project, *options: str, code: int) -> dict:
    process = start(project, "--json", *options)
    output, errors = process.communicate()
    assert process.returncode == code, output + errors
    return json.loads(output)


@pytest.fixture(scope="module")
def drill(tmp_path_factory) -> dict:
    """Return the result of one drill with the rows of several tests: each drill trains two runs to compare with."""
    project = new_project(tmp_path_factory.mktemp("drill"))
    result = drilled(project, "--rows", "RS01+,RS03,RS08,RS10,RS28 user,RS07,RS23 together", code=0)
    folder = project.root / "runs" / "tiny-drill"
    assert result["folder"] == str(folder) and json.loads((folder / "drill.json").read_text()) == result
    left = [path.name for path in folder.iterdir() if not path.name.startswith(("reference.", "probe.", "guarded."))]
    assert sorted(left) == ["drill.json", "drill.lock", "run.toml"]
    assert not (project.root / "runs" / "tiny").exists()
    return result


def lines(drill: dict, *rows: str) -> list[dict]:
    """Return the lines of these rows, all of which have recovered."""
    found = [line for line in drill["rows"] if line["id"].split()[0] in rows]
    assert all(line["passed"] and line["o1"] and line["o2"] and line["o3"] and line["o7"] for line in found)
    return found


@pytest.mark.row("RS01", "RS03", "RS08", "RS10", "RS28")
def test_a_run_recovers_from_each_fault_bit_for_bit(drill):
    found = lines(drill, "RS01", "RS03", "RS08", "RS10", "RS28")
    assert [line["id"] for line in found] == [
        "RS01",
        "RS01 server",
        "RS01 partial",
        "RS03",
        "RS08",
        "RS10",
        "RS28 user",
    ]
    killed, _, _, hung, _, damaged, stopped = found
    assert hung["detected_by"] == "watchdog" and "SIGSTOP" in hung["cause"]
    assert killed["detected_by"] == "supervisor" and "SIGKILL" in killed["cause"] and killed["recover_s"] > 0
    assert damaged["redone_steps"] > 0 and stopped["redone_steps"] == 0


@pytest.mark.row("RS07 memory", "RS07 node")
def test_a_lost_rank_and_a_lost_node_are_restored_from_memory(drill):
    memory, node = lines(drill, "RS07")
    assert (memory["id"], node["id"]) == ("RS07 memory", "RS07 node") and "lost" in node["cause"]


@pytest.mark.nightly
@pytest.mark.row("RS01 partial", "RS04", "RS05", "RS33", "RS35", "RS36")
def test_programs_and_machines_fail_and_recover(project):
    result = drilled(project, "--rows", "RS01 partial,RS04+,RS05,RS33,RS35,RS36+", code=0)
    found = {line["id"]: line for line in lines(result, "RS01", "RS04", "RS05", "RS33", "RS35", "RS36")}
    assert {name: line["detected_by"] for name, line in found.items()} == {
        "RS01 partial": "supervisor",
        "RS04": "watchdog",
        "RS04 wait": "watchdog",
        "RS05": found["RS05"]["detected_by"],  # the watchdog, or a rank that Gloo aborts
        "RS33": "supervisor",
        "RS35": "the watch for slow ranks",
        "RS36": "the health watch",
        "RS36 memory": "the health watch",
        "RS36 warning": "the health watch",
    }
    quiet = {name for name, line in found.items() if not line["redone_steps"]}
    assert {"RS35", "RS36", "RS36 warning"} <= quiet


def test_a_resume_with_other_samples_is_red(project):
    (project.root / "lossy.py").write_text(LOSSY)
    with project.run_file.open("a") as file:
        file.write('\n[plugins]\nmodules = ["lossy"]\n\n[callbacks.lossy]\n')
    result = drilled(project, "--rows", "RS08 launcher", code=1)
    (line,) = result["rows"]
    assert result["red"] == ["RS08 launcher"] and line["o1"] is False and line["o2"] is False
    assert any("not those of the undisturbed run" in finding for finding in line["wrong"])
    assert (project.root / "runs" / "tiny-drill" / "RS08-launcher" / "events.jsonl").exists()
    assert line["evidence"].endswith("RS08-launcher")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_nothing_outlives_a_drill(project, number, code):
    process = start(project, "--smoke", "--set", "train.steps=9000", "--steps", "9000")  # it would go on for minutes
    job = project.root / "runs" / "tiny-drill" / "reference"
    deadline = time.monotonic() + 60
    while len(processes_with(RUN_VARIABLE, job)) < 4 and time.monotonic() < deadline:  # launcher, fork server, ranks
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(30) == code
    left = gone_within(10, lambda: processes_with(RUN_VARIABLE, job))
    send(signal.SIGKILL, left)
    assert left == []


@pytest.mark.nightly
def test_a_soak_of_random_faults(project):
    result = drilled(project, "--soak", "20s", "--every", "2s", "--seed", "3", code=0)
    (line,) = result["rows"]
    assert line["passed"] and line["rounds"] >= 1 and sum(line["faults"].values()) >= 1
    assert 0 < line["useful_share"] < 1


def test_a_document_a_rate_and_a_bit_in_one_run_cost_the_recorded_steps_alone(drill):
    (line,) = lines(drill, "RS23")
    assert line["directed"]
    (skipped,) = line["skipped_steps"]
    first, last = map(int, skipped.split("-"))
    assert last == first + 2 and line["redone_steps"] >= 2 * 3
    assert line["detect_s"] is not None and line["detected_by"] == "the hashes of the state"
