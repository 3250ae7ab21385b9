"""The tables of the published schedules, built from their descriptions, and the authors' formulas for their bubbles.

In these formulas, F, I and W are times of one stage and one micro-batch, B = I + W, and P is the number of ranks. If a
rank holds v stages, papers write F and B for all layers of the rank, which are v times the F and B here.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ingot.errors import ConfigError
from ingot.theory.schedule.table import Action, ScheduleTable
from ingot.theory.schedule.v_shaped import dualpipe, dualpipe_v, zb_v

Slot = tuple[int, int]  # stage, micro-batch

# The last three are simulated only: zb_h2 and zb_2p hold twice the activations of 1f1b, dualpipe holds the model twice.
NAMES = (
    "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v", "zb_h2", "zb_2p",
    "dualpipe",
)  # fmt: skip
# zb_2p: rank r delays r times this number of W. Later ranks do so to send the gradients (I) that earlier ranks wait for
# first. The ideal number is (F+I)/W: 2 without attention, and nearly 4 if attention dominates.
_PUT_OFF = 3.5
_ONE_STAGE = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_2p")
_TWO_STAGES = ("zb_v", "dualpipe_v", "dualpipe")


def build_table(name: str, pp: int, micro_batches: int, stages_per_rank: int = 0) -> ScheduleTable:
    """Return the table of a schedule on `pp` ranks. With one rank, F and B alternate in every schedule.

    name: one of NAMES. stages_per_rank: 0: the schedule's default, 1 or 2. Raises ConfigError with the first of
      `schedule_problems`.
    """
    for problem in schedule_problems(name, pp, micro_batches, stages_per_rank):
        raise ConfigError(
            "E-SCHEDULE-ILLEGAL",
            f"the pipeline schedule {name!r} does not exist for pp={pp}, micro_batches={micro_batches}, "
            f"stages_per_rank={stages_per_rank}",
            rule=problem,
            fix="choose other values, or the schedule 1f1b, which takes any numbers",
            schedule=name,
            pp=pp,
            micro_batches=micro_batches,
            stages_per_rank=stages_per_rank,
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
    """Yield each reason why `build_table` would refuse these arguments, with the nearest legal values."""
    if name not in NAMES:
        yield f"there is no pipeline schedule {name!r}; use one of {', '.join(NAMES)}"
        return
    if pp < 1 or micro_batches < 1:
        yield f"pp={pp} and micro_batches={micro_batches} must be at least 1"
        return
    if pp == 1:
        if stages_per_rank > 1:
            yield f"stages_per_rank={stages_per_rank} has no effect with pp=1; use 0"
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
) -> ScheduleTable:
    """Return a table in which rank r of P holds stages r, r + P, r + 2P ...

    A group of micro-batches passes all of a rank's stages before the next group starts. group: micro-batches per group;
    0: P. warmup: function from a rank to its number of forwards before the 1F1B phase. delay: function from a rank to
    the number of W that it delays; None: backwards are not split into I and W.
    """
    rows = []
    for rank in range(pp):
        stages = range(rank, stages_per_rank * pp, pp)
        forwards = list(_grouped(stages, micro_batches, group or pp))
        backwards = list(_grouped(stages[::-1], micro_batches, group or pp))
        rows.append(tuple(_row(forwards, backwards, warmup(rank), None if delay is None else delay(rank))))
    stages = stages_per_rank * pp
    return ScheduleTable(name, stages, micro_batches, tuple(stage % pp for stage in range(stages)), tuple(rows))


def _grouped(stages: range, micro_batches: int, group: int) -> Iterator[Slot]:
    """Yield (stage, micro-batch) for all actions of one kind on a rank, in order: group by group, stage by stage."""
    for first in range(0, micro_batches, group):
        for stage in stages:
            for m in range(first, min(first + group, micro_batches)):
                yield stage, m


def _row(forwards: list[Slot], backwards: list[Slot], warmup: int, delay: int | None) -> Iterator[Action]:
    """Yield the actions of a rank: the warm-up forwards, then forwards and backwards in turn, then the remaining
    backwards. delay: number of W by which W follows I; None: whole backwards.
    """
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


@dataclass(frozen=True)
class Published:
    """The published bubble of a schedule.

    formula: the formula as text; bubble: the same as a function (ranks, F, I, W, F&B) -> idle time of a rank. F&B is
      the time of a forward and a backward that run together.
    of: the time that contains the bubble: the whole step, or the longest span of one rank (Timeline.step_time, .span).
    exact: the condition under which the table's bubble equals the formula. otherwise: how it differs in other cases.
    """

    formula: str
    source: str
    bubble: Callable[[int, float, float, float, float], float]
    of: Literal["step", "span"] = "step"
    exact: str = "always"
    otherwise: str = ""


_GPIPE = "Huang et al. 2019, arXiv 1811.06965"
_MEGATRON = "Narayanan et al. 2021, arXiv 2104.04473, section 2.2"
_ZERO_BUBBLE = "Qi et al. 2023, arXiv 2401.10241"
_DUALPIPE = "DeepSeek-AI 2024, arXiv 2412.19437, and github.com/deepseek-ai/DualPipe"


def _one_forward_one_backward(ranks: int, f: float, i: float, w: float, fb: float) -> float:
    return (ranks - 1) * (f + i + w)


def _dualpipe(pairs: int, i: float, w: float, fb: float) -> float:
    return (pairs - 1) * (fb + i + w - 3 * w)


PUBLISHED: dict[str, Published] = {
    "gpipe": Published("(P-1)(F+B)", _GPIPE, _one_forward_one_backward),
    "1f1b": Published("(P-1)(F+B)", _MEGATRON, _one_forward_one_backward),
    "interleaved": Published("(P-1)(F+B), F and B of one of the v stages", _MEGATRON, _one_forward_one_backward),
    "looped_bfs": Published(
        "(P-1)(F+B), F and B of one of the v stages",
        "Lamy-Poirier 2022, arXiv 2211.05953",
        _one_forward_one_backward,
        exact="from P micro-batches on",
        otherwise="more",
    ),
    "zb_h1": Published(
        "(P-1)(F+I-W)",
        f"{_ZERO_BUBBLE}, section 2",
        lambda p, f, i, w, fb: (p - 1) * (f + i - w),
        of="span",
        exact="W <= F, from P micro-batches on",
        otherwise="more",
    ),
    "zb_h2": Published(
        "(P-1)(F+I-2W)",
        f"{_ZERO_BUBBLE}, section 2",
        lambda p, f, i, w, fb: (p - 1) * (f + i - 2 * w),
        of="span",
        exact="W <= F and 2W <= F+I, from 2P-1 micro-batches on",
        otherwise="more; never below 0",
    ),
    "zb_2p": Published(
        "0",
        f"{_ZERO_BUBBLE}, section 3 (found by search there, and nearly so by the delays of this table)",
        lambda p, f, i, w, fb: 0.0,
        of="span",
        exact="(F+I)/W <= 3.5, from 3P micro-batches on",
        otherwise="more",
    ),
    "zb_v": Published(
        "0",
        _ZERO_BUBBLE,
        lambda p, f, i, w, fb: 0.0,
        of="span",
        exact="F = I = W, from 2P-1 micro-batches on",
        otherwise="more",
    ),
    "dualpipe": Published(
        "(P/2-1)(F&B+B-3W)",
        _DUALPIPE,
        lambda p, f, i, w, fb: _dualpipe(p // 2, i, w, fb),
        exact="F = I = W and F&B = F+B",
        otherwise="with F = I = W and a shorter F&B, at most this",
    ),
    "dualpipe_v": Published(
        "(P-1)(F&B+B-3W)",
        f"{_DUALPIPE}, where P counts stages, 2 per rank; Qi et al. 2025, huggingface.co/blog/ufotalent/cut-in-half",
        lambda p, f, i, w, fb: _dualpipe(p, i, w, fb),
        exact="F = I = W and F&B = F+B",
        otherwise="with F = I = W and a shorter F&B, at most this",
    ),
}
