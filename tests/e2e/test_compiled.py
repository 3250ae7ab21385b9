"""A run with compiled blocks: ranks that keep their processes in a partial restart keep what they compiled."""

import os
import shutil
import signal

import pytest

from ingot.events import read_events
from ingot.schema import events

from .conftest import Project, ended, workers_of

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"),
]
_SECONDS = 300  # that the first step of two ranks may take on a busy machine
# Frames that the compiler looked at, and graphs that it made of them, in this process so far.
_COUNTED = """
import os
from torch._dynamo.utils import counters
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

class Counted(StepCallback):
    def __init__(self, run, options):
        self.rank = run.rank

    def on_update(self, step):
        frames, graphs = counters["frames"]["total"], counters["stats"]["unique_graphs"]
        with open(os.environ["COUNTS"], "a") as file:
            file.write(f"{self.rank} {os.getpid()} {step} {frames} {graphs}\\n")

CALLBACKS.register(CallbackPart(name="counted", make=Counted))
"""
_SETTINGS = (
    'train.compile="on"',
    'launch.restart="partial"',
    'plugins.modules=["counted"]',
    'plugins.folder="lab"',
    "callbacks.counted={}",
)


def test_a_rank_that_keeps_its_process_compiles_nothing_again(project: Project):
    lab, counts = project.root / "lab", project.root / "counts"
    lab.mkdir()
    (lab / "counted.py").write_text(_COUNTED)
    options = [word for setting in _SETTINGS for word in ("--set", setting)]
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(project.root / "compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    process = project.start("kept", *options, COUNTS=str(counts), **variables)
    project.wait_for_step("kept", 50, process, _SECONDS)
    before = [project.rank_pid("kept", rank) for rank in (0, 1)]
    os.kill(before[1], signal.SIGKILL)
    ended(process, 0)
    after = [project.rank_pid("kept", rank) for rank in (0, 1)]
    assert before[0] == after[0] and before[1] != after[1]
    assert [e["kept"] for e in read_events(project.folder("kept").events, events.RESTART)] == [1]

    lines = [tuple(map(int, line.split())) for line in counts.read_text().splitlines()]
    kept = [(step, made) for rank, _, step, *made in lines if rank == 0]
    (again,) = (number for number in range(1, len(kept)) if kept[number][0] <= kept[number - 1][0])  # the restart
    assert kept[again - 1][1] == kept[-1][1] and min(kept[-1][1]) > 0, kept
    new = [made for _, pid, _, *made in lines if pid == after[1]]
    assert min(new[-1]) > 0  # a new process compiles: the counts see it

    ended(project.start("undisturbed", *options, COUNTS=os.devnull, **variables), 0)
    assert project.facts("kept") == project.facts("undisturbed")
    assert not workers_of(project.folder("kept"))
