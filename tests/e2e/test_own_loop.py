"""examples/own_loop.py as real processes, alone and under torchrun: killed, resumed, and proven by the commands."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.events import read_events
from ingot.schema import events

from .conftest import RUN_FILE, Project, ended, write_tokens

PROGRAM = Path(__file__).parents[2] / "examples" / "own_loop.py"
STEPS = 60


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("own")
    write_tokens(root / "tokens")
    (root / "run.toml").write_text(RUN_FILE.replace("steps = 120", f"steps = {STEPS}"))
    return Project(root)


def start(lab: Project, out: str, *program: str) -> subprocess.Popen:
    command = [sys.executable, *program, str(PROGRAM), str(lab.run_file), str(lab.root / out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def prove(lab: Project, out: str) -> None:
    """Check the run folder by the commands that read it."""
    assert "finished" in lab.ingot("status", str(lab.root / out))
    lab.ingot("ckpt", "prove", str(lab.root / out))
    lab.ingot("report", str(lab.root / out))
    assert (lab.root / out / "report.html").is_file()


@pytest.mark.nightly
def test_one_process_is_killed_and_resumes_with_the_bits_of_the_command(lab):
    text = lab.run_file.read_text()
    lab.run_file.write_text(text.replace("dp_shard = 2", "dp_shard = 1"))
    try:
        lab.train("alone")
        process = start(lab, "alone-mine")
        lab.wait_for_step("alone-mine", 24, process)
        process.kill()
        process.communicate()
        output = ended(start(lab, "alone-mine"), 0)
    finally:
        lab.run_file.write_text(text)
    assert "continue  after step" in output and "mine      step 60" in output
    assert lab.facts("alone-mine") == lab.facts("alone")
    prove(lab, "alone-mine")


@pytest.mark.slow
def test_a_rank_under_torchrun_is_killed_and_the_program_resumes(lab):
    lab.train("two")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max_restarts", "1")
    process = start(lab, "two-mine", *torchrun)
    lab.wait_for_step("two-mine", 24, process)
    os.kill(lab.rank_pid("two-mine", 1), signal.SIGKILL)
    output = ended(process, 0)
    assert lab.facts("two-mine") == lab.facts("two"), output
    started = list(read_events(lab.folder("two-mine").events, events.RUN_STARTED))
    assert [e["world_size"] for e in started] == [2, 2] and started[1]["from_step"] >= 20
    prove(lab, "two-mine")
