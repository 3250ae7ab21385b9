"""The process that keeps sinks, with sinks that hang, die, raise and refuse; and its end with its supervisor."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.events import read_events
from ingot.machine.processes import identity_of, is_gone
from ingot.observe.sink_state import read_sink_state
from ingot.schema import events

from .planted import PlantedRun, eventually, planted

BAD = """
class Hangs(Own):
    def scalars(self, step, tokens, values):
        if step == 2 and "train/loss" in values: time.sleep(1000)

class Dies(Own):
    def scalars(self, step, tokens, values):
        if step == 2 and "train/loss" in values: os.kill(os.getpid(), 9)

class Raises(Own):
    def scalars(self, step, tokens, values): raise OSError(28, "No space left on device")

class Refuses(Own):
    def open(self, run_id, attempt, config): raise ConnectionError("no server")

for kind in (Hangs, Dies, Raises, Refuses):
    SINKS.register(SinkPart(name=kind.__name__.lower(), make=kind))
"""
TABLES = (
    "[sinks.jsonl]\n[sinks.hangs]\ntimeout_seconds = 1\n[sinks.dies]\n[sinks.raises]\nclose_seconds = 1\n"
    "[sinks.refuses]\n"
)


def start(root: Path) -> subprocess.Popen:
    code = f"from ingot.observe import feed; feed._PAUSE_SECONDS = 0.05; feed.main({str(root)!r})"
    command = [sys.executable, "-P", "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_bad_sinks_cost_their_own_data_and_are_reported_once(tmp_path):
    """A call that hangs, or ends its process, is tried three times, and one that raises as long as the run goes on."""
    folder = planted(tmp_path, TABLES, BAD)
    log = PlantedRun(folder)
    log.start()
    for step in (1, 2, 3):
        log.line(step)
    feed = start(folder.root)
    for name, fact in {"jsonl": 21, "hangs": 20, "dies": 20}.items():
        eventually(lambda name=name, fact=fact: read_sink_state(folder.sinks / f"{name}.json").sent >= fact)
    output, _ = feed.communicate("end\n", timeout=60)
    failed = {event["sink"]: event["reason"] for event in read_events(folder.events, events.SINK_FAILED)}
    assert failed == {"hangs": "hung", "dies": "ended", "raises": "raised", "refuses": "refused"}
    assert sorted(line.split()[1] for line in output.splitlines()) == sorted(failed)
    closed = {event["sink"]: event for event in read_events(folder.events, events.SINK_CLOSED)}
    assert closed.keys() == failed.keys()
    for name in ("hangs", "dies"):  # the call at step 2 is lost, and nothing else
        assert (closed[name]["left_out"], closed[name]["starts"], closed[name]["finished"]) == (1, 4, True)
    assert closed["raises"]["left_out"] == 0 and closed["refuses"]["sent"] == 0
    assert not closed["raises"]["finished"] and not closed["refuses"]["finished"]
    rows = [json.loads(row) for row in (folder.sinks / "jsonl" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_run_that_ended_at_once_is_sent(tmp_path):
    folder = planted(tmp_path, "[sinks.jsonl]\nclose_seconds = 60\n")
    log = PlantedRun(folder)
    log.start()
    log.line(1)
    assert start(folder.root).communicate("end\n", timeout=90)[0] == ""
    assert len((folder.sinks / "jsonl" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_close_may_take_longer_than_a_call_and_has_the_time_that_is_left(tmp_path):
    own = """
class Slow(Own):
    def event(self, kind, step, facts):
        if kind == "finished": time.sleep(0.5)
    def close(self, deadline):
        (self.place.own / "deadline").write_text(str(deadline))
        time.sleep(3)

SINKS.register(SinkPart(name="slow", make=Slow))
"""
    folder = planted(tmp_path, "[sinks.slow]\ntimeout_seconds = 1\nclose_seconds = 60\n", own)
    log = PlantedRun(folder)
    log.start()
    feed = start(folder.root)
    eventually(lambda: read_sink_state(folder.sinks / "slow.json").sent == 3)
    log.write(events.FINISHED, step=1, seconds=1.0)
    assert feed.communicate("end\n", timeout=90)[0] == ""
    assert 0 < float((folder.sinks / "slow" / "deadline").read_text()) < 60


def test_nothing_is_left_after_the_supervisor_is_killed(tmp_path):
    own = "SINKS.register(SinkPart(name='own', make=Own))\n"
    folder = planted(tmp_path, "[sinks.own]\n", own)
    PlantedRun(folder).start()
    feeding = [sys.executable, "-P", "-m", "ingot.observe.feed", str(folder.root)]
    code = f"import subprocess, time; subprocess.Popen({feeding}, stdin=subprocess.PIPE); time.sleep(1000)"
    supervisor = subprocess.Popen([sys.executable, "-c", code])
    eventually(lambda: read_sink_state(folder.sinks / "own.json").sent == 3)
    (feed,) = children(supervisor.pid)
    (sink,) = children(feed)
    processes = [identity_of(pid) for pid in (feed, sink)]
    os.kill(feed, signal.SIGSTOP)  # so that it cannot see the end itself
    supervisor.kill()
    supervisor.wait()
    eventually(lambda: all(map(is_gone, processes)))


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
