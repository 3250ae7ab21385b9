"""The section of a report on time and money: what the run took, where its hours went, and what is to come."""

from statistics import median

from ingot.report.facts import RunData
from ingot.report.readable import is_finite
from ingot.report.render.page import Block, LabeledValues, Section, Text
from ingot.units import format_count, format_seconds, format_usd


def cost_section(data: RunData) -> Section | None:
    """Return what the run took and costs; None before the first log line."""
    rows = cost_rows(data)
    if not rows:
        return None
    blocks: list[Block] = [LabeledValues(rows)]
    if not (data.run and data.run.cost.usd_per_hour):
        blocks.append(Text("No price is known: set cost.usd_per_hour, the dollars per hour of one device."))
    return Section("cost", "Time and money", blocks)


def cost_rows(data: RunData) -> list[tuple[str, str]]:
    """Return (label, figure) of the time and money of a run."""
    if (newest := data.newest_line) is None:  # the time and money of steps that are void now were spent, too
        return []
    valid = data.progress[max(data.progress)] if data.progress else {}
    starts, tokens, spent = len(data.starts), valid.get("tokens", 0), newest.get("cost_usd")
    is_ahead = is_finite(valid.get("eta_seconds")) and valid["eta_seconds"] > 0 and not data.finished
    rows = [("Tokens trained on", format_count(tokens))]
    if data.active_seconds:
        attempts = f", {starts} attempts" if starts > 1 else ""
        rows.append(("Time in attempts", format_seconds(data.active_seconds) + attempts))
    if data.starts and (whole := newest["time"] - data.starts[0]["time"]) > data.active_seconds > 0:
        rows.append(("Time since the first start", format_seconds(whole)))
    stalls = sum(event["stall_seconds"] for event in (*data.checkpoints, *data.weights_saves))
    if data.active_seconds and data.checkpoints:
        rows.append(("Pauses for saves", f"{format_seconds(stalls)}, {stalls / data.active_seconds:.1%} of the time"))
    if redone := sum(fault.redone_steps or 0 for fault in data.faults):
        typical = median(event["step_seconds"] for event in (*data.progress.values(), newest))
        rows.append(("Steps trained again", f"{redone:,}, about {format_seconds(redone * typical)}"))
    if is_finite(spent):
        rows.append(("Cost so far", format_usd(spent)))
        if tokens:
            rows.append(("Cost of a billion tokens", format_usd(spent / tokens * 1e9)))
        if is_ahead and data.active_seconds:
            rows.append(("Cost to come", format_usd(spent / data.active_seconds * valid["eta_seconds"])))
    if is_ahead:
        rows.append(("Time to come", format_seconds(valid["eta_seconds"])))
    if data.plan and data.plan.usd:
        rows.append(("Cost by the plan", format_usd(data.plan.usd)))
    if data.plan and data.plan.total_seconds:
        rows.append(("Time of the steps by the plan", format_seconds(data.plan.total_seconds)))
    return rows
