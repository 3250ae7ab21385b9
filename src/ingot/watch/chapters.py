"""The state of a run in figures, and its chapters of text and tables, for a page or a terminal.

A chapter is a section of the report, made by the same function, so that all three say the same (report/). A caller
holds the lock of the run while another thread refreshes it. Charts over steps are in charts.py.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ingot.errors import IngotError
from ingot.report.alert_list import alert_blocks
from ingot.report.cost import cost_section
from ingot.report.data_mix import mix_blocks, source_shares
from ingot.report.evaluations import evaluated, evaluation_section, samples_section
from ingot.report.experts import experts_section
from ingot.report.faults import count_ends
from ingot.report.incidents import incidents_section
from ingot.report.measured import device_blocks, layers_section, sources_section
from ingot.report.metrics import metrics_section
from ingot.report.ranks import rank_blocks
from ingot.report.readable import is_finite
from ingot.report.recovery import recovery_section
from ingot.report.render.page import Block, Chart, Charts, Folded, HeadlineFigure, Section, Text
from ingot.report.run_state import state_of, waits_for_nodes
from ingot.report.sections import (
    changed_settings_section,
    checkpoints_section,
    comparison_section,
    machine_section,
    settings_section,
)
from ingot.report.step_parts import step_section
from ingot.theory.flops import mfu_words
from ingot.units import counted, format_count, format_seconds, format_usd
from ingot.watch.drawn import Question
from ingot.watch.live import LiveRun

_COUNTS = ("Faults", "Alerts")  # figures that need the whole record
_DAMAGED = "This run's record is not whole"
_READ_SO_FAR = "The record is still being read: this chapter has what is read so far"
_SAVES = ("checkpoints", "weights_saves")
_EVENT_WORDS = {  # of lists of a RunData
    "weights_saves": "saves of weights", "starts": "attempts", "stored": "uploads", "unsaved": "failed saves",
    "refused": "refused checkpoints", "timeline": "measures", "passed": "passed steps", "health": "reports of machines",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WatchHead:
    """The state of a run. state: in a word (LiveRun.state). note: what is wrong with it; "": nothing. steps: of the run
    file, 0 if unknown. last_event: Unix seconds; None without one. figures: in the order of their importance."""

    name: str
    state: str
    note: str
    step: int
    steps: int
    last_event: float | None
    figures: tuple[HeadlineFigure, ...]


@dataclass(frozen=True, kw_only=True)
class WatchChapter:
    """A section with the question that it helps to answer."""

    question: Question
    section: Section


def head(run: LiveRun, now: float | None = None) -> WatchHead:
    """Return the state of a run in figures. now: Unix seconds; None: the time of the call. While a long log is being
    read, the figures are of its end, without those that count over the whole run; of its begin if no step is in the
    end that is read first."""
    now = time.time() if now is None else now
    end = run.tail or run
    newest = end if end.last_step else run
    last, waits = end.data.end or run.data.end, waits_for_nodes(end.data.stepped_down, run.data.run, now)
    state = state_of(running=run.running, end=last, steps=newest.last_step, waits=waits)
    still = end.still_seconds(now)
    notes = [f"no step for {format_seconds(still)}"] if still else []
    notes += ["for other nodes: the one that led stepped down, and another one may lead"] if state == "waiting" else []
    if state == "failed" and end.data.faults:
        notes.append(end.data.faults[-1].text)
    if passed := _passed(newest):
        notes.append(passed)
    if run.unread:
        notes.append(f"reading its record: {1 - run.unread:.0%}")
    if run.log_problem:
        notes.append(f"its event log cannot be read ({run.log_problem})")
    is_old = newest is not end
    hidden = (*(_COUNTS if run.unread else ()), *(("Checkpoint",) if is_old else ()))  # there are newer ones
    figures = _figures(newest, now, is_old or still is not None)
    return WatchHead(
        name=run.name,
        state=state,
        note="; ".join(notes),
        step=newest.last_step,
        steps=run.total_steps,
        last_event=run.last_event if end.last_event is None else end.last_event,
        figures=tuple(own for own in figures if own.label not in hidden),
    )


def _passed(run: LiveRun) -> str:
    """Return a note if the data of the newest steps were passed: they have no loss and no speed; "" otherwise."""
    if run.lines.last_step < run.steps.last_step or not run.data.passed:
        return ""
    trained = run.steps.last_step
    return f"passed the data since step {trained:,}" if run.data.passed[-1]["steps"][-1] > trained else ""


def _figures(run: LiveRun, now: float, is_old: bool) -> Iterator[HeadlineFigure]:
    newest = run.lines.newest
    if (loss := run.steps.newest("loss")) is not None:
        bpb = newest("bpb")
        yield HeadlineFigure("Loss", f"{loss:.4f}", f"{bpb:.3f} bits per byte" if bpb is not None else "nats per token")
    if evaluations := evaluated(run.data):
        last = evaluations[-1]
        unigram = last["unigram_bpb"]
        good = None if unigram <= 0 else last["bpb"] < unigram
        note = f"bits per byte, at step {last['step']:,}"
        yield HeadlineFigure("Held-out", f"{last['bpb']:.3f}", note, good=good)
    if (speed := newest("tokens_per_second")) is not None and not is_old:
        seconds = newest("step_seconds")
        yield HeadlineFigure("Tokens/s", format_count(speed), f"{format_seconds(seconds)} a step" if seconds else "")
    if (mfu := newest("mfu")) is not None:
        plan = run.data.plan.mfu if run.data.plan else None
        words = mfu_words(mfu) if is_finite(mfu) else ""
        yield HeadlineFigure("MFU", f"{mfu:.1%}", f"{words}; plan {plan:.1%}" if plan else words)
    eta = newest("eta_seconds")
    if run.state == "running" and is_finite(eta) and eta > 0 and not is_old:
        done = f"{run.last_step / run.total_steps:.1%} done" if run.total_steps else ""
        yield HeadlineFigure("Time left", format_seconds(eta), done)
    if (cost := newest("cost_usd")) is not None:
        yield HeadlineFigure("Cost", format_usd(cost), "so far")
    if run.ranks and (goodput := run.ranks.get(0)) and "run/goodput" in goodput.values:
        yield HeadlineFigure("Goodput", f"{goodput.values['run/goodput']:.1%}", "time in steps that count")
    if run.data.checkpoints:
        last = run.data.checkpoints[-1]
        age = f"{format_seconds(max(now - last['time'], 0.0))} ago" if run.state == "running" else "the newest"
        yield HeadlineFigure("Checkpoint", f"step {last['step']:,}", age)
    if faults := len(run.data.faults) + (older := run.left_out["faults"]):
        recovered, ended = count_ends(run.data.faults, running=run.running)
        back = recovered + older  # older ones count as recovered
        note = f"{back:,} recovered" + (f", {ended:,} ended the command" if ended else "")
        yield HeadlineFigure("Faults", f"{faults:,}", note, good=None if back == faults else False)
    if still_open := sum(alert.over is None for alert in run.alerts.values()):
        among = f"of the newest {len(run.alerts):,}" if run.alerts_left_out else ""
        yield HeadlineFigure("Alerts", f"{still_open:,} open", among, good=False)


def chapters(run: LiveRun) -> list[WatchChapter]:
    """Return the chapters of a run that have content, in the order of their questions."""
    data = run.data
    so_far = [Text(f"{_READ_SO_FAR} ({1 - run.unread:.0%}).")] if run.unread else []
    found: list[tuple[Question, Section | None]] = [
        ("learning", evaluation_section(data)),
        ("learning", samples_section(data)),
        ("learning", _mix(run)),
        ("learning", sources_section(data)),
        ("learning", layers_section(data)),
        ("learning", metrics_section(data)),
        ("learning", _of_newest(changed_settings_section(data), run, "changed_settings")),
        ("learning", settings_section(data)),
        ("fast", step_section(data)),
        ("fast", comparison_section(data)),
        ("fast", _ranks(run)),
        ("healthy", _record(run)),
        ("healthy", _alerts(run)),
        ("healthy", incidents_section(data.incidents, data.incident_counts.total())),
        ("healthy", _of_newest(recovery_section(data), run, "faults", "timeline", "findings", "passed", "health")),
        ("healthy", _of_newest(_of_files(checkpoints_section, run), run, *_SAVES, "stored", "unsaved", "refused")),
        ("healthy", experts_section(data)),
        ("healthy", _devices(run)),
        ("healthy", machine_section(data)),
        ("cost", _of_newest(cost_section(data), run, "starts", *_SAVES, "faults")),
    ]
    return [
        WatchChapter(question=question, section=replace(section, blocks=[*so_far, *_without_charts(section.blocks)]))
        for question, section in found
        if section and section.blocks
    ]


def _without_charts(blocks: list[Block]) -> Iterator[Block]:
    """Yield blocks without charts, which a page draws from the numbers; their maps stay, or their tables, folded."""
    for block in blocks:
        if isinstance(block, Chart) and block.heat:
            yield from (Text(f"{block.title}, from the busiest to the idlest."), block.heat)
        elif isinstance(block, Chart):
            yield replace(block.table, caption=block.title, folded=True)
        elif isinstance(block, Folded):
            yield replace(block, blocks=list(_without_charts(block.blocks)))
        elif not isinstance(block, Charts):
            yield block


def _of_files(section, run: LiveRun) -> Section | None:
    """Return a section that reads files of the run folder, which may vanish meanwhile."""
    try:
        return section(run.data)
    except (IngotError, OSError, ValueError):
        return None


def _of_newest(section: Section | None, run: LiveRun, *names: str) -> Section | None:
    """Return a section that counts events of these lists, with how many older ones it does not count."""
    older = [f"{run.left_out[name]:,} {_EVENT_WORDS.get(name, name)}" for name in names if run.left_out[name]]
    if section is None or not older:
        return section
    text = f"These figures are of the newest events. Older ones are left out: {', '.join(older)}."
    return replace(section, blocks=[Text(text), *section.blocks])


def _mix(run: LiveRun) -> Section | None:
    """Return the shares of the sources, counted again when the run is a few percent farther."""
    step = run.last_step
    before, found = run.memo.get("mix", (-1, ([], 0)))
    if not before <= step <= before * 1.02 + 1:
        before, found = run.memo["mix"] = step, source_shares(run.folder.root, step)
    shares, counted = found
    return Section("mix", "Data mix", mix_blocks(shares, counted, before)) if len(shares) > 1 else None


def _ranks(run: LiveRun) -> Section | None:
    return Section("ranks", "Ranks", rank_blocks(run.ranks, run.slow_ranks())) if len(run.ranks) > 1 else None


def _devices(run: LiveRun) -> Section | None:
    return Section("devices", "GPUs", blocks) if (blocks := device_blocks(run.ranks)) else None


def _alerts(run: LiveRun) -> Section | None:
    if not run.alerts:
        return None
    return Section("alerts", "Alerts", alert_blocks(list(run.alerts.values()), run.alerts_left_out))


def _record(run: LiveRun) -> Section | None:
    """Return what is wrong with the record of the run; None if nothing is."""
    lines = list(run.problems.values())
    if run.data.unreadable_events:
        unreadable = counted(run.data.unreadable_events, "event")
        lines.append(f"Damaged, or of another version: {unreadable} that cannot be read.")
    if run.clock_jumps:
        lines.append(f"The clock went back {counted(run.clock_jumps, 'time')}, so durations across that are wrong.")
    if len(run.names) > 1:
        lines.append(f"The log has events of {len(run.names)} runs: {', '.join(list(run.names)[:5])}.")
    if run.steps.skipped:
        lines.append(f"{run.steps.skipped:,} of the oldest steps are left out of the charts, without their extremes.")
    return Section("record", _DAMAGED, [Text(line) for line in lines]) if lines else None
