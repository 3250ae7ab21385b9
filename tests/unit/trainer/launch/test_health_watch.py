"""Findings about a machine while it trains: which of them cost it its place."""

import time
from contextlib import closing

import pytest

from ingot.machine.health import rules
from ingot.machine.health.links import NetworkLinks
from ingot.machine.health.report import HealthReport, HealthVerdict
from ingot.schema.launch import Launch
from ingot.trainer.launch import health


class Source:
    """Reports that come once."""

    name = "planted"

    def __init__(self, *reports: HealthReport):
        self._reports = list(reports)

    def poll(self) -> list[HealthReport]:
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None: ...


@pytest.mark.parametrize("nodes", [1, 2])
def test_only_a_link_that_the_run_uses_drains_its_machine(monkeypatch, nodes):
    """One that is not known: if the site's monitor reports it as lost, not if only the kernel does."""
    links = NetworkLinks(interfaces={"eth0": "", "eth5": ""}, adapters={}, uppers={})
    monkeypatch.setattr(health, "read_links", lambda: links)
    monkeypatch.setattr(rules, "LINK_SECONDS", 0.0)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    reports = [HealthReport(kind="link_lost", device=device) for device in ("eth0", "eth5", "uplink")]
    reports += [HealthReport(kind="link_down", device=f"network {name}") for name in ("eth0", "eth5", "hca9 port 1")]
    found: list = []
    watch = health.HealthWatch(Launch(nodes=nodes), lambda line: None, [Source(*reports)])
    with closing(watch):
        watch.carries("eth0")
        while len(found) < len(reports):
            found += watch.news()
            time.sleep(0.01)
    drained = {one.report.device for one in found if one.verdict is HealthVerdict.DRAIN}
    assert drained == ({"eth0", "uplink", "network eth0"} if nodes > 1 else set())
