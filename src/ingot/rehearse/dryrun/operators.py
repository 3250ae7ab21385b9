"""Facts about operations of PyTorch that a trace needs."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ingot.rehearse.dryrun.calls import flop_formula, is_collective
from ingot.trainer.torch_private import operator_packet

# Operations that only allocate, or describe: a device starts no kernel for them.
_WITHOUT_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "promote_types",
}


class Operator(NamedTuple):
    """The facts about an operation of PyTorch that the tracker needs. flops: counts its FLOPs, None if it has none.
    starts: a device works for it."""

    name: str
    is_collective: bool
    is_view: bool
    starts: bool
    flops: Callable[..., int] | None


@cache
def operator_of(func) -> Operator:
    packet = operator_packet(func)
    starts = packet.__name__ not in _WITHOUT_KERNEL and func.namespace != "profiler"
    return Operator(packet.__name__, is_collective(func), func.is_view, starts, flop_formula(packet))
