"""The views of `ingot watch RUN` in a terminal: which charts and chapters each shows, and how they share the screen."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.report.render.page import Block, TableBlock
from ingot.units import format_seconds
from ingot.watch.chapters import chapters, head
from ingot.watch.charts import chart, chart_keys
from ingot.watch.live import LiveRun
from ingot.watch.terminal.canvas import Canvas, Glyphs
from ingot.watch.terminal.plot import draw_chart, plot_pixels
from ingot.watch.terminal.text import StyledLine, lines_of

NARROWEST, LOWEST = 30, 8  # cells of the smallest screen that is drawn
_TWO_COLUMNS = 120  # from this width on, charts are side by side
_CHART_ROWS = 6  # the fewest lines of a chart
_RECENT = 3  # incidents of the overview
_ZOOMS = 12  # the narrowest shows 1/4096 of the steps


@dataclass(frozen=True, kw_only=True)
class View:
    """A view. charts: keys of charts (watch/charts.py), which get `share` of the screen if it has text, too. chapters:
    anchors of sections (watch/chapters.py). recent: show the newest
    incidents and open alerts."""

    title: str
    charts: tuple[str, ...] = ()
    chapters: tuple[str, ...] = ()
    recent: bool = False
    share: float = 2 / 3


VIEWS = (
    View(title="run", charts=("loss", "speed"), recent=True, share=3 / 4),
    View(title="loss", charts=("loss", "source_loss", "heldout")),
    View(
        title="gradient",
        charts=("grad_norm", "update_ratio", "lr", "param_norm", "layer_norms", "activations", "saturation"),
    ),
    View(title="speed", charts=("mfu", "step_time"), chapters=("step", "prediction")),
    View(title="ranks", chapters=("ranks", "devices", "machine")),
    View(
        title="memory", charts=("memory", "loads", "dropped", "entropy", "route_flips"), chapters=("experts", "layers")
    ),
    View(
        title="data",
        charts=(),
        chapters=("mix", "sources", "evaluation", "samples", "own-metrics", "changed-settings", "settings"),
    ),
    View(title="saves", chapters=("checkpoints", "recovery")),
    View(
        title="alerts",
        charts=("cost", "goodput", "cost_to_come"),
        chapters=("alerts", "record", "incidents", "cost"),
        share=1 / 3,
    ),
)


class WatchScreen:
    """The state of the screen: the view, the run whose text it has, the first line of it, and how many of the steps.

    zoom: charts show the newest 1/2^zoom of the steps.
    """

    def __init__(self, runs: Sequence[LiveRun], glyphs: Glyphs):
        self.runs, self.glyphs = runs, glyphs
        self.view = self.chosen = self.scroll = self.zoom = 0

    def press(self, key: str) -> bool:
        """Take a key: a digit, "left", "right", "up", "down", "page up", "page down", "home", "tab", "+", "-" or "q".
        Return False if it ends the program."""
        if key in ("q", "Q"):
            return False
        if key.isdigit() and 1 <= int(key) <= len(VIEWS):
            self.view, self.scroll = int(key) - 1, 0
        elif key in ("left", "right"):
            self.view, self.scroll = (self.view + (1 if key == "right" else -1)) % len(VIEWS), 0
        elif key in ("up", "down", "page up", "page down"):
            size = 10 if key.startswith("page") else 1
            self.scroll = max(self.scroll + (size if key.endswith("down") else -size), 0)
        elif key == "home":
            self.scroll = 0
        elif key == "tab":
            self.chosen, self.scroll = (self.chosen + 1) % len(self.runs), 0
        elif key in ("+", "-"):
            self.zoom = min(max(self.zoom + (1 if key == "+" else -1), 0), _ZOOMS)
        return True

    def draw(self, width: int, height: int, now: float | None = None, *, keys: bool = True) -> Canvas:
        """Return the screen. now: Unix seconds; None: the time of the call. keys: show which keys there are."""
        canvas = Canvas(width, height, self.glyphs)
        if width < NARROWEST or height < LOWEST:
            canvas.put(0, 0, "the terminal is too small")
            return canvas
        now = time.time() if now is None else now
        run, view = self.runs[self.chosen], VIEWS[self.view]
        y = self._draw_head(canvas, now)
        bottom = height - bool(keys)
        canvas.rule(y, f"{self.view + 1} {view.title}" + (f", {run.name}" if len(self.runs) > 1 else ""))
        y = self._draw_charts(canvas, view, y + 1, bottom)
        self._draw_text(canvas, self._text(view, run, width, now), y, bottom)
        if keys:
            self._draw_keys(canvas)
        return canvas

    def _draw_head(self, canvas: Canvas, now: float) -> int:
        """Draw the state of each run, and the figures of the chosen one. Return the next line."""
        y, most = 0, max(canvas.height // 4, 1)
        for run in self.runs[:most]:
            own = head(run, now)
            x = canvas.put(0, y, own.name, "bold", canvas.width // 3) + 2
            style = {"running": "green", "waiting": "yellow", "failed": "red", "interrupted": "red"}.get(own.state, "")
            x = canvas.put(x, y, own.state, style) + 2
            done = f"step {own.step:,}" + (f" of {own.steps:,} ({own.step / own.steps:.0%})" if own.steps else "")
            x = canvas.put(x, y, done) + 2
            note = "; ".join(text for text in (own.note if own.state == "failed" else "", _silence(run, now)) if text)
            note = note or own.note
            if note and x + len(note) > canvas.width:
                x, y = 2, y + 1
            canvas.put(x, y, note, "yellow")
            y += 1
        x = 0
        for figure in head(self.runs[self.chosen], now).figures:
            text = f"{figure.label.lower()} {figure.value}"
            if x and x + len(text) > canvas.width:
                x, y = 0, y + 1
                if y > most + 1:
                    y -= 1
                    break
            style = "" if figure.good is None else "green" if figure.good else "red"
            x = canvas.put(x, y, text, style) + 3
        return y + 1

    def _draw_charts(self, canvas: Canvas, view: View, y: int, bottom: int) -> int:
        """Draw the charts of a view that have numbers. Return the next line."""
        known = chart_keys(self.runs)
        keys = [key for key in view.charts if key in known]
        if not keys:
            return y
        columns = 2 if canvas.width >= _TWO_COLUMNS and len(keys) > 1 else 1
        shares = view.chapters or view.recent
        room = int((bottom - y) * view.share) if shares else bottom - y
        rows = min(-(-len(keys) // columns), max(room // _CHART_ROWS, 1))
        height, width = room // rows, (canvas.width - 2 * (columns - 1)) // columns
        if height < 4:
            return y
        for number, key in enumerate(keys[: rows * columns]):
            row, column = divmod(number, columns)
            found = chart(self.runs, key, self._first_step(), None, plot_pixels(width, canvas))
            if found is not None:
                names = [run.name for run in self.runs]
                draw_chart(canvas, found, column * (width + 2), y + row * height, width, height, names)
        return y + rows * height

    def _first_step(self) -> int:
        last = max(run.last_step for run in self.runs)
        first = min((run.steps.first_step for run in self.runs if run.steps.first_step), default=1)
        return max(last - ((last - first) >> self.zoom), 1) if self.zoom else 1

    def _text(self, view: View, run: LiveRun, width: int, now: float) -> list[StyledLine]:
        blocks: list[tuple[str, list[Block]]] = []
        if view.recent:
            blocks.append(("", _recent(run, now)))
        if view.chapters:
            found = {one.section.anchor: one.section for one in chapters(run)}
            blocks += [(found[a].title, found[a].blocks) for a in view.chapters if a in found]
        lines: list[StyledLine] = []
        for title, own in blocks:
            if own:
                lines += ([[]] if lines else []) + ([[(title, "bold")]] if title else [])
                lines += lines_of(own, width, self.glyphs)
        if not lines and not any(key in chart_keys(self.runs) for key in view.charts):
            lines = [[("The record has nothing of this yet.", "dim")]]
        return lines

    def _draw_text(self, canvas: Canvas, lines: list[StyledLine], y: int, bottom: int) -> None:
        room = bottom - y
        self.scroll = min(self.scroll, max(len(lines) - room, 0))
        for row, line in enumerate(lines[self.scroll : self.scroll + room]):
            x = 0
            for text, style in line:
                x = canvas.put(x, y + row, text, style)
        below = len(lines) - self.scroll - room
        if below > 0 and room > 0:
            canvas.right(bottom - 1, f" {below:,} more line{'s' * (below > 1)} below ", "reverse")

    def _draw_keys(self, canvas: Canvas) -> None:
        y, x = canvas.height - 1, 0
        more = "+/- zoom  q quit" if canvas.width >= 100 else "q quit"
        titled = [f"{number} {view.title}" for number, view in enumerate(VIEWS, 1)]
        plain = [str(number) for number in range(1, len(VIEWS) + 1)]
        own = [*plain[: self.view], titled[self.view], *plain[self.view + 1 :]]
        fits = (texts for texts in (titled, own) if len(" ".join((*texts, more))) <= canvas.width)
        for number, text in enumerate(next(fits, plain)):
            x = canvas.put(x, y, text, "reverse" if number == self.view else "dim") + 1
        canvas.right(y, more, "dim")


def _silence(run: LiveRun, now: float) -> str:
    """Return since when a run that has not ended shows no sign of life; "" if it does."""
    if run.last_event is None or run.state in ("finished", "stopped", "not started"):
        return ""
    if run.state == "running":
        still = run.still_seconds(now)
        if still is None or now - run.last_event < still / 2:  # it logs other events
            return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.last_event))
    return f"no sign of life since {since} ({format_seconds(max(now - run.last_event, 0.0))} ago)"


def _recent(run: LiveRun, now: float) -> list[Block]:
    """Return the open alerts and the newest incidents."""
    rows = [
        ("open alert", f"{alert.last.step:,}", f"{alert.last.evidence}; {alert.last.next}")
        for alert in [one for one in run.alerts.values() if one.over is None][-_RECENT:]
    ]
    for one in list(run.data.incidents)[-_RECENT:][::-1]:
        rows.append((f"{format_seconds(max(now - one.time, 0.0))} ago", f"{one.step:,}", one.text))
    return [TableBlock(("", "Step", "Alerts and incidents"), rows, right=(1,))] if rows else []
