"""A simulated pipeline as rectangles to paint: one row for each pipeline rank, times as shares of what is shown."""

from dataclasses import dataclass

from ingot.schema.run import RunConfig
from ingot.theory.schedule import PUBLISHED, Timeline
from ingot.units import format_seconds

# More pieces of a row than this are too thin to be told apart: neighbours become one.
MOST_PIECES = 160
_COLUMNS = 300
# What is shown: all of a step, or as many actions of a rank from its beginning or end as can be told apart.
WINDOWS = ("step", "start", "end")
_READABLE_ACTIONS = 28


@dataclass(frozen=True)
class _Piece:
    """kind: F, B, I or W, or M for several in turn. upper: of every second stage of a rank. label: the micro-batch, ""
    when merged. busy: of its time, without short waits that merging covers."""

    kind: str
    upper: bool
    label: str
    start: float
    end: float
    busy: float


def picture(run: RunConfig, timeline: Timeline, window: str, *, instead: bool = False) -> dict:
    """instead: whether the plan has the time of an MFU that was given, and not the one that is drawn."""
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
    """From when to when: the start ends when the last rank has begun and the first has done what can be read."""
    whole = timeline.step_time
    if window == "step":
        return 0.0, whole
    number = max(timeline.table.ranks * 2, _READABLE_ACTIONS)
    if window == "start":
        return 0.0, min(max(ends[min(number, len(ends)) - 1] for ends in timeline.ends[:1]), whole)
    return max(min(starts[-min(number, len(starts))] for starts in timeline.starts[:1]), 0.0), whole


def _row(timeline: Timeline, rank: int, first: float, last: float) -> list[_Piece]:
    local = {stage: index for index, stage in enumerate(timeline.table.stages_of(rank))}
    found = []
    for action, start, end in zip(timeline.table.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True):
        if end > first and start < last:
            start, end = max(start, first), min(end, last)
            upper = local[action.stage] % 2 == 1
            found.append(_Piece(action.kind, upper, str(action.micro_batch), start, end, end - start))
    return found


def _merged(row: list[_Piece], least: float) -> list[_Piece]:
    """Runs of pieces that are each shorter than `least` as one: of their kind where it is the same, else of several,
    "M". Idle time of half of `least` stays to be seen."""
    found: list[_Piece] = []
    run_ends = -1.0  # of the last in `found`, when it is a run of short pieces
    for piece in row:
        short = piece.end - piece.start < least
        if short and found and run_ends >= 0 and piece.start - run_ends < least / 2:
            before = found[-1]
            kind = before.kind if before.kind == piece.kind else "M"
            upper = before.upper and piece.upper and kind != "M"
            found[-1] = _Piece(kind, upper, "", before.start, piece.end, before.busy + piece.busy)
        else:
            found.append(piece)
        run_ends = piece.end if short else -1.0
    return found


def _drawn(piece: _Piece, first: float, span: float) -> list:
    """[kind, upper, label, x, width, busy]: x and width are shares of what is shown, busy one of the piece."""
    length = piece.end - piece.start
    x, width = (piece.start - first) / span, length / span
    return [piece.kind, int(piece.upper), piece.label, round(x, 5), round(width, 5), round(piece.busy / length, 3)]
