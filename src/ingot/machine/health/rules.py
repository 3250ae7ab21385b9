"""The meaning of health reports: which are ignored, which are worth a warning, and which cost a machine its place.

Sources: NVIDIA's catalog of XIDs (docs.nvidia.com/deploy/xid-errors, "Resolution Bucket"), NVIDIA's notes on GPU memory
errors (XID 48, 63, 64, 92, 94, 95 and row remapping), the manual of mcelog.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ingot.machine.health.report import HealthReport, HealthVerdict

# Corrected errors of one device in a day from which on a warning is due: mcelog's default for a DIMM (10 / 24h).
CORRECTED, CORRECTED_SECONDS = 10, 86_400.0
# A link that is down for longer is lost. A link that flaps comes back in 3 to 7 s with common network cards.
LINK_SECONDS = 10.0
_RECOVERY = 154  # an event whose text names what the GPU needs
# Events that are the program's own, or that the driver has dealt with: the rank that caused them ends anyway.
_PROGRAMS = {8, 13, 31, 32, 37, 38, 43, 45, 60, 65, 66, 67, 68, 69, 70, 71, 72, 80, 82, 83, 84, 85, 86, 87, 88, 89}
# Memory errors that cannot be corrected: double-bit errors, contained and uncontained ones.
_MEMORY = {48, 94, 95, 140, 172}
# A GPU that needs a reset, a new driver, or a repair: a stopped engine or microcontroller (46, 61, 62, 109, 110, 119,
# 120, 143), a row that cannot be remapped (64), NVLink (74, 144 to 150), lost from the bus (79).
_BROKEN = {46, 61, 62, 64, 74, 79, 109, 110, 119, 120, 143, 144, 145, 146, 147, 148, 149, 150}
_VERDICTS = {
    "ecc_scrubbed": HealthVerdict.DRAIN,
    "ecc_uncorrected": HealthVerdict.DISCARD,
    "row_remap_pending": HealthVerdict.WARN,
    "row_remap_failure": HealthVerdict.DRAIN,
    "link_lost": HealthVerdict.DRAIN,
    "temperature": HealthVerdict.WARN,
    "machine_check": HealthVerdict.WARN,
    "wrong_state": HealthVerdict.DISCARD,
    "unfit": HealthVerdict.DRAIN,
    "slow": HealthVerdict.WARN,  # of the monitor; the leader of a job drains what is slow for its ranks
    "silent_source": HealthVerdict.WARN,
}


@dataclass(frozen=True)
class HealthFinding:
    """A report that has a consequence. words: the finding in one line."""

    verdict: HealthVerdict
    report: HealthReport
    words: str


class HealthRules:
    """Judges reports. Each thing is found once, and a rate of corrected errors again when it has doubled.

    clock: seconds that never jump.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._known: set[tuple[str, str, int]] = set()
        self._corrected: dict[str, deque[tuple[float, int]]] = {}
        self._warned_at: dict[str, int] = {}  # device -> corrected errors in a day at the last warning
        self._down: dict[str, tuple[float, HealthReport]] = {}  # device -> since when its link is down

    def judge(self, reports: list[HealthReport]) -> list[HealthFinding]:
        """Take in reports. Returns what has a consequence now, also of earlier ones: a link that stays down."""
        found = [finding for report in reports if (finding := self._judge(report))]
        lost = [device for device, (since, _) in self._down.items() if self._clock() >= since + LINK_SECONDS]
        for device in lost:
            _, report = self._down.pop(device)
            found.append(_finding(HealthVerdict.DRAIN, report, f"the link has been down for {LINK_SECONDS:.0f} s"))
        return found

    def _judge(self, report: HealthReport) -> HealthFinding | None:
        if report.kind == "ecc_corrected":
            return self._rate(report)
        if report.kind == "link_up":
            self._down.pop(report.device, None)
            return None
        if report.kind == "link_down":
            if report.device not in self._down:
                self._down[report.device] = self._clock(), report
            return None
        verdict = xid_verdict(report.code, report.words) if report.kind == "xid" else _VERDICTS[report.kind]
        key = report.kind, report.device, report.code
        if verdict is HealthVerdict.IGNORE or key in self._known:
            return None
        self._known.add(key)
        named = "" if report.kind == "xid" else report.kind.replace("_", " ")
        return _finding(verdict, report, report.words or named)

    def _rate(self, report: HealthReport) -> HealthFinding | None:
        now, recent = self._clock(), self._corrected.setdefault(report.device, deque())
        recent.append((now, report.count))
        while recent[0][0] < now - CORRECTED_SECONDS:
            recent.popleft()
        total, before = sum(count for _, count in recent), self._warned_at.get(report.device, 0)
        if total < CORRECTED:
            self._warned_at.pop(report.device, None)
            return None
        if total < 2 * before:
            return None
        self._warned_at[report.device] = total
        words = f"{total} corrected memory errors within a day (a sound one has fewer than {CORRECTED})"
        return _finding(HealthVerdict.WARN, report, words)


def xid_verdict(code: int, words: str) -> HealthVerdict:
    """Return the consequence of an XID. words: its line, which for XID 154 names what the GPU needs. An unknown number
    is worth a warning: drivers add some."""
    if code == _RECOVERY:
        return HealthVerdict.IGNORE if "(None)" in words.rpartition(" to ")[2] else HealthVerdict.DRAIN
    if code in _MEMORY:
        return HealthVerdict.DISCARD
    if code in _BROKEN:
        return HealthVerdict.DRAIN
    return HealthVerdict.IGNORE if code in _PROGRAMS else HealthVerdict.WARN


def _finding(verdict: HealthVerdict, report: HealthReport, words: str) -> HealthFinding:
    name = f"XID {report.code}" if report.kind == "xid" else ""
    return HealthFinding(verdict, report, ": ".join(filter(None, (report.device, name, words))))
