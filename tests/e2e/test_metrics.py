"""The numbers of a run through real `ingot train` processes: one that is killed, and one that loses their folder."""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.metric_files import read_lineages
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
        if step == 3 and self.rank == 0:
            (self.root / "measure-layers").touch()
        if step > 12 and step % 2 and self.rank == 1:
            time.sleep(0.2)  # late to the vote of all ranks, before the step of a log line
        if step != 12 or self.rank != 1:
            return
        if self.kind == "removed":
            while len(list((self.root / "metrics").glob("*/*/*.rows"))) < 5:  # of two ranks, and three of the run
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
    write_tokens(root / "tokens", shards=2)
    manifest = json.loads((root / "tokens/manifest.json").read_text())
    manifest["shards"][1]["source"] = "march"
    (root / "tokens/manifest.json").write_text(json.dumps(manifest))
    (root / "planted.py").write_text(PLANTED)
    own = (
        f'[callbacks.fault]\nkind = "{kind}"\nroot = "{root / kind}"\n[plugins]\nmodules = ["planted"]\nfolder = "."\n'
    )
    (root / "run.toml").write_text(RUN_FILE.replace("steps = 120", f"steps = {STEPS}") + own)
    Project(root).train(kind)
    return root / kind


def exposed_more(metrics: Path, axis: str) -> float:
    """Return how much longer rank 0 waits for the exchanges of an axis than rank 1, since that comes late."""
    series = [read_series(metrics, rank, f"perf/{axis}/exposed_seconds")[-1] for rank in (0, 1)]
    more = series[0].mean - series[1].mean
    return float(np.median(more[series[0].last > 14]))


@pytest.mark.slow
def test_a_folder_of_numbers_that_is_removed_costs_the_numbers_alone(tmp_path):
    folder = run_with(tmp_path, "removed")
    lost = list(read_events(folder / "events.jsonl", events.METRICS_LOST))
    assert sorted(event["rank"] for event in lost) == [0, 1] and all(event["ended"] for event in lost)
    assert len(list(read_events(folder / "events.jsonl", events.FINISHED))) == 1
    assert not list(read_events(folder / "events.jsonl", events.FAULT))
    assert not (folder / "metrics").exists()


@pytest.mark.slow
def test_a_killed_rank_leaves_the_numbers_of_all_but_the_last_second(tmp_path):
    folder = run_with(tmp_path, "killed")
    (fault,) = read_events(folder / "events.jsonl", events.FAULT)
    assert (fault["rank"], fault["failure"]) == (1, "killed")
    before, again = read_series(folder / "metrics", 1, "perf/step_seconds")
    assert (before.valid, before.first.tolist()) == (False, list(range(1, 12)))
    assert (again.valid, again.first.tolist()) == (True, list(range(1, STEPS + 1)))
    assert {(one.epoch, one.number) for one in read_lineages(folder / "metrics")} == {(1, 1), (1, 2)}
    # Sources, and layers: the request of step 3 is seen at the next log line.
    metrics = folder / "metrics"
    losses, shares = (
        [read_series(metrics, None, f"data/{name}/{kind}")[-1] for name in ("march", "walk")]
        for kind in ("loss", "share")
    )
    assert all(one.valid and one.last[-1] == STEPS and one.mean.max() < 6 for one in losses)
    assert sum(one.mean[-1] for one in shares) == 1.0
    assert exposed_more(metrics, "world") > 0.05 > exposed_more(metrics, "dp_shard")
    layers = [read_series(metrics, None, f"layers/1/{kind}")[-1] for kind in ("grad_norm", "activation_rms")]
    assert [one.first.tolist() for one in layers] == [[5]] * 2 and all(one.mean[0] > 0 for one in layers)
