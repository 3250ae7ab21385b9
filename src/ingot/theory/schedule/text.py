"""A timeline as lines of plain text, one per rank."""

from ingot.theory.schedule.simulate import Timeline, simulate
from ingot.theory.schedule.table import Table

_IDLE, _BUSY = ".", "-"


def timeline_text(timeline: Timeline | Table, width: int = 120) -> str:
    """One line of at most `width` columns per rank: F0, B0, I0, W0 at the column where they start, dashes while they
    last, dots where the rank is idle; F4&b1 run together. Every second stage of a rank is in lower case. Numbers that
    do not fit are left out. A table is drawn with F = I = W."""
    if isinstance(timeline, Table):
        timeline = simulate(timeline, forward=1.0, backward_input=1.0, backward_weight=1.0)
    names = [f"rank {rank}" for rank in range(timeline.table.ranks)]
    margin = max(map(len, names)) + 1
    scale = _columns_per_time(timeline, max(width - margin, 1))
    lines = [_line(timeline, rank, scale) for rank in range(timeline.table.ranks)]
    return "\n".join(f"{name:<{margin}}{line}" for name, line in zip(names, lines, strict=True))


def _columns_per_time(timeline: Timeline, columns: int) -> float:
    """As many as fit; a whole number for the shortest action, so that equal ones look equal, where there is room."""
    scale = columns / timeline.step_time
    times = [
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
    ]
    shortest = min(time for time in times if time > 0)
    # Sums of times are off by rounding: 2.9999999 columns are 3.
    return int(scale * shortest + 1e-6) / shortest if scale * shortest >= 2 else scale


def _line(timeline: Timeline, rank: int, scale: float) -> str:
    local = {stage: index for index, stage in enumerate(timeline.table.stages_of(rank))}
    cells = [_IDLE] * max(round(timeline.step_time * scale), 1)
    pair = ""
    for action, start, end, after in zip(
        timeline.table.rows[rank],
        timeline.starts[rank],
        timeline.ends[rank],
        (*timeline.starts[rank][1:], None),
        strict=True,
    ):
        kind = action.kind.lower() if local[action.stage] % 2 else action.kind
        label = f"{pair}{kind}{action.micro_batch}"
        if start == after and end > start:  # the next one runs at the same time
            pair = f"{label}&"
            continue
        first = min(round(start * scale), len(cells) - 1)
        size = max(round(end * scale) - first, 1)
        short = pair[:1] or kind
        cells[first : first + size] = (label if len(label) <= size else short).ljust(size, _BUSY)
        pair = ""
    return "".join(cells)
