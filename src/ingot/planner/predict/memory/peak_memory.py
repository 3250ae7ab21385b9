"""The memory bill of one rank at the moment of its peak, by kind; of every pipeline rank; and at every moment of a run.

What is alive comes from theory/: state (theory/memory.py), and what forwards and backwards of the schedule hold
(theory/peak.py). Here it becomes terms with their formulas, and what no formula of the model gives is added: what the
allocator loses, and the process.
"""

from dataclasses import replace

from ingot.planner.predict.memory.memory_text import activations_formula, gathered_formula, gradients_formula
from ingot.planner.predict.memory.peak import peak
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.theory import memory
from ingot.theory.layout import Position, positions
from ingot.theory.term import Term

# Loader, tokenizer, held-out text and checkpoint buffers of a rank: seen from 13 MiB at the start of a quickstart run
# to 60 MiB at its end. With a GPU they lie on the host, not on the device.
_HOST_PARTS_BYTES = 32 * 1024**2


def memory_bill(run: RunConfig, cluster: Cluster, software: Software = INGOT) -> dict[str, Term]:
    """Terms that sum to the peak memory of one rank: what is alive then, what the allocator loses, and the process."""
    return _with_process(live_bill(run, cluster.device, software), run, cluster)


def stage_bills(run: RunConfig, cluster: Cluster, software: Software = INGOT) -> tuple[dict[str, Term], ...]:
    """The same of each pipeline rank, in order."""
    bills = (position_bill(position, cluster.device) for position in positions(run, software))
    return tuple(_with_process(bill, run, cluster) for bill in bills)


def moments(run: RunConfig, cluster: Cluster, software: Software = INGOT) -> dict[str, Term]:
    """The peak of the rank that needs the most, with fragmentation and process: at "initialisation", "first step",
    "steady state" and "save".

    The trainer makes both moments of AdamW as zeros at its start, so its first step is as large as any other.
    """
    device = cluster.device
    position = max(positions(run, software), key=lambda position: _live_bytes(position, device))
    bill = position_bill(position, device)
    if device == "cpu":
        position = _without_host_offload(position)
    state = [memory.weights(position), memory.optimizer(position)]
    state += [memory.gathered(position)] if position.parallel.zero != 3 else []
    coming = memory.first_units(position)
    between = memory.buffers_that_stay(position)
    parts = {
        "initialisation": [*state, coming],
        "first step": list(bill.values()),
        "steady state": list(bill.values()),
        "save": [*state, between, coming],
    }
    return {
        name: _joined(_with_process({str(i): t for i, t in enumerate(terms)}, run, cluster))
        for name, terms in parts.items()
    }


def live_bill(run: RunConfig, device: str, software: Software = INGOT) -> dict[str, Term]:
    """Tensors that are alive at the peak, by kind, on the pipeline rank that holds the most."""
    places = positions(run, software)
    return position_bill(places[0] if len(places) == 1 else max(places, key=lambda p: _live_bytes(p, device)), device)


def position_bill(position: Position, device: str) -> dict[str, Term]:
    """Tensors of one pipeline rank that are alive at the largest of its moments, or at the update, where gradients of
    another dtype are converted. Held-out scoring passes its logits in the same chunks and saves nothing."""
    if device == "cpu":
        position = _without_host_offload(position)
    found = peak(position, device)
    state = {"weights": memory.weights(position), "optimizer": memory.optimizer(position)}
    whole = {} if position.parallel.zero == 3 else {"gathered": memory.gathered(position)}
    updating = memory.gradients_at_update(position)
    if updating.value > found.moment.bytes:
        return {**state, **whole, "gradients": updating}
    gathered = whole or {"gathered": Term(found.moment.gathered, gathered_formula(position, found))}
    logits = {"logits": memory.logits(position, device)} if found.moment.logits else {}
    return {
        **state,
        **gathered,
        "gradients": Term(found.moment.gradients, gradients_formula(position, found)),
        "activations": Term(
            found.moment.activations + found.moment.backward, activations_formula(position, found, device)
        ),
        **logits,
    }


def _live_bytes(position: Position, device: str) -> float:
    """The sum of `position_bill`, sooner: only one rank's formulas are read."""
    if device == "cpu":
        position = _without_host_offload(position)
    state = memory.weights(position).value + memory.optimizer(position).value
    whole = 0.0 if position.parallel.zero == 3 else memory.gathered(position).value
    return state + whole + max(peak(position, device).moment.bytes, memory.gradients_at_update(position).value)


def _with_process(bill: dict[str, Term], run: RunConfig, cluster: Cluster) -> dict[str, Term]:
    live = _total(bill)
    if cluster.fragmentation:
        formula = f"{cluster.fragmentation:.0%} of the above: what the allocator holds and cannot use"
        bill["fragmentation"] = Term(live * cluster.fragmentation, formula)
    bill["runtime"] = _runtime(run, cluster)
    if cluster.device == "cpu":
        bill["loader and buffers"] = Term(
            _HOST_PARTS_BYTES, "seen: loader, tokenizer, held-out text, checkpoint buffers"
        )
    return bill


def _runtime(run: RunConfig, cluster: Cluster) -> Term:
    source = "measured" if cluster.measured else "assumed"
    formula = f"{source}: interpreter, libraries and device context of one process"
    return Term(cluster.runtime_bytes, formula)


def _without_host_offload(position: Position) -> Position:
    """On a CPU the host's memory is the device's."""
    if position.parallel.offload != "cpu":
        return position
    return replace(position, parallel=replace(position.parallel, offload="none", offload_parameters=False))


def _joined(bill: dict[str, Term]) -> Term:
    present = [term for term in bill.values() if term.value]
    return Term(_total(bill), " + ".join(term.formula for term in present))


def _total(bill: dict[str, Term]) -> float:
    return sum(term.value for term in bill.values())


def rank_memory_bytes(cluster: Cluster, ranks: int) -> float:
    """What one rank may use. The processes of one CPU machine share its memory."""
    if cluster.device != "cpu":
        return cluster.memory_bytes
    on_one_machine = -(-ranks // cluster.nodes)
    return cluster.memory_bytes / on_one_machine
