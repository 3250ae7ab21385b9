"""Real `ingot train` with sinks that hang, die and fill a disk: no bit of the run changes, and nothing is left."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from ingot.events import read_events
from ingot.schema import events

from .conftest import RUN_FILE, Project, ended, write_tokens

PLUGIN = """
import os, resource, time
from ingot.plugins.sink import SINKS, Sink, SinkPart

class Hangs(Sink):
    def __init__(self, place, options): pass
    def scalars(self, step, tokens, values): time.sleep(1000)

class Dies(Hangs):
    def scalars(self, step, tokens, values): os.kill(os.getpid(), 9)

class Full(Hangs):
    def __init__(self, place, options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
        self.file = (place.own / "data").open("ab", buffering=0)
    def scalars(self, step, tokens, values): self.file.write(bytes(1 << 12))

class Away(Hangs):
    def __init__(self, place, options):
        self.file, self.calls = (place.own / "losses").open("a", buffering=1), 0
    def scalars(self, step, tokens, values):
        self.calls += 1
        if self.calls < 5: raise ConnectionRefusedError("no server")
        if "train/loss" in values: print(step, repr(values["train/loss"]), file=self.file)

for kind in (Hangs, Dies, Full, Away):
    SINKS.register(SinkPart(name=kind.__name__.lower(), make=kind))
"""
PLUGINS = '\n[plugins]\nmodules = ["bad_sinks"]\n'
BAD = (
    PLUGINS
    + "[sinks.hangs]\nclose_seconds = 0.5\n[sinks.dies]\nclose_seconds = 1\n"
    + "[sinks.full]\nclose_seconds = 1\n[sinks.jsonl]\n[sinks.away]\nclose_seconds = 20\n"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("sinks")
    write_tokens(root / "tokens")
    (root / "bad_sinks.py").write_text(PLUGIN)
    (root / "run.toml").write_text(RUN_FILE.replace("steps = 120", "steps = 60"))
    return Project(root)


@pytest.mark.slow
def test_bad_sinks_cost_the_run_no_bit(project):
    project.train("undisturbed")
    (project.root / "run.toml").write_text(project.run_file.read_text() + BAD)
    output = project.train("disturbed")
    assert project.facts("disturbed") == project.facts("undisturbed")
    folder = project.folder("disturbed")
    failed = {event["sink"]: event["reason"] for event in read_events(folder.events, events.SINK_FAILED)}
    assert failed == {"hangs": "hung", "dies": "ended", "full": "raised", "away": "raised"}
    lines = [line.split()[1] for line in output.splitlines() if line.startswith("sink ")]
    assert sorted(lines) == sorted(failed)
    rows = [json.loads(row) for row in (folder.sinks / "jsonl" / "metrics.jsonl").read_text().splitlines()]
    sent = {name for row in rows for name in row}
    assert {"train/param_norm", "train/update_ratio", "run/goodput"} <= sent
    assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == {
        step: loss for step, (loss, *_) in project.facts("disturbed").items()
    }
    losses = dict(map(str.split, (folder.sinks / "away" / "losses").read_text().splitlines()))
    assert losses == {str(step): repr(loss) for step, (loss, *_) in project.facts("disturbed").items()}
    (away,) = [event for event in read_events(folder.events, events.SINK_CLOSED) if event["sink"] == "away"]
    assert away["left_out"] == 0 and away["finished"]
    assert sink_processes(folder.root) == []


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_sink_and_the_next_one_continues_it(project):
    run_file = RUN_FILE.replace("steps = 120", "steps = 1000") + "[sinks.jsonl]\n"
    (project.root / "run.toml").write_text(run_file)
    process = project.start("killed")
    project.wait_for_step("killed", 100, process)
    folder = project.folder("killed")
    assert len(sink_processes(folder.root)) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 20
    while sink_processes(folder.root):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    until = max(project.facts("killed")) + 40
    ended(project.start("killed", "--until-step", str(until)), 10)
    rows = [json.loads(row) for row in (folder.sinks / "jsonl" / "metrics.jsonl").read_text().splitlines()]
    own = [(row["attempt"], row["step"]) for row in rows if "train/loss" in row]
    # The call that was under way when its process was killed is made again.
    assert len(set(own)) >= len(own) - 1 and {attempt for attempt, _ in own} == {0, 1}
    assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == {
        step: loss for step, (loss, *_) in project.facts("killed").items()
    }


def sink_processes(root: Path) -> list[int]:
    """The living processes of the package that observes, for the run in folder `root`."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                words = Path(f"/proc/{entry.name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.startswith(b"ingot.observe.") for word in words) and str(root).encode() in words:
                found.append(int(entry.name))
    return found
