"""Is a table a schedule: everything done once, in an order that the ranks can play without waiting for ever."""

from collections import Counter, deque
from collections.abc import Iterator

from ingot.errors import ConfigError
from ingot.theory.schedule.table import Action, Channel, Message, Table, channel_order, needed_by, sent_by


def check_table(table: Table) -> None:
    """Raises ConfigError unless every stage does F, then B or I and W, once for each of its micro-batches, on the rank
    that holds it, and the rows can be played with blocking receives on FIFO channels."""
    problems = list(_row_problems(table)) or list(_play_problems(table))
    if problems:
        shown = "\n".join(problems[:5] + ([f"and {len(problems) - 5} more"] if len(problems) > 5 else []))
        raise ConfigError(
            f"the pipeline schedule {table.name!r} ({table.ranks} ranks, {table.stages} stages, "
            f"{table.micro_batches} micro-batches) cannot be played:\n{shown}",
            rule="every stage does F, then B (or I, then W) once for each micro-batch, after its neighbours",
            fix="take a table of ingot.theory.schedule.build_table",
        )


def _row_problems(table: Table) -> Iterator[str]:
    """What a rank sees without the others."""
    for rank, row in enumerate(table.rows):
        counts = Counter((action.kind, action.stage, action.micro_batch) for action in row)
        expected = {(stage, m) for stage in table.stages_of(rank) for m in table.micro_batches_of(stage)}
        for kind, stage, m in counts:
            if (stage, m) not in expected:
                yield f"rank {rank}: {kind} of micro-batch {m} on stage {stage} has no place there"
        for stage, m in sorted(expected):
            done = "".join(kind * counts[kind, stage, m] for kind in "FBIW")
            if done not in ("FB", "FIW"):
                yield f"rank {rank}: micro-batch {m} on stage {stage} is given {done or 'nothing'} instead of FB or FIW"
        yield from _order_problems(table, rank)


def _order_problems(table: Table, rank: int) -> Iterator[str]:
    """Actions that come before what they need from the same rank."""
    done: set[tuple[str, int, int]] = set()
    for action in table.rows[rank]:
        way, stage, m = action.kind.replace("I", "B"), action.stage, action.micro_batch
        source = table.source_of(action)
        needs = [("B", stage, m)] if way == "W" else [("F", stage, m)] if way == "B" else []
        if source is not None and table.rank_of_stage[source] == rank:
            needs.append((way, source, m))
        if not done.issuperset(needs):
            yield f"rank {rank}: {action} comes before what it needs"
        done.add((way, stage, m))


def _play_problems(table: Table) -> Iterator[str]:
    """Plays the rows: a rank takes messages off a channel, oldest first, until it holds the one that it needs."""
    waiting = {channel: deque[Message]() for channel in channel_order(table)}
    held: set[tuple[Channel, Message]] = set()
    left = [deque(row) for row in table.rows]

    def ready(action: Action) -> bool:
        need = needed_by(table, action)
        if need is None:
            return True
        while need not in held and waiting[need[0]]:
            held.add((need[0], waiting[need[0]].popleft()))
        return need in held

    moved = True
    while moved:
        moved = False
        for row in left:
            while row and ready(row[0]):
                if sent := sent_by(table, row.popleft()):
                    waiting[sent[0]].append(sent[1])
                moved = True
    for rank, row in enumerate(left):
        if row:
            yield f"rank {rank} waits for ever before {row[0]}"
