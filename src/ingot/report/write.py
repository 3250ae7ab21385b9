"""The report of a run, as report.html and report.md, from its event log and artifacts: no torch, no network."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from ingot import __version__
from ingot.report.alert_list import alerts_section
from ingot.report.cost import cost_section
from ingot.report.data_mix import data_mix_section
from ingot.report.evaluations import evaluated, evaluation_section, samples_section
from ingot.report.experts import experts_section
from ingot.report.facts import RunData, gather
from ingot.report.faults import count_ends
from ingot.report.incidents import incidents_section
from ingot.report.measured import devices_section, layers_section, sources_section, weights_section
from ingot.report.metrics import metrics_section
from ingot.report.ranks import ranks_section
from ingot.report.readable import is_finite, is_number
from ingot.report.recovery import recovery_section
from ingot.report.render.markup import render_html, render_markdown
from ingot.report.render.page import HeadlineFigure, ReportPage, Section
from ingot.report.run_state import waits_for_nodes
from ingot.report.sections import (
    changed_settings_section,
    checkpoints_section,
    comparison_section,
    funnel_section,
    machine_section,
    provenance_section,
    settings_section,
    stages_section,
    training_section,
)
from ingot.report.step_parts import step_section
from ingot.schema.events import FAULT
from ingot.storage import write_atomic
from ingot.units import counted, format_count, format_seconds, plural


@dataclass(frozen=True)
class Report:
    """The two files of a report, and its headline figures as (label, value, note)."""

    html: Path
    markdown: Path
    headline: list[tuple[str, str, str]]


def write_report(
    run: Path,
    *,
    out: Path | None = None,
    corpus: Path | None = None,
    twin: Path | None = None,
    stages: Path | None = None,
    command: str = "",
) -> Report:
    """Write the report of the run folder `run` into the folder `out` (default: the run folder).

    corpus: a corpus folder for the funnel; by default the corpus from which the run's tokens were made, if it exists.
    twin: a twin.json (report/facts.py, Twin); by default RUN/twin.json if it exists.
    stages: an event log with `stage` events, if they are not in the log of the run.
    command: the command that reproduces the run. Sections without data are left out.
    Raises UsageError if `run` has no event log, DataError or ConfigError for an artifact that cannot be read.
    """
    if twin is None and (run / "twin.json").is_file():
        twin = run / "twin.json"
    data = gather(run, corpus=corpus, twin=twin, stages=stages)
    page = build_page(data, command or f"ingot train {shlex.quote(str(data.folder.config))}")
    folder = run if out is None else out
    html, markdown = folder / "report.html", folder / "report.md"
    write_atomic(html, render_html(page).encode("utf-8", "replace"))
    write_atomic(markdown, render_markdown(page).encode("utf-8", "replace"))
    return Report(html, markdown, [(figure.label, figure.value, figure.note) for figure in page.headline])


def build_page(data: RunData, command: str) -> ReportPage:
    """Return the report page of a run. command: the command that reproduces the run."""
    sections = (
        training_section, weights_section, sources_section, layers_section, step_section, metrics_section,
        ranks_section, devices_section, experts_section, evaluation_section, samples_section, recovery_section,
        _incidents_section, alerts_section, comparison_section, cost_section, stages_section, funnel_section,
        data_mix_section, checkpoints_section, settings_section, changed_settings_section, machine_section,
        provenance_section,
    )  # fmt: skip
    name = data.run.name if data.run else data.folder.root.resolve().name
    footer = f"Written by ingot {__version__} from the event log of the run."
    if data.unreadable_events:
        footer += f" {counted(data.unreadable_events, 'event')} could not be read: the report is made of the others."
    return ReportPage(
        title=name,
        subtitle=_subtitle(data),
        headline=_headline(data),
        command=command,
        sections=[s for s in (section(data) for section in sections) if s],
        footer=footer,
    )


def _incidents_section(data: RunData) -> Section | None:
    return incidents_section(data.incidents, data.incident_counts.total())


def _subtitle(data: RunData) -> str:
    parts = []
    if data.starts:
        first = data.starts[0]
        parts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first["time"])))
        if is_finite(first.get("parameters")):
            parts.append(f"{format_count(first['parameters'])} parameters")
        ranks = f"{first['world_size']:.0f} {first.get('device', '')} {plural(first['world_size'], 'rank')}"
        parts.append(" ".join(ranks.split()))
        parts += [str(first["precision"])] if first.get("precision") else []
    parts.append(_state(data))
    return " · ".join(parts)


def _state(data: RunData) -> str:
    total = f" of {data.run.train.steps:,}" if data.run else ""
    if data.finished and data.finished["step"] >= data.valid_step:
        return f"finished at step {data.finished['step']:,}"
    if not data.running and waits_for_nodes(data.stepped_down, data.run):
        return f"waiting for its nodes at step {data.valid_step:,}{total}"
    if data.end == FAULT and not data.running:
        return f"failed at step {data.valid_step:,}{total}"
    if data.stopped:
        return f"stopped at step {data.valid_step:,}{total}"
    return f"at step {data.valid_step:,}{total}" if data.last_step else "no step logged yet"


def _headline(data: RunData) -> list[HeadlineFigure]:
    figures: list[HeadlineFigure] = []
    if evaluations := evaluated(data):
        last = evaluations[-1]
        better = 1 - last["bpb"] / last["unigram_bpb"] if last["unigram_bpb"] > 0 else 0.0
        note = f"unigram baseline {last['unigram_bpb']:.3f}, {abs(better):.0%} {'lower' if better >= 0 else 'higher'}"
        figures.append(HeadlineFigure("Held-out bits per byte", f"{last['bpb']:.3f}", note, good=better > 0))
    if valid := [step for step in data.steps if step <= data.valid_step]:
        first, last = data.steps[min(valid)], data.steps[max(valid)]
        figures.append(
            HeadlineFigure("Training loss", f"{last['loss']:.3f}", f"nats per token, {first['loss']:.2f} at the start")
        )
    if data.progress:
        last = data.progress[max(data.progress)]
        note = f"of {format_count(data.tokens.tokens)} in the training set" if data.tokens else ""
        figures.append(HeadlineFigure("Tokens trained on", format_count(last["tokens"]), note))
    if data.active_seconds:
        cost = data.newest_line.get("cost_usd") if data.newest_line else None
        attempts = f"{len(data.starts)} {plural(len(data.starts), 'attempt')}"
        note = attempts + (f", ${cost:,.2f}" if is_number(cost) else "")
        figures.append(HeadlineFigure("Training time", format_seconds(data.active_seconds), note))
    if recovered := _recovery_figure(data):
        figures.append(recovered)
    return figures


def _recovery_figure(data: RunData) -> HeadlineFigure | None:
    """Return the headline figure on faults: the longest time of a recovery, and whether losses equal the twin's; None
    without faults."""
    if not data.faults:
        return None
    count = len(data.faults)
    recovered, ended = count_ends(data.faults, running=data.running)
    if recovered < count:
        others = f"{ended} {plural(ended, 'fault')} ended the command" if ended else "the run starts again"
        return HeadlineFigure("Recovery", f"{recovered} of {count}", others, good=False if ended else None)
    note = f"after {counted(count, 'fault')}"
    good = None
    if data.twin:
        good = data.twin.equal
        note += ", losses equal bit for bit" if good else ", losses differ from the undisturbed run"
    return HeadlineFigure(
        "Recovered in", format_seconds(max(i.recover_seconds or 0.0 for i in data.faults)), note, good=good
    )
