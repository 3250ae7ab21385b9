"""The section of a report on the parts of a step: what ranks wait for, and their communication by axis of the mesh."""

from collections.abc import Mapping

from ingot.observe.scalars import TRAFFIC, USES, axis_title
from ingot.report.diagnose.device_times import Spread
from ingot.report.diagnose.waits import by_axis, mean_waits
from ingot.report.facts import RunData
from ingot.report.render.page import Bar, Bars, Block, Section, Text
from ingot.units import counted, format_seconds

_LINES = 100  # the newest log lines, whose mean is shown


def step_section(data: RunData) -> Section | None:
    """Return where the time of a step goes, as the mean over the newest log lines; None without a line that has it."""
    newest = sorted(step for step in data.waits if step in data.progress)[-_LINES:]
    lines = {step: data.waits[step]["steps"] for step in newest if data.waits[step]["steps"] > 0}
    seconds = sum(count * data.progress[step]["step_seconds"] for step, count in lines.items())
    step_seconds = seconds / max(sum(lines.values()), 1)
    if step_seconds <= 0:
        return None
    events = {step: data.waits[step] for step in lines}
    found = mean_waits(events, lines)
    uses = {use: found[use] for use in USES if use in found}
    traffic = {part: mean_waits(by_axis(events, part), lines) for part in TRAFFIC}
    blocks = [*_use_blocks(uses, len(lines)), *_traffic_blocks(traffic, step_seconds)]
    return Section("step", "Where the time of a step goes", blocks) if blocks else None


def _use_blocks(uses: Mapping[str, Spread], lines: int) -> list[Block]:
    total = sum(spread.mean for spread in uses.values())
    if total <= 0:
        return []
    rows = [
        Bar(use, spread.mean / total, _cells(spread, total), USES[use])
        for use, spread in uses.items()
        if spread.mean > 0
    ]
    words = f"Seconds per step, mean over ranks and the newest {counted(lines, 'log line')}."
    return [Text(words), Bars(("Use", "Seconds", "Share", "Most"), rows)]


def _traffic_blocks(traffic: Mapping[str, Mapping[str, Spread]], step_seconds: float) -> list[Block]:
    """Return the communication of each axis beside a step: exchanges that ranks wait for, and those that work hides."""
    rows = [
        Bar(f"{axis_title(axis)}, {part}", min(spread.mean / step_seconds, 1.0), _cells(spread, step_seconds))
        for axis in dict.fromkeys(axis for spreads in traffic.values() for axis in spreads)
        for part, spreads in traffic.items()
        if (spread := spreads.get(axis)) is not None and spread.mean > 0
    ]
    if not rows:
        return []
    words = (
        "Communication by axis of the mesh, in shares of a step: exposed, while ranks wait for it, and hidden by work."
    )
    return [Text(words), Bars(("Axis", "Seconds", "Of a step", "Most"), rows)]


def _cells(spread: Spread, whole: float) -> tuple[str, str, str]:
    most = f"{format_seconds(spread.most)} (rank {spread.rank})"
    return format_seconds(spread.mean), f"{spread.mean / whole:.0%}", most
