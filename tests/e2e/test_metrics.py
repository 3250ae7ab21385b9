"""The numbers of a run through real `ingot train` processes: one that is killed, and one that loses their folder."""

from pathlib import Path

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.metrics import read_series

from .conftest import RUN_FILE, Project, write_tokens

STEPS = 30
PLANTED = """
import os, shutil, signal, time
from dataclasses import dataclass
from pathlib import Path
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

@dataclass(frozen=True)
class Options:
    kind: str = ""
    root: str = ""

class Fault(StepCallback):
    def __init__(self, run, options):
        self.rank, self.kind, self.root = run.rank, options.kind, Path(options.root)
    def on_update(self, step):
        if step != 12 or self.rank != 1:
            return
        if self.kind == "removed":
            while len(list((self.root / "metrics").glob("*/*/*.rows"))) < 3:  # of two ranks, and of the run
                time.sleep(0.02)
            shutil.rmtree(self.root / "metrics")
        elif not (self.root / "killed").exists():
            (self.root / "killed").touch()
            time.sleep(1.0)  # what is older is on the disk
            os.kill(os.getpid(), signal.SIGKILL)

CALLBACKS.register(CallbackPart(name="fault", make=Fault, settings=Options))
"""


def run_with(root: Path, kind: str) -> Path:
    """Train with a fault at step 12. Returns the run folder."""
    write_tokens(root / "tokens")
    (root / "planted.py").write_text(PLANTED)
    own = (
        f'[callbacks.fault]\nkind = "{kind}"\nroot = "{root / kind}"\n[plugins]\nmodules = ["planted"]\nfolder = "."\n'
    )
    (root / "run.toml").write_text(RUN_FILE.replace("steps = 120", f"steps = {STEPS}") + own)
    Project(root).train(kind)
    return root / kind


def test_a_folder_of_numbers_that_is_removed_costs_the_numbers_alone(tmp_path):
    folder = run_with(tmp_path, "removed")
    lost = list(read_events(folder / "events.jsonl", events.METRICS_LOST))
    assert sorted(event["rank"] for event in lost) == [0, 1] and all(event["ended"] for event in lost)
    assert len(list(read_events(folder / "events.jsonl", events.FINISHED))) == 1
    assert not list(read_events(folder / "events.jsonl", events.FAULT))
    assert not (folder / "metrics").exists()


def test_a_killed_rank_leaves_the_numbers_of_all_but_the_last_second(tmp_path):
    folder = run_with(tmp_path, "killed")
    (fault,) = read_events(folder / "events.jsonl", events.FAULT)
    assert (fault["rank"], fault["failure"]) == (1, "killed")
    before, again = read_series(folder / "metrics", 1, "perf/step_seconds")
    assert (before.valid, before.first.tolist()) == (False, list(range(1, 12)))
    assert (again.valid, again.first.tolist()) == (True, list(range(1, STEPS + 1)))
