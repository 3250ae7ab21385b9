"""Schedules in which each rank holds one stage from each half of the model: ZB-V, DualPipeV and DualPipe."""

from collections import Counter, deque

from ingot.theory.schedule.table import Action, Kind, ScheduleTable


class _Row:
    """A writer of one rank's row. Each call adds an action for the next micro-batch of a stage."""

    def __init__(self, first_micro_batch: dict[int, int]):
        self.actions: list[Action] = []
        self.overlaps: list[int] = []
        self._first = first_micro_batch
        self._count: Counter[tuple[str, int]] = Counter()
        self._weights: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self._add("F", "F", stage)

    def backward(self, stage: int) -> None:
        self._add("B", "B", stage)

    def backward_input(self, stage: int) -> None:
        self._add("I", "B", stage)
        self._weights.append(Action("W", stage, self.actions[-1].micro_batch))

    def backward_weight(self) -> None:
        """Add the W of the oldest I that does not have one yet."""
        self.actions.append(self._weights.popleft())

    def forward_and_backward(self, forward: int, backward: int) -> None:
        """Add a forward of stage `forward` and a backward of stage `backward` that run at the same time."""
        self.overlaps.append(len(self.actions))
        self.forward(forward)
        self.backward(backward)

    def _add(self, kind: Kind, way: str, stage: int) -> None:
        self.actions.append(Action(kind, stage, self._first[stage] + self._count[way, stage]))
        self._count[way, stage] += 1


def zb_v(pp: int, micro_batches: int) -> ScheduleTable:
    """Return the table of ZB-V: rank r of P holds stages r and 2P-1-r. For fewer than 2P-1 micro-batches, it is the
    table for 2P-1 without the actions of the missing micro-batches.
    """
    rows = []
    for rank in range(pp):
        row = _zb_v_row(pp, rank, max(micro_batches, 2 * pp - 1))
        rows.append(tuple(action for action in row if action.micro_batch < micro_batches))
    return ScheduleTable("zb_v", 2 * pp, micro_batches, _v_ranks(pp), tuple(rows))


def _zb_v_row(pp: int, rank: int, micro_batches: int) -> list[Action]:
    """Return the actions of one rank in ZB-V.

    Until the first gradient arrives, the rank runs forwards, with as much activation memory as 1F1B's first rank. Then
    it repeats F I W on both stages. At the end it postpones each W that would delay the last I of other ranks.
    """
    lower, upper = rank, 2 * pp - 1 - rank
    row = _Row({lower: 0, upper: 0})
    forwards = 2 * (pp - rank) - 1 + rank  # of the lower stage
    for _ in range(2 * (pp - rank) - 1):
        row.forward(lower)
    for _ in range(rank):
        row.forward(upper)
        row.forward(lower)
    for _ in range(pp - rank):
        row.forward(upper)
        row.backward_input(upper)
        row.backward_weight()
    for _ in range(pp, micro_batches):  # the upper stage has done P forwards by now
        if forwards < micro_batches:
            row.forward(lower)
            forwards += 1
        row.backward_input(lower)
        row.backward_weight()
        row.forward(upper)
        row.backward_input(upper)
        row.backward_weight()
    for _ in range(rank):
        row.backward_input(lower)
        row.backward_input(upper)
    for _ in range(pp - rank):
        row.backward_input(lower)
        row.backward_weight()
    for _ in range(2 * rank):
        row.backward_weight()
    return row.actions


def dualpipe_v(pp: int, micro_batches: int) -> ScheduleTable:
    """Return the table of DualPipeV, which is DualPipe cut in half (Qi et al. 2025): rank r holds stages r, 2P-1-r."""
    rows = [_dualpipe_row(pp, rank, micro_batches, rank, 2 * pp - 1 - rank) for rank in range(pp)]
    return ScheduleTable(
        "dualpipe_v", 2 * pp, micro_batches, _v_ranks(pp),
        tuple(tuple(row.actions) for row in rows), overlaps=tuple(tuple(row.overlaps) for row in rows),
    )  # fmt: skip


def dualpipe(pp: int, micro_batches: int) -> ScheduleTable:
    """Return the table of DualPipe: two copies of the model, each with half of the micro-batches.

    The first copy has stages 0..P-1 on ranks 0 to P-1, the second stages P..2P-1 on ranks P-1 to 0. The rows are
    symmetric: rank P-1-r does the same as rank r, with the two copies exchanged.
    """
    half, share = pp // 2, micro_batches // 2
    rows = []
    for rank in range(pp):
        down, up = rank, 2 * pp - 1 - rank
        near, far = (down, up) if rank < half else (up, down)
        first = {down: 0, up: share}
        rows.append(_dualpipe_row(half, min(rank, pp - 1 - rank), share, near, far, first))
    return ScheduleTable(
        "dualpipe", 2 * pp, micro_batches, _v_ranks(pp), tuple(tuple(row.actions) for row in rows),
        copies=2, overlaps=tuple(tuple(row.overlaps) for row in rows),
    )  # fmt: skip


def _dualpipe_row(
    ranks: int, rank: int, micro_batches: int, near: int, far: int, first: dict[int, int] | None = None
) -> _Row:
    """Return the row of one rank, in the eight phases of figure 5 of DeepSeek-V3, one loop for each.

    ranks: length of the V: half of the ranks for DualPipe, all for DualPipeV. rank: this rank's distance from its end
    of the V, from 0. micro_batches: their number in each copy of the model. near, far: the rank's two stages: the one
    nearer to the input of its copy of the model, and the one nearer to the loss. first: number of the first
    micro-batch on each of these stages; None: 0.
    """
    row = _Row(first or {near: 0, far: 0})
    for _ in range(2 * (ranks - rank - 1)):
        row.forward(near)
    for _ in range(rank + 1):
        row.forward(near)
        row.forward(far)
    for _ in range(ranks - rank - 1):
        row.backward_input(far)
        row.backward_weight()
        row.forward(far)
    for index in range(micro_batches - 2 * ranks + rank + 1):
        if index == 0 and rank == ranks - 1:
            # The very first gradient: not overlapped, because other ranks wait for it.
            row.forward(near)
            row.backward(far)
        else:
            row.forward_and_backward(near, far)
        row.forward_and_backward(far, near)
    for _ in range(ranks - rank - 1):
        row.backward(far)
        row.forward_and_backward(far, near)
    # From the middle of this phase on, the weights' gradients are delayed until the end.
    for index in range(2 * (rank + 1)):
        stage = near if index % 2 else far
        if index < rank + 1:
            row.backward(stage)
        else:
            row.backward_input(stage)
    for _ in range(ranks - rank - 1):
        row.backward_weight()
        row.backward_input(near)
    for _ in range(rank + 1):
        row.backward_weight()
    return row


def _v_ranks(pp: int) -> tuple[int, ...]:
    return tuple(min(stage, 2 * pp - 1 - stage) for stage in range(2 * pp))
