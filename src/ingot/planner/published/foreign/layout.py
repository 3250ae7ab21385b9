"""The layout and batch of a published run as Parallel and Train.

Degrees that do not multiply to the number of devices: data parallelism takes what tensor, context and pipeline leave.
No micro-batch: 1 in a pipeline, else the largest part of a replica's batch of at most 8,192 tokens per device. No
batch: 4M tokens, or so many more that replicas have 8,192 each, or a pipeline twice as many micro-batches of them as it
is long.
No layout at all: FSDP on TPUs and for up to 20B parameters, else tensor parallelism inside the node and as short a
pipeline as holds the state.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, cast

from ingot.planner.published.foreign.hardware import slices_of
from ingot.planner.published.foreign.row import Row
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.nearest import divisors
from ingot.schema.parallel import Parallel, Schedule
from ingot.schema.run import Train
from ingot.theory.params import (
    block_active_moe_parameters,
    block_attention_parameters,
    block_mlp_parameters,
    count_parameters,
)

_MICRO_BATCH_TOKENS = 8192
_BATCH_TOKENS = 4 * 2**20
_SHARDED_PARAMETERS = 20e9
_STATE_BYTES = 18  # of a parameter in mixed precision with fp32 gradients (theory/state.py)
# NVIDIA's recipes behind its tables set grad_reduce_in_fp32 to false.
_SHORT_GRADIENTS = r"\bnemo\b|megatron-bridge"
_SCHEDULES = {
    "zb-1p": "zb_h1", "zb-2p": "zb_2p", "zb-h1": "zb_h1", "zb-h2": "zb_h2", "zb-v": "zb_v", "zbv": "zb_v",
    "dualpipe": "dualpipe_v", "dualpipev": "dualpipe_v", "gpipe": "gpipe", "afab": "gpipe", "1f1b": "1f1b",
    "interleaved": "interleaved",
}  # fmt: skip


@dataclass(frozen=True)
class Degrees:
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    zero: int


def degrees_of(row: Row, arch: Arch, cluster: Cluster, count: int, notes: list[str]) -> Degrees:
    """`count` devices; their product is what the row's degrees allow, which may be fewer."""
    known = {axis: row.count("plan", axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
    if known["tp"] is None and known["pp"] is None and known["dp"] is None:
        return _usual(arch, cluster, count, notes)
    tp, pp, cp = (known[axis] or 1 for axis in ("tp", "pp", "cp"))
    dp = max(count // (tp * pp * cp), 1)
    if known["dp"] not in (None, dp):
        notes.append(f"dp {dp} instead of {known['dp']}, so that all degrees multiply to {count} devices")
    ep = known["ep"] or 1 if arch.is_moe else 1
    if arch.is_moe and (arch.moe.num_experts % ep or (dp * cp * tp) % ep):
        nearest = [d for d in divisors(arch.moe.num_experts) if d <= ep and (dp * cp * tp) % d == 0][-1]
        notes.append(f"ep {nearest} instead of {ep}, which does not divide experts and ranks")
        ep = nearest
    zero = row.value("plan", "fsdp_zero")
    return Degrees(dp, tp, pp, cp, ep, zero if zero in (0, 1, 2, 3) else 1)


def _usual(arch: Arch, cluster: Cluster, count: int, notes: list[str]) -> Degrees:
    parameters, node = count_parameters(arch), cluster.devices_per_node
    if parameters <= _SHARDED_PARAMETERS or cluster.device == "tpu":
        notes.append("no layout is given: FSDP")
        return Degrees(count, 1, 1, 1, 1, 3)
    pp = 1
    while parameters * _STATE_BYTES / (node * pp) > cluster.memory_bytes / 2 and node * pp * 2 <= count:
        pp *= 2
    notes.append(f"no layout is given: tp {node}, pp {pp}, ZeRO-1 over the rest")
    return Degrees(max(count // (node * pp), 1), node, pp, 1, 1, 1)


def batch_of(row: Row, seq_len: int, degrees: Degrees, notes: list[str]) -> tuple[int, int]:
    """(global batch, micro-batch) in sequences; a replica's batch is a whole number of micro-batches."""
    batch, micro = row.count("plan", "global_batch"), row.count("plan", "micro_batch")
    if batch is None:
        stated = re.search(r"batch (\d+) ?x ?(\d+)", row.words)
        if stated and int(stated[2]) == seq_len:
            batch = int(stated[1])
        elif micro is not None:
            batch = micro * degrees.dp
        else:
            busy = _MICRO_BATCH_TOKENS * degrees.dp * (2 * degrees.pp if degrees.pp > 1 else 1)
            batch = max(max(_BATCH_TOKENS, busy) // seq_len, 1)
        notes.append(f"a batch of {batch} sequences")
    replica = max(batch // degrees.dp, 1)
    if micro is None:
        room = max(_MICRO_BATCH_TOKENS * degrees.cp * degrees.tp // seq_len, 1) if degrees.pp == 1 else 1
        micro = max(part for part in divisors(replica) if part <= room)
        notes.append(f"a micro-batch of {micro}")
    micro = min(micro, replica)
    whole = degrees.dp * micro * max(round(batch / (degrees.dp * micro)), 1)
    if whole != batch:
        notes.append(f"a batch of {whole} sequences, which {degrees.dp} x {micro} divides, scaled to {batch}")
    return whole, micro


def train_of(row: Row, seq_len: int, batch: int, micro: int) -> Train:
    """Low-precision products are a property of the software; what surrounds them is bf16."""
    precision = "fp16" if row.text("plan", "precision") == "fp16" else "bf16"
    if row.text("plan", "precision") in ("fp32", "tf32"):
        precision = "fp32"
    return Train(steps=1, seq_len=seq_len, global_batch=batch, micro_batch=micro, precision=precision)


def parallel_of(
    row: Row, arch: Arch, cluster: Cluster, degrees: Degrees, accumulation: int, notes: list[str]
) -> Parallel:
    dp = degrees.dp
    copies = dp if degrees.zero == 0 and degrees.ep == 1 else 1
    if degrees.zero == 3 and cluster.device == "tpu" and dp % slices_of(row) == 0:
        copies = slices_of(row)  # parameters are gathered inside of a slice, not over the network between slices
    recompute, every = _recompute(row, cluster, degrees)
    parallel = Parallel(
        dp_replicate=copies,
        dp_shard=dp // copies,
        tp=degrees.tp,
        cp=degrees.cp,
        ep=degrees.ep,
        zero=cast(Any, degrees.zero or 1),
        grads="bf16" if re.search(_SHORT_GRADIENTS, row.words) else "fp32",
        context="ring" if degrees.cp > 1 else "auto",
        sequence=_sequence(row, arch) if degrees.tp > 1 else True,
        recompute=recompute,
        recompute_every=every,
    )
    return _with_pipeline(row, arch, parallel, degrees.pp, accumulation, notes)


def _sequence(row: Row, arch: Arch) -> bool:
    """Sequence parallelism came to Megatron in 2022 (Korthikanti et al. 2022). Experts see tokens of one rank only."""
    stated = row.flag("plan", "sp")
    return arch.is_moe or (row.year >= 2023 if stated is None else stated)


def recomputed_share(row: Row) -> float:
    """Of a forward, by what hardware and model FLOPs differ where a source says "yes" to recomputation; else 0."""
    model, hardware = row.number("measured", "mfu_pct"), row.number("measured", "hfu_pct")
    if not row.text("plan", "recompute").startswith("yes") or model is None or hardware is None:
        return 0.0
    share = 3 * (hardware / model - 1)
    return share if 0 < share < 0.95 else 0.0


def _recompute(row: Row, cluster: Cluster, degrees: Degrees) -> tuple[Any, int]:
    """Nothing said: none; but with FSDP, of which nothing is said either, on GPUs until 2023: its default then."""
    said = row.text("plan", "recompute")
    if recomputed_share(row):
        return "selective", 1
    unknown = all(row.count("plan", axis) is None for axis in ("dp", "tp", "pp"))
    whole = degrees.tp * degrees.pp == 1
    if not said and unknown and whole and row.year <= 2023 and cluster.device == "cuda":
        return "full", 1
    if not said or said.startswith(("none", "no", "off")):
        return "none", 1
    return ("selective" if "sel" in said else "full"), 1


def _with_pipeline(row: Row, arch: Arch, parallel: Parallel, pp: int, accumulation: int, notes: list[str]) -> Parallel:
    if pp == 1:
        return parallel
    said, virtual = row.text("plan", "schedule"), row.count("plan", "vpp") or 0
    # Megatron overlaps a pipeline's sends in the interleaved schedule only, and its large runs have used it since 2021.
    usual = not said and re.search(r"overlaps dp/tp/pp|megatron-core", row.words)
    interleaved = "interleaved" in said or virtual > 1 or usual
    name = _SCHEDULES.get(said, "interleaved" if interleaved else "1f1b")
    if name == "interleaved" and virtual < 2:
        virtual = next((v for v in divisors(max(arch.num_layers // pp, 1)) if v > 1), 1)
        notes.append(f"{virtual} stages on each rank")
    if name == "interleaved" and (virtual < 2 or accumulation % pp):
        if accumulation % pp:
            notes.append(f"1f1b: {accumulation} micro-batches are no multiple of {pp} ranks")
        name = "1f1b"
    each = virtual if name == "interleaved" else 0
    stages = pp * (each or (2 if name in ("zb_v", "dualpipe", "dualpipe_v") else 1))
    return replace(
        parallel,
        pp=pp,
        schedule=cast(Schedule, name),  # some are simulated only, and no run file may name them
        stages_per_rank=each,
        stage_layers=_balanced(arch, stages),
    )


def _balanced(arch: Arch, stages: int) -> tuple[int, ...]:
    """Blocks of each stage where layers do not divide evenly: the head counts as the blocks that it costs as much as.
    (): as ingot does it, which is even where they divide."""
    passes = arch.head_passes
    if passes == 1 or arch.num_layers < stages:
        return ()
    feed_forward = block_active_moe_parameters(arch) if arch.is_moe else block_mlp_parameters(arch)
    block = block_attention_parameters(arch) + feed_forward
    head = passes * arch.vocab_size * arch.d_model / block
    each = (arch.num_layers + head) / stages
    last = max(round(each - head), 1)
    rest, left = divmod(arch.num_layers - last, stages - 1)
    return (*(rest + (stage < left) for stage in range(stages - 1)), last)
