"""The channels of alerts, against real servers on loopback: what they send, what they try again, what they show."""

import os
import socket
import time
from datetime import datetime
from email import message_from_string, policy
from pathlib import Path

import pytest
from tests.unit.observe.conftest import HOSTILE, RUN_DIR, START
from tests.unit.observe.servers import http_server, smtp_server

from ingot.observe.alerts import channels
from ingot.observe.alerts.channels import ChannelThread, MailChannel, TerminalChannel, channels_of
from ingot.observe.alerts.posting import SendFailed
from ingot.schema.alert_record import CRITICAL, RESOLVED, AlertRecord
from ingot.schema.alerting import Alerts, EmailChannel, UrlChannel
from ingot.schema.run_folder import RunFolder
from ingot.value_names import printable

from .conftest import run_of

SECRET = "s3cr3t"


def record(number: int = 1, **changes) -> AlertRecord:
    facts = {"id": f"straggler/rank {number}/1", "kind": "straggler", "subject": f"rank {number}", "state": "fired",
             "severity": "warning", "time": START + 5, "began": START, "step": 20, "since": 8, "more": 12,
             "evidence": "rank 1 is slow", "next": f"ingot explain slow {RUN_DIR}"}  # fmt: skip
    return AlertRecord(**(facts | changes))


@pytest.fixture
def channel(monkeypatch):
    """`channel(name, url)`: the channel of a run file, whose address is in the environment."""

    def make(name: str, url: str):
        monkeypatch.setenv("ALERT_URL", url)
        alerts = Alerts(**{name: UrlChannel(url_env="ALERT_URL")})
        (found,) = channels_of(run_of(alerts), RunFolder(Path(RUN_DIR)), 1)
        assert found.name == name
        return found

    return make


def failure_of(channel) -> SendFailed:
    with pytest.raises(SendFailed) as caught:
        channel.send([record()])
    assert SECRET not in caught.value.reason and SECRET not in str(caught.value.__cause__)
    return caught.value


def test_a_webhook_gets_the_records_as_json(channel):
    with http_server(200) as server:
        channel("webhook", f"{server.url}/hook/{SECRET}?key=1").send([record(1), record(2, evidence=HOSTILE)])
    ((path, body, headers),) = server.got
    assert path == f"/hook/{SECRET}?key=1" and headers["Content-Type"] == "application/json"
    assert (body["version"], body["run"], body["folder"]) == (1, "demo", RUN_DIR)
    assert [one["subject"] for one in body["alerts"]] == ["rank 1", "rank 2"]
    assert body["alerts"][1]["evidence"] == HOSTILE and body["alerts"][0]["more"] == 12


def test_slack_gets_text_that_calls_nobody_and_links_nowhere(channel):
    with http_server(200) as server:
        channel("slack", server.url).send([record(evidence="<!channel> <http://x|y> & `z`", next="ingot `x` <y>")])
    text = server.got[0][1]["text"]
    assert "*warning: straggler (rank 1)*" in text and "12 more" in text
    assert "<" not in text and "&lt;!channel&gt;" in text and "`ingot x &lt;y&gt;`" in text


def test_alertmanager_gets_alerts_with_labels_and_their_end(channel):
    with http_server(200) as server:
        url = server.url.replace("127.0.0.1", f"me:{SECRET}@127.0.0.1")
        channel("alertmanager", f"{url}/am/").send([record(1), record(2, state=RESOLVED, began=START + 9)])
    ((path, (fired, resolved), headers),) = server.got
    assert path == "/am/api/v2/alerts" and headers["Authorization"].startswith("Basic ")
    labels = {"alertname": "IngotStraggler", "run": "demo", "severity": "warning", "subject": "rank 1"}
    assert fired["labels"].pop("run_id") == "demo"  # there is no log yet
    assert fired["labels"] == labels and fired["annotations"]["next"] == f"ingot explain slow {RUN_DIR}"
    assert (
        fired["startsAt"] < fired["endsAt"] and resolved["startsAt"] < resolved["endsAt"] == "2026-05-28T20:26:45.000Z"
    )


def test_alertmanager_gets_the_end_of_an_alert_that_is_now_critical(channel):
    with http_server(200) as server:
        own = channel("alertmanager", server.url)
        own.send([record()])
        own.send([record(severity=CRITICAL)])
        own.send([record(severity=CRITICAL)])
        own.send([record(severity=CRITICAL, state=RESOLVED)])
        own.send([record()])
    day = time.time() + 86_400  # nobody may look at a run that died before the next one
    sent = [
        [f"{one['labels']['severity']} {'open' if _seconds(one['endsAt']) > day else 'over'}" for one in body]
        for _, body, _ in server.got
    ]
    wanted = [
        ["warning open"],
        ["warning over", "critical open"],
        ["critical open"],
        ["critical over"],
        ["warning open"],
    ]
    assert sent == wanted


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_a_mail_has_the_alerts_that_wait_in_one_message(monkeypatch):
    monkeypatch.setenv("MAIL_USER", "me")
    monkeypatch.setenv("MAIL_PASSWORD", SECRET)
    monkeypatch.setattr(EmailChannel, "problems", lambda self: [])
    with smtp_server(password=SECRET) as server:
        email = EmailChannel(host="127.0.0.1", port=server.port, security="none", sender="run@example.org",
                             to=("a@example.org", "b@example.org"), user_env="MAIL_USER",
                             password_env="MAIL_PASSWORD")  # fmt: skip
        MailChannel("demo", email).send([record(1, subject=printable(HOSTILE).replace("\n", " ")), record(2)])
        monkeypatch.setenv("MAIL_PASSWORD", f"other-{SECRET}")
        refused = failure_of(MailChannel("demo", email))  # the answer of the server has the password
    (lines,) = server.got
    mail = message_from_string("\r\n".join(lines), policy=policy.default)
    assert mail["Subject"].startswith("[ingot] demo: warning: straggler (<script>") and mail["Subject"].endswith(
        "1 more"
    )
    assert mail["To"] == "a@example.org, b@example.org" and mail["Bcc"] is None
    assert "next: ingot explain slow" in mail.get_content() and SECRET not in "".join(lines)
    assert (refused.reason, refused.again) == ("the account or its password is refused", False)


def test_a_terminal_gets_a_line_per_alert():
    read, write = os.pipe()
    TerminalChannel(write).send([record(), record(state=RESOLVED)])
    os.close(write)
    lines = os.read(read, 1 << 16).decode().splitlines()
    assert len(lines) == 2 and lines[0].endswith(f"next: ingot explain slow {RUN_DIR}")
    assert lines[1] == "alert     resolved: straggler (rank 1): rank 1 is slow; 12 more"
    os.close(read)


@pytest.mark.parametrize(("status", "again"), [(500, True), (429, True), (404, False), (302, False)])
def test_statuses_that_are_no_success(channel, status, again):
    with http_server(status) as server:
        found = failure_of(channel("webhook", f"{server.url}/{SECRET}"))
    assert (found.reason, found.again, len(server.got)) == (f"HTTP {status}", again, 1)  # no redirection is followed


def test_servers_that_do_not_answer(channel, monkeypatch):
    monkeypatch.setattr(channels, "_SECONDS", 0.3)
    with http_server(200, drips=True) as server:
        began = time.monotonic()
        found = failure_of(channel("webhook", f"{server.url}/{SECRET}"))
        assert time.monotonic() - began < 10 and (found.reason, found.again) == ("no answer within 0.3 s", True)
    with socket.create_server(("127.0.0.1", 0)) as listens:  # and accepts nothing
        port = listens.getsockname()[1]
        assert failure_of(channel("slack", f"http://127.0.0.1:{port}/{SECRET}")).again
    assert failure_of(channel("slack", f"http://127.0.0.1:{port}/{SECRET}")).reason == "connection refused"
    with smtp_server(silent=True) as server:
        email = EmailChannel(host="127.0.0.1", port=server.port, sender="a@b", to=("c@d",))
        assert failure_of(MailChannel("demo", email)).reason == "no answer within 0.3 s"
    monkeypatch.setattr(channels, "_SECONDS", 20.0)
    with smtp_server() as server:  # it has no TLS
        email = EmailChannel(host="127.0.0.1", port=server.port, sender="a@b", to=("c@d",))
        assert failure_of(MailChannel("demo", email)).reason == "the server lacks what `security` asks for"


@pytest.mark.parametrize("url", ["", "ftp://x/s3cr3t", "http://[s3cr3t", "s3cr3t", "http://h:s3cr3t/"])
def test_addresses_that_are_none(channel, url):
    found = failure_of(channel("webhook", url))
    assert "ALERT_URL" in found.reason and not found.again


def test_requests_go_through_the_proxy_of_the_environment(channel, monkeypatch):
    with http_server(200) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        channel("slack", "http://hooks.example:8080/a").send([record()])
    assert proxy.got[0][0] == "http://hooks.example:8080/a"


class Threads:
    """The thread of a channel, with what it reported."""

    def __init__(self, channel):
        self.sent, self.failed = [], []
        self.thread = ChannelThread(channel, lambda name, number: self.sent.append(number),
                                    lambda name, reason: self.failed.append((name, reason)))  # fmt: skip

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.thread.put(number, record(number))


def test_a_server_that_fails_at_first_gets_the_alert_and_one_that_stays_broken_is_reported_once(channel, monkeypatch):
    monkeypatch.setattr(channels, "_PAUSES_SECONDS", (0.01, 0.01))
    with http_server(500, 503, 200) as server:
        own = Threads(channel("webhook", server.url))
        own.put(1)
        assert own.thread.finish(20)
    assert (own.sent, own.failed, len(server.got)) == ([1], [], 3)
    with http_server(500, 500, 500, 500, 500, 500, 200, 404) as server:
        own = Threads(channel("webhook", server.url))
        for number in range(1, 5):
            own.put(number)
            wait_for(lambda number=number: own.sent[-1:] == [number])
        assert own.thread.finish(20)
    assert len(server.got) == 8  # three attempts each for two, one for those that have an answer
    assert own.failed == [("webhook", "HTTP 500"), ("webhook", "HTTP 404")]


def test_a_channel_that_hangs_delays_no_other_and_its_queue_is_bounded(channel, monkeypatch):
    monkeypatch.setattr(channels, "_SECONDS", 30.0)
    with http_server(200) as good, http_server(200, drips=True) as bad:
        slow, fast = Threads(channel("webhook", bad.url)), None
        slow.put(0)
        wait_for(lambda: bad.got)
        slow.put(*range(1, 5000))
        assert len(slow.thread._waiting) == 200
        fast = Threads(channel("webhook", good.url))
        fast.put(*range(30))
        assert fast.thread.finish(20) and not slow.thread.finish(0.05)
        assert sum(len(body["alerts"]) for _, body, _ in good.got) == 30 and len(good.got) < 30  # several at once


def test_an_error_in_a_channel_ends_no_thread():
    class Broken(TerminalChannel):
        def send(self, records):
            raise RuntimeError(SECRET)

    own = Threads(Broken(1))
    own.put(1)
    wait_for(lambda: own.sent)
    own.put(2)
    assert own.thread.finish(20) and own.sent == [1, 2] and own.failed == [("terminal", "RuntimeError")]


def test_no_channel_without_a_name():
    assert channels_of(run_of(), RunFolder(RUN_DIR), 1) == []


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
