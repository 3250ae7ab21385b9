"""The tables of the published schedules, from their descriptions. Sources: published.py."""

import math
from collections.abc import Callable, Iterator

from ingot.errors import ConfigError
from ingot.theory.schedule.table import Action, Table
from ingot.theory.schedule.v_shaped import dualpipe, dualpipe_v, zb_v

Slot = tuple[int, int]  # stage, micro-batch

# The last three are simulated only: zb_h2 and zb_2p hold twice the activations of 1f1b, dualpipe holds the model twice.
NAMES = (
    "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v", "zb_h2", "zb_2p",
    "dualpipe",
)  # fmt: skip
# Of zb_2p: how many W per rank are left behind. The last ranks give back as many I as the first ones need to go on, and
# put off W meanwhile: (F+I)/W for each rank above them, which is 2 without attention and nearly 4 with much of it.
_PUT_OFF = 3.5
_ONE_STAGE = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_2p")
_TWO_STAGES = ("zb_v", "dualpipe_v", "dualpipe")


def build_table(name: str, pp: int, micro_batches: int, stages_per_rank: int = 0) -> Table:
    """The table of a schedule on `pp` ranks; one rank alone does F and B in turn, whatever the schedule.

    stages_per_rank: 0 means 1 or 2, what the schedule needs. Raises ConfigError where schedule_problems finds any.
    """
    for problem in schedule_problems(name, pp, micro_batches, stages_per_rank):
        raise ConfigError(
            f"no table {name!r} for pp={pp}, micro_batches={micro_batches}, stages_per_rank={stages_per_rank}",
            rule=problem,
            fix="choose other values, or the schedule 1f1b, which takes any number",
        )
    if pp == 1:
        return _looped(name, 1, 1, micro_batches, lambda rank: 0)
    each = stages_per_rank or 2
    depth_first = (each - 1) * pp  # forwards on the last rank before its first backward
    match name:
        case "gpipe":
            return _looped(name, pp, 1, micro_batches, lambda rank: micro_batches)
        case "1f1b":
            return _looped(name, pp, 1, micro_batches, lambda rank: pp - 1 - rank)
        case "zb_h1":
            return _looped(name, pp, 1, micro_batches, lambda rank: pp - 1 - rank, lambda rank: rank)
        case "zb_h2":
            return _looped(name, pp, 1, micro_batches, lambda rank: 2 * (pp - 1 - rank), lambda rank: 2 * rank)
        case "zb_2p":
            return _looped(
                name, pp, 1, micro_batches, lambda rank: 2 * (pp - 1 - rank), lambda rank: math.ceil(_PUT_OFF * rank)
            )
        case "looped_bfs":
            return _looped(name, pp, each, micro_batches, lambda rank: each * micro_batches, group=micro_batches)
        case "interleaved":
            return _looped(name, pp, each, micro_batches, lambda rank: depth_first + 2 * (pp - 1 - rank))
        case "interleaved_zb":
            return _looped(name, pp, each, micro_batches, lambda rank: depth_first + pp - 1 - rank, lambda rank: rank)
        case "zb_v":
            return zb_v(pp, micro_batches)
        case "dualpipe_v":
            return dualpipe_v(pp, micro_batches)
        case _:
            return dualpipe(pp, micro_batches)


def schedule_problems(name: str, pp: int, micro_batches: int, stages_per_rank: int = 0) -> Iterator[str]:
    """Why there is no such table, with the nearest values that have one."""
    if name not in NAMES:
        yield f"there is no pipeline schedule {name!r}; use one of {', '.join(NAMES)}"
        return
    if pp < 1 or micro_batches < 1:
        yield f"pp={pp} and micro_batches={micro_batches} must be at least 1"
        return
    if pp == 1:
        if stages_per_rank > 1:
            yield f"stages_per_rank={stages_per_rank} has no use with pp=1; use 0"
        return
    if name in _ONE_STAGE and stages_per_rank not in (0, 1):
        yield f"stages_per_rank={stages_per_rank}: {name} has 1 stage on each rank; use 0 or 1, or interleaved"
    elif name in _TWO_STAGES and stages_per_rank not in (0, 2):
        yield f"stages_per_rank={stages_per_rank}: {name} has 2 stages on each rank; use 0 or 2"
    elif name not in _ONE_STAGE and (stages_per_rank < 0 or stages_per_rank == 1):
        instead = {"interleaved": "1f1b", "looped_bfs": "gpipe", "interleaved_zb": "zb_h1"}[name]
        yield f"stages_per_rank={stages_per_rank}: {name} has at least 2 stages on each rank; use 2, or {instead}"
    yield from _micro_batch_problems(name, pp, micro_batches)


def _micro_batch_problems(name: str, pp: int, micro_batches: int) -> Iterator[str]:
    if name in ("interleaved", "interleaved_zb") and micro_batches % pp:
        below = micro_batches - micro_batches % pp
        legal = f"{below} or {below + pp}" if below else f"{pp}"
        yield f"micro_batches={micro_batches}: {name} needs a multiple of pp={pp}; use {legal}"
    if name == "dualpipe" and pp % 2:
        yield f"pp={pp}: dualpipe pairs ranks from both ends and needs an even number; use {pp - 1} or {pp + 1}"
    # Fewer would leave a rank without the pairs of the main phase (DeepSeek's implementation has the same limit).
    if name in ("dualpipe", "dualpipe_v") and micro_batches < 2 * pp:
        yield f"micro_batches={micro_batches}: {name} needs at least 2 pp = {2 * pp}; use {2 * pp}"
    elif name == "dualpipe" and micro_batches % 2:
        legal = f"{micro_batches - 1} or {micro_batches + 1}"
        yield f"micro_batches={micro_batches}: dualpipe gives half to each direction; use {legal}"


def _looped(
    name: str,
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
    warmup: Callable[[int], int],
    delay: Callable[[int], int] | None = None,
    group: int = 0,
) -> Table:
    """Rank r holds stages r, r + P, r + 2P ..

    A group of micro-batches (P of them if not said) passes all of a rank's stages before the next group starts.
    warmup: forwards before the first backward, by rank. delay: backwards come in halves, and this many W are left
    behind.
    """
    rows = []
    for rank in range(pp):
        stages = range(rank, stages_per_rank * pp, pp)
        forwards = list(_grouped(stages, micro_batches, group or pp))
        backwards = list(_grouped(stages[::-1], micro_batches, group or pp))
        rows.append(tuple(_row(forwards, backwards, warmup(rank), None if delay is None else delay(rank))))
    stages = stages_per_rank * pp
    return Table(name, stages, micro_batches, tuple(stage % pp for stage in range(stages)), tuple(rows))


def _grouped(stages: range, micro_batches: int, group: int) -> Iterator[Slot]:
    for first in range(0, micro_batches, group):
        for stage in stages:
            for m in range(first, min(first + group, micro_batches)):
                yield stage, m


def _row(forwards: list[Slot], backwards: list[Slot], warmup: int, delay: int | None) -> Iterator[Action]:
    """Warm-up, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(warmup, len(forwards))
    yield from (Action("F", *slot) for slot in forwards[:ahead])
    for done, slot in enumerate(backwards):
        if ahead + done < len(forwards):
            yield Action("F", *forwards[ahead + done])
        yield Action("B" if delay is None else "I", *slot)
        if delay is not None and done >= delay:
            yield Action("W", *backwards[done - delay])
    if delay is not None:
        yield from (Action("W", *slot) for slot in backwards[max(len(backwards) - delay, 0) :])
