"""The settings `[alerts]` of a run file: the limits of alerts, and the channels by which they reach people.

Secrets are in the environment: a run file has the names of the variables, because it is copied into run folders,
checkpoints and reports. docs/observe/alerts.md has the source of each limit.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from ingot.config import LEFT_OUT_AT_DEFAULT
from ingot.ranges import Budget, Deadline, Factor, Port, PositiveQueue, Seconds, Share

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NO_VARIABLE = "is not the name of an environment variable; put the secret into one, and write its name here"
_ADDRESS = re.compile(r"[^@\s<>]+@[^@\s<>]+")


@dataclass(frozen=True, kw_only=True)
class UrlChannel:
    """A channel that is an address on the web. url_env: the environment variable that has the address; "": no such
    channel."""

    url_env: str = ""

    def problems(self):
        if self.url_env and not _VARIABLE.fullmatch(self.url_env):
            yield "url_env", _NO_VARIABLE  # without the text, which may be the secret


@dataclass(frozen=True, kw_only=True)
class EmailChannel:
    """E-mail by SMTP. host, port: the server; "": no e-mail. security: "starttls", "tls" (from the first byte on), or
    "none", for a server on this machine. sender, to: addresses. user_env, password_env: the environment variables with
    the name and the password of the account; "": the server wants none."""

    host: str = ""
    port: Port = 587
    security: Literal["starttls", "tls", "none"] = "starttls"
    sender: str = ""
    to: tuple[str, ...] = ()
    user_env: str = ""
    password_env: str = ""

    def problems(self):
        for name in ("user_env", "password_env"):
            if getattr(self, name) and not _VARIABLE.fullmatch(getattr(self, name)):
                yield name, _NO_VARIABLE
        if bool(self.user_env) != bool(self.password_env):
            yield "user_env", "and password_env go together: an account has a name and a password"
        if not self.host:
            if self.to or self.sender:
                yield "host", "is missing: name the SMTP server that sends the alerts"
            return
        if not self.to:
            yield "to", "is empty: name the addresses that get alerts"
        for name, addresses in (("sender", (self.sender,)), ("to", self.to)):
            if any(not _ADDRESS.fullmatch(one) for one in addresses):
                yield name, "has a text that is no e-mail address; write name@example.org"
        if self.password_env and self.security == "none":
            yield "security", '"none" would send the password unencrypted; use "starttls" or "tls"'


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """When people are alerted, and how. Without a channel, nothing runs beside training; `ingot alerts RUN` shows what
    would have been reported. A limit of 0 switches its alert off.

    terminal: alerts are lines of the launcher's output.
    mfu_target, mfu_least: the model FLOPs utilization that a run should have, and the one below which people are
      alerted. Not on CPUs.
    communication_most: the share of a step that ranks wait in collectives. On CPUs; on a GPU the host does not wait.
    throughput_least: the part of the planned speed below which people are alerted, also if that is within the error
      band of the plan.
    goodput_least: the share of the time of the last `goodput_seconds` in which steps were trained that count.
    checkpoint_intervals: the newest checkpoint is too old after so many of its intervals.
    silent_seconds: a run without an event for this time is silent; slow log lines, and the start of an attempt, may
      take longer.
    disk_hours: a disk that will be full within this time is filling.
    mix_drift: how far the share of a source may be from its weight.
    budget_usd: what the run may cost; 0: no limit.
    lines: so many log lines in a row beyond a limit are an alert, and so many within it end the alert.
    repeat_seconds: an alert that goes on is sent again after this time. most: so many alerts of one kind are sent in
      this time; further ones are counted.
    """

    terminal: bool = False
    mfu_target: Share = 0.45
    mfu_least: Share = 0.35
    communication_most: Share = 0.3
    throughput_least: Share = 0.75
    goodput_least: Share = 0.9
    goodput_seconds: Deadline = 86_400.0
    checkpoint_intervals: Factor = 3.0
    silent_seconds: Seconds = 600.0
    disk_hours: Factor = 12.0
    mix_drift: Share = 0.05
    budget_usd: Budget = 0.0
    lines: PositiveQueue = 3
    repeat_seconds: Deadline = 14_400.0
    most: PositiveQueue = 4
    webhook: UrlChannel = field(default_factory=UrlChannel, metadata=LEFT_OUT_AT_DEFAULT)
    slack: UrlChannel = field(default_factory=UrlChannel, metadata=LEFT_OUT_AT_DEFAULT)
    alertmanager: UrlChannel = field(default_factory=UrlChannel, metadata=LEFT_OUT_AT_DEFAULT)
    email: EmailChannel = field(default_factory=EmailChannel, metadata=LEFT_OUT_AT_DEFAULT)

    @property
    def has_channel(self) -> bool:
        """True if an alert reaches anybody."""
        urls = (self.webhook.url_env, self.slack.url_env, self.alertmanager.url_env)
        return self.terminal or bool(self.email.host) or any(urls)

    def problems(self):
        if self.mfu_least > self.mfu_target:
            yield "mfu_least", f"is {self.mfu_least:g}, above the target of {self.mfu_target:g} (alerts.mfu_target)"
        if 0 < self.checkpoint_intervals <= 1:
            found = f"is {self.checkpoint_intervals:g}, must be above 1"
            yield "checkpoint_intervals", f"{found}: a checkpoint is one interval old when the next one is due"
