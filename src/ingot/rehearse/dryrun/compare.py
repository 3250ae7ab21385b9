"""What a rank was seen to do beside what the formulas of theory/ say about it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ingot.theory.axes import spanned
from ingot.theory.context import BACKWARD_TO_FORWARD, imbalance
from ingot.theory.flops import mean_keys
from ingot.theory.layout import Position
from ingot.theory.traffic import sent_by_axis, step_traffic
from ingot.theory.work import Work, step_work

if TYPE_CHECKING:
    from ingot.rehearse.dryrun.dry_run import Trace

# What goes to the whole world at the end of a step (the norm of clipping, the routers' table) is no traffic of an axis.
WORLD = "world"


@dataclass(frozen=True)
class Compared:
    """A figure as traced and as the formulas have it. other_loads: of experts in the trace, which makes them differ."""

    rank: int
    what: str
    traced: float
    formula: float
    other_loads: bool = False

    @property
    def deviation(self) -> float:
        return abs(self.traced - self.formula) / max(abs(self.formula), abs(self.traced), 1.0)

    @property
    def agrees(self) -> bool:
        return self.other_loads or self.deviation <= 0.01


def useful_flops(place: Position, device: str) -> float:
    work = step_work(replace(place, parallel=replace(place.parallel, recompute="none")), device)
    return work.matmul_flops + work.attention_flops


def _attention_flops(trace: "Trace", place: Position, work: Work) -> float:
    """What the formula would be if it counted the pairs that kernels go through on this rank: those behind a mask too,
    and of contiguous parts this rank's, where it has those of the last rank."""
    parallel, arch, seq_len = place.parallel, place.arch, place.train.seq_len
    uneven = imbalance(parallel, seq_len, arch.sliding_window) if parallel.ring > 1 else 1.0
    seen = seq_len / parallel.ring * mean_keys(seq_len, arch.sliding_window) * uneven
    blocks = sum(len(stage.layers) for stage in place.stages)
    again = sum(map(place.recomputed, place.stages)) if parallel.recompute == "full" else 0
    forwards = (1 + BACKWARD_TO_FORWARD) * blocks + again
    chunked = 1 + blocks / forwards if trace.attended_again else 1.0
    return work.attention_flops * trace.attended / seen * chunked


def compare(trace: "Trace", place: Position, device: str, other_loads: bool = False) -> list[Compared]:
    """other_loads: not those of the formulas, with which all experts have the same."""
    work, formulas = step_work(place, device), sent_by_axis(step_traffic(place, device))
    found = [
        Compared(trace.rank, "matrix products, FLOP", trace.matmul_flops, work.matmul_flops, other_loads),
        Compared(trace.rank, "attention, FLOP", trace.attention_flops, _attention_flops(trace, place, work)),
    ]
    to_experts = spanned(place.parallel, "ep")
    for axis in dict.fromkeys((*trace.sent, *formulas)):
        if axis != WORLD:
            traced, formula = trace.sent.get(axis, 0.0), formulas.get(axis, 0.0)
            changed = other_loads and axis == to_experts
            found.append(Compared(trace.rank, f"sent over {axis}, B", traced, formula, changed))
    return found
