"""The memory bill of one rank at the moment of its peak, by kind."""

from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory import memory
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
    """Tensors that are alive at the peak, by kind: at the largest of three moments.

    At the loss every activation is saved and a chunk of logits is there. At the end of the backward, activations are
    gone and whole gradients are there. Held-out scoring saves nothing, but holds the logits of a micro-batch. Masters,
    moments and gathered weights are there at all of them.
    """
    arch, precision, train = run.model, run.train.precision, run.train
    ranks, tokens = run.parallel.data_ranks, train.micro_batch * train.seq_len
    at_loss = {
        "gradients": memory.gradients_at_loss(arch, precision, ranks, run.accumulation),
        "activations": memory.activations(arch, precision, tokens, device),
        "logits": memory.logits(arch, precision, tokens, device),
    }
    at_end = {
        "gradients": memory.gradients(arch, precision, ranks, run.accumulation),
        "activations": memory.backward_buffers(arch, precision, tokens, device),
    }
    moments = [at_loss, at_end]
    if run.data.heldout:
        moments.append({"logits": memory.evaluation_logits(arch, precision, train.micro_batch, train.seq_len)})
    return {
        "weights": memory.weights(arch, precision, ranks),
        "optimizer": memory.optimizer(arch, precision, ranks),
        "gathered": memory.gathered(arch, precision),
        **max(moments, key=lambda moment: sum(term.value for term in moment.values())),
    }


def rank_memory_bytes(cluster: Cluster, ranks: int) -> float:
    """What one rank may use. The processes of one CPU machine share its memory."""
    if cluster.device != "cpu":
        return cluster.memory_bytes
    on_one_machine = -(-ranks // cluster.nodes)
    return cluster.memory_bytes / on_one_machine
