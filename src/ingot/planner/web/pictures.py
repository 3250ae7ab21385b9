"""A simulated pipeline as rectangles to draw: one row for each pipeline rank, times as shares of the shown time."""

from dataclasses import dataclass

from ingot.schema.run import RunConfig
from ingot.theory.schedule import PUBLISHED, Timeline
from ingot.units import format_seconds

# More pieces in a row than this are too thin to distinguish, so neighbors are merged.
MOST_PIECES = 160
_COLUMNS = 300
# The shown part: a whole step, or only so many actions from its start or end that each action can be distinguished.
WINDOWS = ("step", "start", "end")
_READABLE_ACTIONS = 28


@dataclass(frozen=True)
class _PictureSpan:
    """A rectangle of the picture: one action, or several merged ones.

    kind: F, B, I or W; M for merged actions of several kinds. upper: True for every second stage of a rank. label:
    number of the micro-batch, "" if merged. start, end: seconds. busy: seconds without waits between merged actions.
    """

    kind: str
    upper: bool
    label: str
    start: float
    end: float
    busy: float


def picture(run: RunConfig, timeline: Timeline, window: str, *, instead: bool = False) -> dict:
    """Return the picture of a pipeline as JSON values. window: one of WINDOWS. instead: the plan's step time follows
    from a given MFU, so the predicted times that are drawn differ from it."""
    first, last = _window(timeline, window)
    rows = [_row(timeline, rank, first, last) for rank in range(timeline.table.ranks)]
    merged = max(map(len, rows)) > MOST_PIECES
    if merged:
        rows = [_merged(row, (last - first) / _COLUMNS) for row in rows]
    parallel = run.parallel
    idle = [1 - busy / timeline.step_time for busy in timeline.busy]
    published = PUBLISHED.get(parallel.schedule)
    return {
        "schedule": parallel.schedule,
        "window": window,
        "title": f"{parallel.schedule}, {parallel.pp} ranks, {run.accumulation:,} micro-batches",
        "bubble": f"{timeline.bubble_fraction:.1%}",
        "step": format_seconds(timeline.step_time) + (" as predicted, not at the MFU given" if instead else ""),
        "shown": format_seconds(last - first),
        "starts_at": format_seconds(first) if first else "0 s",
        "ends_at": format_seconds(last),
        "merged": merged,
        "published": f"published: idle {published.formula} ({published.source})" if published else "",
        "rows": [
            {
                "rank": rank,
                "idle": f"{idle[rank]:.0%}",
                "keeps": timeline.peak_in_flight[rank],
                "pieces": [_drawn(piece, first, last - first) for piece in row],
            }
            for rank, row in enumerate(rows)
        ],
    }


def _window(timeline: Timeline, window: str) -> tuple[float, float]:
    """Return the start and end of the shown time in seconds. "start" shows so many actions of the first rank as are
    readable, but at least two per rank of the pipeline; "end" shows as many at the end."""
    whole = timeline.step_time
    if window == "step":
        return 0.0, whole
    number = max(timeline.table.ranks * 2, _READABLE_ACTIONS)
    if window == "start":
        return 0.0, min(max(ends[min(number, len(ends)) - 1] for ends in timeline.ends[:1]), whole)
    return max(min(starts[-min(number, len(starts))] for starts in timeline.starts[:1]), 0.0), whole


def _row(timeline: Timeline, rank: int, first: float, last: float) -> list[_PictureSpan]:
    local = {stage: index for index, stage in enumerate(timeline.table.stages_of(rank))}
    found = []
    for action, start, end in zip(timeline.table.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True):
        if end > first and start < last:
            start, end = max(start, first), min(end, last)
            upper = local[action.stage] % 2 == 1
            found.append(_PictureSpan(action.kind, upper, str(action.micro_batch), start, end, end - start))
    return found


def _merged(row: list[_PictureSpan], least: float) -> list[_PictureSpan]:
    """Return the row with consecutive pieces merged if each is shorter than `least` seconds. The merged kind is their
    common kind, or "M". Idle times of at least half of `least` remain visible."""
    found: list[_PictureSpan] = []
    run_ends = -1.0  # the end of the last piece in `found` if it is short or merged
    for piece in row:
        short = piece.end - piece.start < least
        if short and found and run_ends >= 0 and piece.start - run_ends < least / 2:
            before = found[-1]
            kind = before.kind if before.kind == piece.kind else "M"
            upper = before.upper and piece.upper and kind != "M"
            found[-1] = _PictureSpan(kind, upper, "", before.start, piece.end, before.busy + piece.busy)
        else:
            found.append(piece)
        run_ends = piece.end if short else -1.0
    return found


def _drawn(piece: _PictureSpan, first: float, span: float) -> list:
    """Return [kind, upper, label, x, width, busy]: x and width are shares of the shown time, busy is a share of the
    piece's duration. first, span: start and length of the shown time, in seconds."""
    length = piece.end - piece.start
    x, width = (piece.start - first) / span, length / span
    return [piece.kind, int(piece.upper), piece.label, round(x, 5), round(width, 5), round(piece.busy / length, 3)]
