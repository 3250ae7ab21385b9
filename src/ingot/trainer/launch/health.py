"""The health of a launcher's machine while it trains: what is found, what the leader learns, and who is drained.

A thread reads the sources (machine/health), because one of them may be on a mount that does not answer. A finding of
DRAIN or DISCARD costs the machine its place: the ranks save and end, or end at once; then the launcher of the machine
ends, and a spare takes its place. The run folder has the names of the drained machines, so that they do not join again.
"""

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ingot.config import from_dict
from ingot.errors import NodeUnhealthy
from ingot.events import EventLog
from ingot.machine.health.links import read_links
from ingot.machine.health.report import HealthProvider, HealthReport, HealthVerdict, node_name
from ingot.machine.health.rules import HealthFinding, HealthRules
from ingot.machine.health.sources import concerns, open_sources, own_gpus
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json
from ingot.trainer.launch.running import PlannedRestart

SECONDS = 0.2  # between two looks at the sources
_CLOSE_SECONDS = 2.0


class HealthWatch:
    """The findings about this machine, by a thread. It has to be closed.

    sources: default: those that it has, and `own`, the file of reports of the run's ranks.
    """

    def __init__(
        self,
        launch: Launch,
        say: Callable[[str], None],
        sources: Sequence[HealthProvider] | None = None,
        *,
        own: Path | None = None,
    ):
        self.say = say
        self._launch = launch
        site = Path(launch.health_file) if launch.health_file else None
        files = [file for file in (site, own) if file is not None]
        self._sources = open_sources(*files) if sources is None else list(sources)
        self._is_own_machine = sources is None
        self._rules = HealthRules()
        self._links, self._carriers = read_links(), set[str]()
        self._found: queue.SimpleQueue[HealthFinding] = queue.SimpleQueue()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read, name="ingot-health", daemon=True)
        self._thread.start()

    def news(self) -> Iterator[HealthFinding]:
        """Return what was found since the last call, with the consequence that it has by launch.on_bad_health."""
        with contextlib.suppress(queue.Empty):
            while True:
                finding = self._found.get_nowait()
                harmless = self._launch.on_bad_health == "warn" or not self._matters(finding.report)
                yield replace(finding, verdict=HealthVerdict.WARN) if harmless else finding

    def carries(self, interface: str) -> None:
        """Take in that this machine reaches others of the run by an interface; "" if it is not known."""
        self._carriers |= {interface} - {""}

    def _matters(self, report: HealthReport) -> bool:
        """Return whether the ranks depend on what was reported. Without other nodes, they depend on no link.

        A link that is not known: the site's monitor reports one as lost because it matters to the site. The kernel
        reports every link, and a run that does lose its own ends in an error or a hang, which restarts; a drained
        machine without a spare ends the run.
        """
        if not report.kind.startswith("link"):
            return True
        used = self._links.is_used(report.device, self._carriers) if self._launch.nodes > 1 else False
        return report.kind == "link_lost" if used is None else used

    def close(self) -> None:
        """End the thread. One that waits for a source is left to it."""
        self._ends.set()
        self._thread.join(_CLOSE_SECONDS)

    def _read(self) -> None:
        gpus = own_gpus() if self._is_own_machine else None
        while not self._ends.wait(SECONDS):
            reports = [report for source in self._sources for report in _poll(source) if concerns(report, gpus)]
            for finding in self._rules.judge(reports):
                self._found.put(finding)
        for source in self._sources:
            source.close()


def _poll(source: HealthProvider) -> list[HealthReport]:
    try:
        return source.poll()
    except OSError as error:
        words = f"{source.name} cannot be read: {error.strerror or error}"
        return [HealthReport(kind="silent_source", device=source.name, words=words, node=node_name())]


class Sickness:
    """The worst finding about one machine so far."""

    def __init__(self) -> None:
        self.worst: HealthFinding | None = None

    def take(self, finding: HealthFinding) -> None:
        """Take in a finding."""
        if finding.verdict >= HealthVerdict.DRAIN and (self.worst is None or finding.verdict > self.worst.verdict):
            self.worst = finding


def restart_for(faults: Iterable[HealthFinding | None]) -> PlannedRestart | None:
    """Return the restart by which a job goes on without the machines that have these faults; None without any."""
    worst = max(filter(None, faults), key=lambda finding: finding.verdict, default=None)
    if worst is None:
        return None
    save = worst.verdict is HealthVerdict.DRAIN
    return PlannedRestart(f"{worst.report.node or node_name()} is drained: {worst.words}", save, leaves=True)


def record_finding(finding: HealthFinding, record: Callable[..., None], say: Callable[[str], None]) -> None:
    """Write a finding to the event log, and show it."""
    report, node = finding.report, finding.report.node or node_name()
    facts = {"node": node, "device": report.device, "report": report.kind, "code": report.code, "count": report.count}
    record(events.HEALTH, **facts, verdict=finding.verdict.name.lower(), words=finding.words)
    say(f"health    {node}: {finding.words}")


def finding_values(finding: HealthFinding) -> dict[str, Any]:
    """Return a finding as plain values."""
    return {"verdict": int(finding.verdict), "words": finding.words, "report": asdict(finding.report)}


def finding_from(values: Mapping[str, Any]) -> HealthFinding:
    """Return the finding that `finding_values` described."""
    report = from_dict(HealthReport, values["report"])
    return HealthFinding(HealthVerdict(values["verdict"]), report, str(values["words"]))


def unhealthy(finding: HealthFinding, folder: RunFolder) -> NodeUnhealthy:
    """Return the error with which the launcher of a drained machine ends."""
    return _error(finding.report.node or node_name(), finding.words, folder)


def _error(node: str, words: str, folder: RunFolder) -> NodeUnhealthy:
    return NodeUnhealthy(
        "E-NODE-UNHEALTHY",
        f"{node} is drained: {words}",
        rule="a machine with such a fault takes no further part in a run (docs/design/health.md)",
        fix=f"repair or reset it, and remove its line from {folder.drained}; or train on it all the same with "
        '--set launch.on_bad_health=warn, and launch.on_straggler=report if it is "drain"',
        node=node,
        reason=words,
    )


def write_drained(folder: RunFolder, finding: HealthFinding) -> None:
    """Add a machine to the drained ones of the run."""
    write_json(folder.drained, _drained(folder) | {finding.report.node or node_name(): finding.words})


def require_sound(folder: RunFolder, launch: Launch) -> None:
    """Raise NodeUnhealthy if this machine was drained from the run, unless launch.on_bad_health permits it."""
    if launch.on_bad_health == "drain" and (words := _drained(folder).get(node_name())):
        raise _error(node_name(), words, folder)


def _drained(folder: RunFolder) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(folder.drained.read_text())
        if isinstance(found, dict):
            return {str(node): str(words) for node, words in found.items()}
    return {}


def record_alone(folder: RunFolder, finding: HealthFinding, say: Callable[[str], None]) -> None:
    """Record a finding of a job on one machine."""
    with EventLog(folder.events) as log:
        record_finding(finding, log.write, say)
