"""The memory bill of one rank at the moment of its peak, by kind."""

from dataclasses import replace

from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory import activations, memory
from ingot.theory.layout import Position, positions
from ingot.theory.term import Term

# Loader, tokenizer, held-out text and checkpoint buffers of a rank: seen from 13 MiB at the start of a quickstart run
# to 60 MiB at its end. With a GPU they lie on the host, not on the device.
_HOST_PARTS_BYTES = 32 * 1024**2


def memory_bill(run: RunConfig, cluster: Cluster) -> dict[str, Term]:
    """Terms that sum to the peak memory of one rank: what is alive then, what the allocator loses, and the process."""
    bill = live_bill(run, cluster.device)
    live = sum(term.value for term in bill.values())
    if cluster.fragmentation:
        formula = f"{cluster.fragmentation:.0%} of the above: what the allocator holds and cannot use"
        bill["fragmentation"] = Term(live * cluster.fragmentation, formula)
    source = "measured" if cluster.measured else "assumed"
    bill["runtime"] = Term(cluster.runtime_bytes, f"{source}: interpreter, libraries and device context of one process")
    if cluster.device == "cpu":
        bill["loader and buffers"] = Term(
            _HOST_PARTS_BYTES, "seen: loader, tokenizer, held-out text, checkpoint buffers"
        )
    return bill


def live_bill(run: RunConfig, device: str) -> dict[str, Term]:
    """Tensors that are alive at the peak, by kind, on the pipeline rank that holds the most."""
    return max((position_bill(position, device) for position in positions(run)), key=_total)


def position_bill(position: Position, device: str) -> dict[str, Term]:
    """Tensors of one pipeline rank that are alive at the largest of its moments.

    At the loss every activation is saved and a chunk of logits is there. When the backward begins, its buffers are, and
    what is recomputed. When it ends, activations are gone and gradients are on their way between ranks. At the update
    bf16 gradients are converted. Masters, moments and gathered weights are there at all of them. (Held-out scoring
    passes its logits in the same chunks and saves nothing.)
    """
    if device == "cpu":
        position = _without_host_offload(position)
    kept = memory.gradients_kept(position)
    saved, backward = activations.activations(position, device), activations.backward_buffers(position, device)
    again = activations.recompute_buffers(position, device)
    moments = [
        {"gradients": kept, "activations": saved, "logits": memory.logits(position, device)},
        {"gradients": kept, "activations": _joined(saved, backward, again)},
        {"gradients": memory.gradients(position), "activations": backward},
        {"gradients": memory.gradients_at_update(position)},
    ]
    return {
        "weights": memory.weights(position),
        "optimizer": memory.optimizer(position),
        "gathered": memory.gathered(position),
        **max(moments, key=_total),
    }


def _without_host_offload(position: Position) -> Position:
    """On a CPU the host's memory is the device's."""
    if position.parallel.offload != "cpu":
        return position
    return replace(position, parallel=replace(position.parallel, offload="none", offload_parameters=False))


def _joined(*terms: Term) -> Term:
    present = [term for term in terms if term.value] or terms[:1]
    return Term(sum(term.value for term in present), " + ".join(term.formula for term in present))


def _total(bill: dict[str, Term]) -> float:
    return sum(term.value for term in bill.values())


def rank_memory_bytes(cluster: Cluster, ranks: int) -> float:
    """What one rank may use. The processes of one CPU machine share its memory."""
    if cluster.device != "cpu":
        return cluster.memory_bytes
    on_one_machine = -(-ranks // cluster.nodes)
    return cluster.memory_bytes / on_one_machine
