"""Alerts in a real Alertmanager (Debian's package prometheus-alertmanager): it has them, and their ends."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from dataclasses import replace
from datetime import datetime

import pytest
from tests.unit.observe.test_channels import record

from ingot.observe.alerts.channels import AlertChannel, channels_of
from ingot.schema.alert_record import CRITICAL, RESOLVED
from ingot.schema.alerting import Alerts, UrlChannel
from ingot.schema.run_folder import RunFolder

from .conftest import run_of

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
CONFIG = "route:\n  receiver: nobody\nreceivers:\n  - name: nobody\n"


@pytest.fixture
def address(tmp_path):
    if not PROGRAM:
        pytest.skip("needs Alertmanager: apt-get install prometheus-alertmanager")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "config.yml").write_text(CONFIG)
    options = [f"--config.file={tmp_path}/config.yml", f"--storage.path={tmp_path}/data", "--cluster.listen-address="]
    with subprocess.Popen([PROGRAM, *options, f"--web.listen-address=127.0.0.1:{port}"]) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def alerts_in(address: str) -> list[dict]:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{address}/api/v2/alerts?active=true", timeout=10) as answer:
                return json.load(answer)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.nightly
def test_an_alert_is_active_until_it_is_resolved(address, monkeypatch, tmp_path):
    monkeypatch.setenv("ALERTMANAGER", address)

    def channel_of(first_line: str) -> AlertChannel:
        folder = RunFolder(tmp_path / first_line)
        folder.root.mkdir()
        folder.events.write_text(first_line)
        (channel,) = channels_of(run_of(Alerts(alertmanager=UrlChannel(url_env="ALERTMANAGER"))), folder, 1)
        return channel

    channel = channel_of("one")
    assert alerts_in(address) == []
    now = time.time()
    first, second = record(1, time=now, began=now - 60), record(2, time=now, began=now - 60)
    channel.send([first, second])
    found = {one["labels"]["subject"]: one for one in alerts_in(address)}
    assert found.keys() == {"rank 1", "rank 2"} and found["rank 1"]["status"]["state"] == "active"
    assert found["rank 1"]["annotations"]["next"] == first.next and found["rank 1"]["labels"]["run"] == "demo"
    channel.send([first, replace(second, state=RESOLVED, time=now)])  # the first one again, as every five minutes
    (left,) = alerts_in(address)
    assert left["labels"]["subject"] == "rank 1"
    assert datetime.fromisoformat(left["endsAt"]).timestamp() > now + 86_400  # its run may be dead by then
    channel.send([replace(first, severity=CRITICAL)])  # the same alert, now critical
    assert [one["labels"]["severity"] for one in alerts_in(address)] == [CRITICAL]
    channel_of("two").send([first])  # of another run with the same name
    assert len(alerts_in(address)) == 2
    channel.send([replace(first, severity=CRITICAL, state=RESOLVED, time=time.time())])
    assert [one["labels"]["severity"] for one in alerts_in(address)] == [first.severity]
