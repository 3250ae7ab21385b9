"""The channels of alerts, each with a thread of its own: one that hangs or fails delays no other, and no rule."""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

from ingot.observe.alerts.posting import SendFailed, post_json, send_mail
from ingot.observe.alerts.words import as_alertmanager, as_json, as_slack, headline, line_of, message_of
from ingot.observe.run_id import run_id_of
from ingot.schema.alert_record import FIRED, RESOLVED, AlertRecord, Severity
from ingot.schema.alerting import EmailChannel, UrlChannel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder

_SECONDS = 10.0  # of one attempt
_PAUSES_SECONDS = (1.0, 4.0)  # before the second attempt, and the third and last
_MOST_WAITING, _MOST_AT_ONCE = 200, 20  # records of a channel; of one message
ALERTMANAGER_SECONDS = 300.0  # between two messages about the same open alert
# The end of an alert whose own end never comes, as of a run that died: nobody resolves what nobody has looked at.
_ALERTMANAGER_UNTIL_SECONDS = 7 * 86_400.0


class AlertChannel(ABC):
    """A way to reach people. `name` is that of its section in the run file."""

    name: str

    @abstractmethod
    def send(self, records: Sequence[AlertRecord]) -> None:
        """Send some records as one message. Raises SendFailed."""


class TerminalChannel(AlertChannel):
    """Lines of the launcher's output. out: a file descriptor."""

    name = "terminal"

    def __init__(self, out: int):
        self._out = out

    def send(self, records: Sequence[AlertRecord]) -> None:
        for record in records:
            try:
                os.write(self._out, f"{line_of(record)}\n".encode())  # at once: ranks write to the same terminal
            except OSError:
                raise SendFailed("nobody reads it", again=False) from None


class WebhookChannel(AlertChannel):
    """JSON to a program of one's own."""

    name = "webhook"

    def __init__(self, run: str, folder: RunFolder, channel: UrlChannel):
        self._run, self._folder, self._variable = run, folder, channel.url_env

    def send(self, records: Sequence[AlertRecord]) -> None:
        post_json(self._variable, as_json(self._run, self._folder, records), _SECONDS)


class SlackChannel(AlertChannel):
    """An incoming webhook of Slack, or of what takes the same JSON."""

    name = "slack"

    def __init__(self, run: str, channel: UrlChannel):
        self._run, self._variable = run, channel.url_env

    def send(self, records: Sequence[AlertRecord]) -> None:
        post_json(self._variable, as_slack(self._run, records), _SECONDS)


class AlertmanagerChannel(AlertChannel):
    """The API of Prometheus' Alertmanager, which has its own rules about whom to reach."""

    name = "alertmanager"

    def __init__(self, run: RunConfig, folder: RunFolder, channel: UrlChannel):
        self._config, self._folder, self._variable = run, folder, channel.url_env
        self._severities: dict[str, Severity] = {}  # of open alerts, by id: it is a part of their identity there

    def send(self, records: Sequence[AlertRecord]) -> None:
        newest = {record.id: record for record in records}  # it keeps one state of an alert
        sent = []
        for record in newest.values():
            before = self._severities.get(record.id, record.severity)
            if before != record.severity:
                sent.append(replace(record, severity=before, state=RESOLVED))
            sent.append(record)
        until = time.time() + _ALERTMANAGER_UNTIL_SECONDS
        body = as_alertmanager(self._config.name, self._run_id(), sent, until)
        post_json(self._variable, body, _SECONDS, path="/api/v2/alerts")
        for record in newest.values():
            self._severities.pop(record.id, None)
            if record.state == FIRED:
                self._severities[record.id] = record.severity

    def _run_id(self) -> str:
        try:
            return run_id_of(self._folder, self._config)
        except OSError:
            return self._config.name


class MailChannel(AlertChannel):
    """E-mail, one message for the alerts that wait."""

    name = "email"

    def __init__(self, run: str, email: EmailChannel):
        self._run, self._email = run, email

    def send(self, records: Sequence[AlertRecord]) -> None:
        message = EmailMessage()
        more = f" and {len(records) - 1} more" if len(records) > 1 else ""
        message["Subject"] = f"[ingot] {self._run}: {headline(records[0])}{more}"
        message["From"], message["To"] = self._email.sender, ", ".join(self._email.to)
        message["Date"], message["Message-ID"] = formatdate(), make_msgid(domain="ingot.invalid")
        message.set_content(message_of(self._run, records))
        send_mail(self._email, message, _SECONDS)


def channels_of(run: RunConfig, folder: RunFolder, out: int) -> list[AlertChannel]:
    """Return the channels that a run file names. out: the file descriptor of the terminal's lines."""
    alerts, found = run.alerts, []
    if alerts.terminal:
        found.append(TerminalChannel(out))
    if alerts.webhook.url_env:
        found.append(WebhookChannel(run.name, folder, alerts.webhook))
    if alerts.slack.url_env:
        found.append(SlackChannel(run.name, alerts.slack))
    if alerts.alertmanager.url_env:
        found.append(AlertmanagerChannel(run, folder, alerts.alertmanager))
    if alerts.email.host:
        found.append(MailChannel(run.name, alerts.email))
    return found


class ChannelThread:
    """The thread that sends what a channel has to send.

    sent: called with the channel's name and the number of the last record that was sent or given up. failed: called
    once, with the reason, when the channel begins to fail. When it works again, the next failure is reported again.
    """

    def __init__(self, channel: AlertChannel, sent: Callable[[str, int], None], failed: Callable[[str, str], None]):
        self.channel, self._sent, self._failed = channel, sent, failed
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, AlertRecord]] = deque()
        self._busy = self._ends = self._fails = False
        self._thread = threading.Thread(target=self._run, name=f"alerts-{channel.name}", daemon=True)
        self._thread.start()

    def put(self, number: int, record: AlertRecord) -> None:
        """Add a record. Does not wait; if too many wait, the oldest is given up."""
        with self._changed:
            self._waiting.append((number, record))
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
            self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        """Wait until everything is sent or given up, at most `seconds`. Returns whether it is."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    return
                number = min(len(self._waiting), _MOST_AT_ONCE)
                batch = [self._waiting.popleft() for _ in range(number)]
                self._busy = True
            self._send([record for _, record in batch])
            self._sent(self.channel.name, batch[-1][0])
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _send(self, records: Sequence[AlertRecord]) -> None:
        for pause in (*_PAUSES_SECONDS, None):
            try:
                self.channel.send(records)
                self._fails = False
                return
            except SendFailed as error:
                reason, again = error.reason, error.again
            except Exception as error:  # a channel may not end the others
                reason, again = type(error).__name__, False
            if pause is None or not again:
                break
            time.sleep(pause)
        if not self._fails:
            self._failed(self.channel.name, reason)
        self._fails = True
