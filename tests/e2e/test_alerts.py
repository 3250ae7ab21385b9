"""Alerts of real `ingot train` processes: a rank that is killed reaches people, and a healthy run reaches nobody."""

import json
import os
import signal
import time

import pytest
from tests.unit.observe.servers import http_server

from ingot.events import read_events
from ingot.observe.alerts import kinds
from ingot.schema import events
from ingot.schema.alert_record import FIRED, RESOLVED

from .conftest import ended, workers_of
from .test_sinks import sink_processes

CHANNELS = ("--set", "alerts.terminal=true", "--set", "alerts.webhook.url_env=HOOK")
CALM = ("--set", "alerts.communication_most=0", "--set", "launch.straggler_factor=0")  # of two ranks on a busy machine


def received(server) -> list[tuple[str, str]]:
    return [(one["kind"], one["state"]) for _, body, _ in server.got for one in body["alerts"]]


@pytest.mark.slow
def test_a_killed_rank_reaches_people_and_is_over_when_steps_continue(project):
    with http_server(200) as server:
        process = project.start("killed", *CHANNELS, *CALM, HOOK=f"{server.url}/s3cr3t")
        folder, deadline = project.folder("killed"), time.monotonic() + 120
        while not any(event["step"] >= 20 for event in read_events(folder.events, events.CHECKPOINT)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(workers_of(folder)[1], signal.SIGKILL)
        output = ended(process, 0)
    assert received(server) == [(kinds.RANK_LOST, FIRED), (kinds.RANK_LOST, RESOLVED)]
    (_, body, _), *_ = server.got
    assert body["alerts"][0]["next"] == f"ingot status {folder.root}"
    assert output.count("\nalert     critical: rank lost (rank ") == 1
    found = json.loads(project.ingot("alerts", str(folder.root), "--json"))
    again = json.loads(project.ingot("alerts", str(folder.root), "--json", "--replay"))
    for one in (found, again):
        assert [(alert["kind"], alert["over"] is not None) for alert in one["alerts"]] == [(kinds.RANK_LOST, True)]
    kept = b"".join(path.read_bytes() for path in folder.root.rglob("*") if path.is_file())
    assert b"s3cr3t" not in kept and "s3cr3t" not in output


@pytest.mark.slow
def test_alerts_reach_people_although_their_process_was_killed(project):
    with http_server(200) as server:
        process = project.start("unwatched", *CHANNELS, *CALM, HOOK=server.url)
        folder, deadline = project.folder("unwatched"), time.monotonic() + 120
        while not any(event["step"] >= 20 for event in read_events(folder.events, events.CHECKPOINT)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        (alerts,) = sink_processes(folder.root)
        os.kill(alerts, signal.SIGKILL)
        os.kill(workers_of(folder)[1], signal.SIGKILL)
        output = ended(process, 0)
    assert received(server) == [(kinds.RANK_LOST, FIRED), (kinds.RANK_LOST, RESOLVED)]
    assert output.count("alerts    their process was killed") == 1


@pytest.mark.slow
def test_a_healthy_run_reaches_nobody_and_a_channel_that_hangs_ends_no_run(project):
    with http_server(200, drips=True) as server:
        output = project.train("healthy", *CHANNELS, *CALM, HOOK=server.url)
        assert "step 120/120" in output and "\nalert" not in output and server.got == []
        process = project.start("stopped", *CHANNELS, *CALM, "--set", "alerts.budget_usd=0.000001",
                                "--set", "cost.usd_per_hour=1000", HOOK=server.url)  # fmt: skip
        output = ended(process, 0)
        assert "step 120/120" in output and output.count("critical: over budget") == 1
        assert len(server.got) >= 1
