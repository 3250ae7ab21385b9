"""A kernel of a GPU that does not end: the flight recorder of NCCL names the collective that waits for it, and a run of
one rank is found hung, with its stacks, and starts again."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tests.e2e.conftest import RUN_FILE, write_tokens

from ingot.drill.job import RUN_VARIABLE, processes_with
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# In a process of its own: torch reads the size of the recorder once, before the first communicator.
RECORDED = """
import json, time, torch
import torch.distributed as dist
from ingot.trainer.mesh.start import start, stop
from ingot.trainer.resilience.collective_calls import as_json
from ingot.trainer.resilience.reports import calls_of_this_process

device = start("cuda", 60).device

def finished():
    return [call["finished"] for call in as_json(calls_of_this_process())]

values = torch.ones(3, 5, device=device)
dist.all_reduce(values)
torch.cuda.synchronize()
ends = time.monotonic() + 20
while not all(finished()) and time.monotonic() < ends:  # torch's thread looks now and then
    time.sleep(0.05)
before = as_json(calls_of_this_process())
torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
dist.all_reduce(values)
waiting = as_json(calls_of_this_process())
torch.cuda.synchronize()
while not all(finished()) and time.monotonic() < ends:
    time.sleep(0.05)
print(json.dumps([before, waiting, as_json(calls_of_this_process())]))
stop()
"""

# One rank, whose device does not end its work in step 6, once.
PLUGIN = """
import pathlib, torch
import torch.distributed as dist
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

DONE = pathlib.Path(__file__).with_suffix(".done")

class Endless(StepCallback):
    def __init__(self, run, options):
        pass

    def on_gradients(self, step):
        if step == 6 and not DONE.exists():
            DONE.touch()
            torch.cuda._sleep(1 << 44)  # cycles: hours
            dist.all_reduce(torch.ones(7, 3, device="cuda"))
            torch.cuda.synchronize()

CALLBACKS.register(CallbackPart(name="endless", make=Endless))
"""
SETTINGS = (
    'train.device="cuda"',
    'train.compile="off"',
    "train.steps=24",
    "parallel.dp_shard=1",
    "launch.watchdog_seconds=3",
    'plugins.modules=["endless"]',
    "callbacks.endless={}",
)


def test_the_recorder_of_nccl_names_a_collective_that_waits_for_the_device(tmp_path):
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "512"}  # as the launcher sets it (mesh/start.py)
    command = [sys.executable, "-c", RECORDED]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    before, waiting, after = json.loads(ended.stdout.splitlines()[-1])
    first, newest = before[-1], waiting[-1]
    assert (first["operation"], first["sizes"], first["ranks"]) == ("all_reduce", [[3, 5]], [0]) and first["finished"]
    assert newest == first | {"number": first["number"] + 1, "finished": False} and newest["dtype"] == "Float"
    assert after[-1] == newest | {"finished": True}


def test_a_device_that_does_not_end_is_a_hang_with_stacks_and_the_run_ends_whole(tmp_path):
    write_tokens(tmp_path / "tokens")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "endless.py").write_text(PLUGIN)
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "ingot.cli.main", "train", str(tmp_path / "run.toml")]
    folder = RunFolder(tmp_path / "run")
    ended = subprocess.run(
        [*command, "--out", str(folder.root), *options],
        env=os.environ | {RUN_VARIABLE: str(folder.root)},
        capture_output=True,
        text=True,
        timeout=420,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (fault,) = read_events(folder.events, events.FAULT)
    assert (fault["detected_by"], fault["rank"], fault["failure"]) == ("watchdog", 0, "hang")
    assert 3 <= fault["seconds"] < 30
    (stacks,), (hang,) = (list(folder.incidents.rglob(name)) for name in ("rank-0.stacks", "hang.json"))
    assert "endless.py" in stacks.read_text() and "trainer/loop.py" in stacks.read_text()
    state = json.loads(hang.read_text())["state"]["0"]
    assert state["answered"] and state["step"] == 6  # the device keeps neither the lock nor the signal
    waits = [call["sizes"] for call in state["collectives"] if not call["finished"]]
    assert waits == [[[7, 3]]]
    steps = [event["step"] for event in read_events(folder.events, events.STEP)]
    assert steps[-1] == 24
    assert not processes_with(RUN_VARIABLE, folder.root)
