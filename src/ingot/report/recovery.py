"""The section of a report on faults and recoveries, and on what the policy of the training loop did."""

import math
import time

from ingot.report.facts import RunData, is_finite
from ingot.report.faults import FaultRecord
from ingot.report.render.page import Block, LabeledValues, Section, TableBlock, Text
from ingot.report.sections import plural
from ingot.schema.alert import alert_of
from ingot.schema.alert import described as alert_text
from ingot.schema.guard_record import described, measure_of
from ingot.trainer.resilience.start_times import PHASES
from ingot.units import format_seconds

_SHOWN_STARTS = 20
_SHOWN_DRAINED = 20
_SHOWN_FINDINGS = 20
_SHOWN_STEPS = 8  # of the steps that one event names


def recovery_section(data: RunData) -> Section | None:
    """Return the section on faults, recoveries, drained machines, findings, skipped updates and roll-backs, and on the
    undisturbed twin if there is one."""
    blocks: list[Block] = []
    for fault in data.faults[:20]:
        blocks.append(Text(_describe_fault(fault)))
        blocks.append(LabeledValues(_figures(fault)))
    if len(data.faults) > 20:
        blocks.append(Text(f"{len(data.faults) - 20} more faults are in the event log."))
    if data.faults and data.start_times:
        rows = [(_clock(e["time"]), f"{e['attempt']}", *_start_cells(e)) for e in data.start_times[-_SHOWN_STARTS:]]
        heads = ("Time", "Attempt", "In all", *(name.replace("_", " ") for name in PHASES))
        blocks.append(
            TableBlock(heads, rows, right=tuple(range(1, len(heads))), caption="Seconds of each start by phase")
        )
    drained = [event for event in data.health if event.get("verdict") in ("drain", "discard")]
    if rows := [(_clock(e["time"]), str(e.get("node")), str(e.get("words"))) for e in drained[-_SHOWN_DRAINED:]]:
        blocks.append(TableBlock(("Time", "Machine", "Why it left the run"), rows, caption="Drained machines"))
    if incidents := _policy_rows(data):
        blocks.append(
            TableBlock(("Time", "Step", "What the policy did"), incidents, right=(1,), caption="By the policy")
        )
    if data.findings:
        blocks += _findings(data)
    if data.twin:
        twin = data.twin
        verdict = "equal, bit for bit" if twin.equal else f"different by up to {twin.max_difference:.3g}"
        blocks.append(
            Text(
                f"A twin ran steps {twin.first_step:,} to {twin.last_step:,} without a fault, from an earlier "
                f"checkpoint and through step {twin.resumed_from:,}, where this run had to start again after the kill "
                f"at step {twin.kill_step:,}. Losses and gradient norms of the two are {verdict}."
            )
        )
        blocks.append(
            LabeledValues(
                [
                    ("Steps compared", f"{twin.steps:,}"),
                    ("Largest difference", f"{twin.max_difference:g}"),
                    ("Verdict", "equal" if twin.equal else "not equal"),
                ]
            )
        )
    return Section("recovery", "Faults and recovery", blocks) if blocks else None


def _size(finding: dict) -> tuple[float, int]:
    infinite = any("not finite" in kind for kind in finding["found"])  # its deviations have no meaning
    return math.inf if infinite else max(finding["loss_sigmas"], finding["norm_sigmas"]), finding["step"]


def _findings(data: RunData) -> list[Block]:
    """Return the table of what the guard found, and the command that explains it."""
    shown = sorted(data.findings, key=_size)[-_SHOWN_FINDINGS:]
    rows = [
        (f"{e['step']:,}", ", ".join(e["found"]), f"{e['loss']:.4g}", f"{e['loss_sigmas']:+.1f}",
         f"{e['grad_norm']:.4g}", f"{e['norm_sigmas']:+.1f}")
        for e in sorted(shown, key=lambda e: e["step"])
    ]  # fmt: skip
    heads = ("Step", "The guard found", "Loss", "Deviations", "Gradient norm", "Deviations")
    more = f", the {len(rows)} largest" if len(rows) < len(data.findings) else ""
    caption = f"{len(data.findings)} {plural(len(data.findings), 'finding')}{more}"
    text = f"The documents of these steps that are unlike those of healthy ones: ingot explain spike {data.folder.root}"
    return [TableBlock(heads, rows, right=(0, 2, 3, 4, 5), caption=caption, folded=len(rows) > 6), Text(text)]


def _start_cells(event: dict) -> tuple[str, ...]:
    """Return the total and the seconds of each phase; "" for a phase that was not measured."""
    phases = event.get("seconds")
    each = [phases.get(name) if isinstance(phases, dict) else None for name in PHASES]
    return (f"{event['total_seconds']:.2f}", *(f"{s:.2f}" if is_finite(s) else "" for s in each))


def _policy_rows(data: RunData) -> list[tuple[str, str, str]]:
    """Return (time, step, text) of skipped updates, passed data, measures, alerts, data left out and roll-backs, by
    time."""
    found = []
    for event in data.vetoes:
        steps = event["steps"]
        text = f"skipped the {plural(len(steps), 'update')} of {plural(len(steps), 'step')} {_steps_text(steps)}"
        found.append((event["time"], f"{steps[0]:,}", text))
    for event in data.passed:
        steps = event["steps"]
        text = f"passed the data of {plural(len(steps), 'step')} {_steps_text(steps)}"
        found.append((event["time"], f"{steps[0]:,}", text))
    for event in data.measures:
        found.append((event["time"], f"{event['last']:,}", f"guard: {described(measure_of(event))}"))
    for event in data.alerts:
        found.append((event["time"], f"{event['step']:,}", f"alert: {alert_text(alert_of(event))}"))
    for event in data.quarantined:
        windows = event["windows"]
        text = f"left out {windows:,} {plural(windows, 'window')} of the data: {event['found']}"
        found.append((event["time"], f"{event['step']:,}", text))
    for event in data.roll_backs:
        back, again = event["to_step"], event["from_step"] - event["to_step"]
        text = f"rolled back to the checkpoint of step {back:,}; {again:,} {plural(again, 'step')} trained again"
        found.append((event["time"], f"{event['from_step']:,}", text))
    return [(_clock(moment), step, text) for moment, step, text in sorted(found)]


def _steps_text(steps: list[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:_SHOWN_STEPS])
    return shown + (f" and {len(steps) - _SHOWN_STEPS:,} more" if len(steps) > _SHOWN_STEPS else "")


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(moment))


def _describe_fault(fault: FaultRecord) -> str:
    who = "the job" if fault.rank is None else f"rank {fault.rank}"
    on_purpose = ", on purpose" if fault.injected_at is not None else ""
    clock = _clock(fault.injected_at or fault.detected_at)
    lost = f"At {clock}, near step {fault.fault_step:,}, {who} {fault.cause.rstrip('.')}{on_purpose}."
    if fault.resumed_from is None:
        return f"{lost} The run did not go on afterwards."
    place = f"the checkpoint of step {fault.resumed_from:,}" if fault.resumed_from else "the beginning"
    return f"{lost} All ranks started again from {place}."


def _figures(fault: FaultRecord) -> list[tuple[str, str]]:
    rows = []
    if fault.detect_seconds is not None:
        rows.append(("Noticed after", format_seconds(fault.detect_seconds)))
    if fault.recover_seconds is not None:
        rows.append(("Training again after", format_seconds(fault.recover_seconds)))
    if fault.redone_steps is not None:
        rows.append(("Steps done again", f"{fault.redone_steps:,}"))
    if fault.compared_steps:
        equal = "all with the same bits" if fault.compared_equal else "not all with the same bits"
        rows.append(("Of these logged both times", f"{fault.compared_steps:,}, {equal}"))
    return rows
