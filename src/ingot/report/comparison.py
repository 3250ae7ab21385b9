"""Predicted against measured: the plan that was made before the run, and what the run then took."""

from statistics import median

from ingot.report.facts import Facts, is_finite
from ingot.report.render.charts import settled
from ingot.report.render.page import Block, Section, Table, Text
from ingot.units import format_bytes, format_seconds


def comparison_section(facts: Facts) -> Section | None:
    """Table of predicted and measured quantities; only those that both sides have."""
    plan = facts.plan
    if plan is None:
        return None
    rows = comparison_rows(facts)
    blocks: list[Block] = []
    if rows:
        shown = [(name, show(p), show(m), f"{m / p:.2f}" if p else "") for name, p, m, show in rows]
        blocks.append(
            Text(
                "The plan was written before training. Step time is the median after each attempt's first log line; "
                "memory is the peak of rank 0. Training time holds evaluation, checkpoints and repeated steps, but not "
                "the start of processes."
            )
        )
        header = ("Quantity", "Predicted", "Measured", "Ratio")
        blocks.append(Table(header, shown, right=(1, 2, 3)))
    total = max(plan.total_memory_bytes, 1)
    parts = sorted(plan.memory_bytes.items(), key=lambda part: -part[1])
    bill = [(name, format_bytes(size), f"{size / total:.0%}") for name, size in parts]
    bill.append(("all", format_bytes(plan.total_memory_bytes), ""))
    caption = "Predicted memory of a rank, by kind"
    blocks.append(Table(("Kind", "Size", "Share"), bill, right=(1, 2), caption=caption, folded=True))
    if plan.formulas:
        formulas = list(plan.formulas.items())
        blocks.append(Table(("Quantity", "Formula"), formulas, caption="How it was predicted", folded=True))
    if plan.warnings:
        blocks.append(Table(("Warning of the plan",), [(w,) for w in plan.warnings]))
    return Section("prediction", "Predicted and measured", blocks)


def comparison_rows(facts: Facts) -> list[tuple]:
    """(quantity, predicted, measured, how to show a value)."""
    plan, events, rows = facts.plan, settled(facts), []
    if plan is None:
        return rows
    if events and plan.step_seconds:
        measured = median(e["step_seconds"] for e in events)
        rows.append(("Time of a step", plan.step_seconds, measured, format_seconds))
    if facts.finished and facts.active_seconds and plan.total_seconds:
        rows.append(("Training time", plan.total_seconds, facts.active_seconds, format_seconds))
    peaks = [e["peak_memory_bytes"] for e in facts.progress.values() if is_finite(e.get("peak_memory_bytes"))]
    if peaks and plan.total_memory_bytes:
        rows.append(("Memory of a rank", plan.total_memory_bytes, max(peaks), format_bytes))
    if facts.checkpoints and plan.checkpoint_bytes:
        rows.append(("Size of a checkpoint", plan.checkpoint_bytes, facts.checkpoints[-1]["bytes"], format_bytes))
    mfus = [e["mfu"] for e in events if is_finite(e.get("mfu"))]
    if mfus and plan.mfu:
        rows.append(("MFU", plan.mfu, median(mfus), "{:.1%}".format))
    return rows
