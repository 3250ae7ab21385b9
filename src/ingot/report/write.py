"""`report.html` and `report.md` of a run, from its event log and artifacts alone: no torch, no network."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from ingot.report.facts import gather
from ingot.report.render.html import render_html
from ingot.report.render.markdown import render_markdown
from ingot.report.story import tell
from ingot.storage import write_atomic


@dataclass(frozen=True)
class Report:
    """The two files, and the headline as (label, value, note)."""

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
    """Write the report of the run folder `run` into `out` (default: the run folder itself).

    corpus: a corpus folder for the funnel; by default the one that the run's tokens were made from, if it is in place.
    twin: a twin.json (see report/facts.py: Twin); by default RUN/twin.json if there is one.
    stages: an event log with `stage` events outside of the run. command: what reproduces the run.
    A part that the run does not have is left out. Raises UsageError when `run` is no run, DataError and ConfigError for
    artifacts that cannot be read.
    """
    if twin is None and (run / "twin.json").is_file():
        twin = run / "twin.json"
    facts = gather(run, corpus=corpus, twin=twin, stages=stages)
    page = tell(facts, command or f"ingot train {shlex.quote(str(facts.folder.config))}")
    folder = run if out is None else out
    html, markdown = folder / "report.html", folder / "report.md"
    write_atomic(html, render_html(page).encode("utf-8", "replace"))
    write_atomic(markdown, render_markdown(page).encode("utf-8", "replace"))
    return Report(html, markdown, [(tile.label, tile.value, tile.note) for tile in page.tiles])
