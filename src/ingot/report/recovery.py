"""The section of a report on faults and recoveries, and on what the guards of the run found and did."""

import time
from collections.abc import Callable, Sequence

from ingot.report.facts import LOSS_AFTER, LOSS_BEFORE, RunData
from ingot.report.faults import FaultRecord
from ingot.report.lineage.order_sections import windows_of
from ingot.report.readable import is_finite
from ingot.report.render.page import Block, LabeledValues, Section, TableBlock, Text
from ingot.report.timeline import size_of, timeline
from ingot.schema import events as kinds
from ingot.trainer.resilience.start_times import PHASES
from ingot.units import format_count, format_seconds, plural

_SHOWN_FAULTS = 20
_SHOWN_STARTS = 20
_SHOWN_DRAINED = 20
_SHOWN_FINDINGS = 20
_SHOWN_PASSED = 20  # steps whose data were passed
_SHOWN_WINDOWS = 8  # of a step


def recovery_section(data: RunData) -> Section | None:
    """Return the section on faults, recoveries, drained machines, what the guards found and did, and on the undisturbed
    twin if there is one."""
    blocks: list[Block] = []
    drained = [event for event in data.health if event.get("verdict") in ("drain", "discard")]
    dated = (*drained, *(data.start_times if data.faults else ()))
    clock = _clock_for([fault.detected_at for fault in data.faults] + [event["time"] for event in dated])
    if (older := len(data.faults) - _SHOWN_FAULTS) > 0:
        blocks.append(Text(f"These are the newest {_SHOWN_FAULTS} faults. The event log has {older:,} before them."))
    for fault in data.faults[-_SHOWN_FAULTS:]:
        blocks.append(Text(_describe_fault(fault, clock, running=data.running)))
        if figures := _figures(fault):
            blocks.append(LabeledValues(figures))
    if data.faults and data.start_times:
        rows = [(clock(e["time"]), f"{e['attempt']}", *_start_cells(e)) for e in data.start_times[-_SHOWN_STARTS:]]
        heads = ("Time", "Attempt", "In all", *(name.replace("_", " ") for name in PHASES))
        blocks.append(
            TableBlock(heads, rows, right=tuple(range(1, len(heads))), caption="Seconds of each start by phase")
        )
    if rows := [(clock(e["time"]), str(e.get("node")), str(e.get("words"))) for e in drained[-_SHOWN_DRAINED:]]:
        blocks.append(TableBlock(("Time", "Machine", "Why it left the run"), rows, caption="Drained machines"))
    blocks += _timeline(data)
    if data.findings:
        blocks += _findings(data)
    blocks += _passed_windows(data) + _sanity(data) + _ranges(data)
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


def _findings(data: RunData) -> list[Block]:
    """Return the table of what the guard found, and the command that explains it."""
    shown = sorted(data.findings, key=size_of)[-_SHOWN_FINDINGS:]
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


def _timeline(data: RunData) -> list[Block]:
    """Return the table of what the guards found and what followed, in order."""
    events = sorted(data.timeline, key=_time)  # each rank writes its own events
    rows, back = [], iter([event for event in events if event["kind"] == kinds.ROLLED_BACK])  # one entry each
    entries = list(timeline(events))
    one_day = len({time.gmtime(entry.time)[:3] for entry in entries}) < 2
    for entry in entries:
        more = _lost(data, next(back)) if entry.kind == kinds.ROLLED_BACK else ""
        clock = time.strftime("%H:%M:%S" if one_day else "%Y-%m-%d %H:%M", time.gmtime(entry.time))
        rows.append((clock, f"{entry.step:,}", entry.text + more))
    caption = "What was found and done, in order"
    return [TableBlock(("Time (UTC)", "Step", "What happened"), rows, right=(1,), caption=caption)] if rows else []


def _time(event: dict) -> float:
    return event["time"]


def _lost(data: RunData, event: dict) -> str:
    """Return what a roll-back cost, and the loss before it and after it, as far as they are known."""
    back, step = event["to_step"], event["from_step"]
    text = f" ({format_count((step - back) * data.run.tokens_per_step)} tokens)" if data.run else ""
    if event[LOSS_BEFORE] is not None and event[LOSS_AFTER]:
        after, loss = event[LOSS_AFTER]
        text += f"; the loss was {event[LOSS_BEFORE]:.4g} at step {back:,}, and then {loss:.4g} at step {after:,}"
    return text


def _passed_windows(data: RunData) -> list[Block]:
    """Return the table of the windows of data that were passed, by step."""
    steps = sorted({step for event in data.passed for step in event["steps"]})
    if not steps or data.run is None:
        return []
    found = windows_of(data.folder.root, steps[:_SHOWN_PASSED])
    rows = [(f"{step:,}", f"{len(own)}", _windows_text(own)) for step, own in found.items()]
    if not rows:
        return []
    more = f", the first {len(rows)}" if len(rows) < len(steps) else ""
    caption = f"Data that were passed: {len(steps)} {plural(len(steps), 'step')}{more}"
    heads = ("Step", "Windows", "Tokens of each shard")
    text = f"The documents of a step: ingot data trace --run {data.folder.root} --step N"
    return [TableBlock(heads, rows, right=(0, 1), caption=caption, folded=len(rows) > 6), Text(text)]


def _windows_text(windows: Sequence[tuple[str, int, int]]) -> str:
    """Return windows as text. windows: (shard, first token, token after the last)."""
    by_shard: dict[str, list[str]] = {}
    for shard, begin, end in windows[:_SHOWN_WINDOWS]:
        by_shard.setdefault(shard, []).append(f"{begin:,}-{end - 1:,}")
    more = f" and {len(windows) - _SHOWN_WINDOWS:,} more" if len(windows) > _SHOWN_WINDOWS else ""
    return "; ".join(f"{shard} {', '.join(spans)}" for shard, spans in by_shard.items()) + more


def _sanity(data: RunData) -> list[Block]:
    """Return the table of the losses of held-out text before saves."""
    if not data.sanity:
        return []
    rows = [(f"{e['step']:,}", f"{e['loss']:.4f}", "suspect" if e.get("suspect") else "") for e in data.sanity]
    caption = f"Held-out text before saves: {len(rows)} {plural(len(rows), 'checkpoint')}"
    heads = ("Step", "Loss", "Checkpoint")
    return [TableBlock(heads, rows[-_SHOWN_FINDINGS:], right=(0, 1), caption=caption, folded=True)]


def _ranges(data: RunData) -> list[Block]:
    """Return the table of the range of the gradient by layer, as it was measured last."""
    if not data.ranges:
        return []
    step = max(data.ranges)
    event = data.ranges[step]
    columns = event["layers"], event["underflow"], event["saturation"]
    rows = [(str(layer), f"{under:.2%}", f"{over:.2%}") for layer, under, over in zip(*columns, strict=True)]
    heads = ("Layer", "0 or subnormal", "Near the largest number")
    scale = event.get("loss_scale")
    caption = f"Range of the gradient in the training precision at step {step:,}"
    caption += f", loss scale {scale:g}" if is_finite(scale) else ""
    return [TableBlock(heads, rows, right=(1, 2), caption=caption, folded=True)]


def _clock_for(times: Sequence[float]) -> Callable[[float], str]:
    """Return what writes a time (Unix seconds): with its date if `times` are of several days."""
    form = "%H:%M:%S UTC" if len({time.gmtime(one)[:3] for one in times}) < 2 else "%Y-%m-%d %H:%M:%S UTC"
    return lambda moment: time.strftime(form, time.gmtime(moment))


def _describe_fault(fault: FaultRecord, clock: Callable[[float], str], *, running: bool) -> str:
    on_purpose = ", on purpose" if fault.injected_at is not None else ""
    lost = (
        f"At {clock(fault.injected_at or fault.detected_at)}, near step {fault.fault_step:,}, {fault.text}{on_purpose}."
    )
    if fault.next_fault_at is not None:
        ended = "The command ended, and a new one" if fault.by_command else "The restart after it"
        return f"{lost} {ended} ended in the next fault before it trained."
    if fault.resumed_from is None:
        return f"{lost} {'The run starts again.' if running else 'The run did not go on afterwards.'}"
    place = f"the checkpoint of step {fault.resumed_from:,}" if fault.resumed_from else "the beginning"
    if fault.by_command:
        return f"{lost} The command ended. A new one continued the run from {place}."
    return f"{lost} All ranks started again from {place}."


def _figures(fault: FaultRecord) -> list[tuple[str, str]]:
    rows = []
    if fault.detect_seconds is not None:
        rows.append(("Noticed after", format_seconds(fault.detect_seconds)))
    if fault.recover_seconds is not None:
        rows.append(("Training again after", format_seconds(fault.recover_seconds)))
    if fault.paused_seconds is not None:
        rows.append(("Started again after", format_seconds(fault.paused_seconds)))
    if fault.redone_steps is not None:
        rows.append(("Steps done again", f"{fault.redone_steps:,}"))
    if fault.compared_steps:
        equal = "all with the same bits" if fault.compared_equal else "not all with the same bits"
        rows.append(("Of these logged both times", f"{fault.compared_steps:,}, {equal}"))
    return rows
