"""The hardware, layout and batch of a published run as Cluster, Parallel and Train.

Rules fill in missing or inconsistent values:

- Degrees do not multiply to the number of devices: tp, cp and pp are kept, and dp is all remaining ranks.
- No micro-batch: 1 in a pipeline, else the largest divisor of a replica's batch with at most 8,192 tokens per device.
- No batch: 4M tokens, or more if that leaves a replica fewer than 8,192 tokens (in a pipeline, 2 pp times as many).
- No layout: FSDP on TPUs and for up to 20B parameters, else tensor parallelism inside the node and the shortest
  pipeline that holds the state.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, cast

from ingot.planner.published.row import PublishedRow
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel, PipelineSchedule
from ingot.schema.run import Train
from ingot.theory.devices import Device, cluster_of, find_device
from ingot.theory.params import (
    block_active_moe_parameters,
    block_attention_parameters,
    block_mlp_parameters,
    count_parameters,
)
from ingot.theory.rules.nearest import divisors

_MICRO_BATCH_TOKENS = 8192
_BATCH_TOKENS = 4 * 2**20
_SHARDED_PARAMETERS = 20e9
_STATE_BYTES = 18  # state of one parameter in mixed precision with fp32 gradients (theory/params.py)
# NVIDIA's tables are measured with recipes that set grad_reduce_in_fp32 to false, so gradients are reduced in bf16.
_SHORT_GRADIENTS = r"\bnemo\b|megatron-bridge"
_SCHEDULES = {
    "zb-1p": "zb_h1", "zb-2p": "zb_2p", "zb-h1": "zb_h1", "zb-h2": "zb_h2", "zb-v": "zb_v", "zbv": "zb_v",
    "dualpipe": "dualpipe_v", "dualpipev": "dualpipe_v", "gpipe": "gpipe", "afab": "gpipe", "1f1b": "1f1b",
    "interleaved": "interleaved",
}  # fmt: skip


@dataclass(frozen=True)
class Degrees:
    """The degrees of a layout. zero: the ZeRO stage; 0 is plain data parallelism."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    zero: int


def degrees_of(row: PublishedRow, arch: Arch, cluster: Cluster, count: int, notes: list[str]) -> Degrees:
    """Return the degrees of the row's layout on `count` devices. Their product is less than `count` if tp * cp * pp
    does not divide `count`."""
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
        notes.append(f"ep {nearest} instead of {ep}, which does not divide the experts and the ranks")
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


def batch_of(row: PublishedRow, seq_len: int, degrees: Degrees, notes: list[str]) -> tuple[int, int]:
    """Return (global batch, micro-batch) in sequences, such that each replica has a whole number of micro-batches."""
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
        notes.append(f"the batch is taken as {batch} sequences")
    replica = max(batch // degrees.dp, 1)
    if micro is None:
        room = max(_MICRO_BATCH_TOKENS * degrees.cp * degrees.tp // seq_len, 1) if degrees.pp == 1 else 1
        micro = max(part for part in divisors(replica) if part <= room)
        notes.append(f"the micro-batch is taken as {micro}")
    micro = min(micro, replica)
    whole = degrees.dp * micro * max(round(batch / (degrees.dp * micro)), 1)
    if whole != batch:
        notes.append(f"a batch of {whole} sequences, which {degrees.dp} x {micro} divides, scaled to {batch}")
    return whole, micro


def train_of(row: PublishedRow, seq_len: int, batch: int, micro: int) -> Train:
    """Return the training settings. Rows in fp8 or fp4 get bf16: low-precision products are a property of Software."""
    precision = "fp16" if row.text("plan", "precision") == "fp16" else "bf16"
    if row.text("plan", "precision") in ("fp32", "tf32"):
        precision = "fp32"
    return Train(steps=1, seq_len=seq_len, global_batch=batch, micro_batch=micro, precision=precision)


def parallel_of(
    row: PublishedRow, arch: Arch, cluster: Cluster, degrees: Degrees, accumulation: int, notes: list[str]
) -> Parallel:
    dp = degrees.dp
    copies = dp if degrees.zero == 0 and degrees.ep == 1 else 1
    if degrees.zero == 3 and cluster.device == "tpu" and dp % slices_of(row) == 0:
        copies = slices_of(row)  # parameters are gathered inside a slice, not over the network between slices
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


def _sequence(row: PublishedRow, arch: Arch) -> bool:
    """Return True if the run uses sequence parallelism. Models with experts always do, because they need it. Other
    rows that do not state it do so from 2023 on (Korthikanti et al. 2022 added it to Megatron).
    """
    stated = row.flag("plan", "sp")
    return arch.is_moe or (row.year >= 2023 if stated is None else stated)


def recomputed_share(row: PublishedRow) -> float:
    """Return the share of a forward's FLOPs that is recomputed, from the row's HFU and MFU: 3 * (HFU / MFU - 1).

    Return 0 unless the row has both and its recomputation starts with "yes".
    """
    model, hardware = row.number("measured", "mfu_pct"), row.number("measured", "hfu_pct")
    if not row.text("plan", "recompute").startswith("yes") or model is None or hardware is None:
        return 0.0
    share = 3 * (hardware / model - 1)
    return share if 0 < share < 0.95 else 0.0


def _recompute(row: PublishedRow, cluster: Cluster, degrees: Degrees) -> tuple[Any, int]:
    """Return (recompute, recompute_every). A row that states no recomputation gets none, except GPU rows of 2023 or
    earlier that state no layout either: FSDP then recomputed whole blocks by default.
    """
    stated = row.text("plan", "recompute")
    if recomputed_share(row):
        return "selective", 1
    unknown = all(row.count("plan", axis) is None for axis in ("dp", "tp", "pp"))
    whole = degrees.tp * degrees.pp == 1
    if not stated and unknown and whole and row.year <= 2023 and cluster.device == "cuda":
        return "full", 1
    if not stated or stated.startswith(("none", "no", "off")):
        return "none", 1
    return ("selective" if "sel" in stated else "full"), 1


def _with_pipeline(
    row: PublishedRow, arch: Arch, parallel: Parallel, pp: int, accumulation: int, notes: list[str]
) -> Parallel:
    if pp == 1:
        return parallel
    stated, virtual = row.text("plan", "schedule"), row.count("plan", "vpp") or 0
    # Megatron overlaps pipeline sends only in the interleaved schedule, which its large runs have used since 2021.
    usual = not stated and re.search(r"overlaps dp/tp/pp|megatron-core", row.words)
    interleaved = "interleaved" in stated or virtual > 1 or usual
    name = _SCHEDULES.get(stated, "interleaved" if interleaved else "1f1b")
    if name == "interleaved" and virtual < 2:
        virtual = next((v for v in divisors(max(arch.num_layers // pp, 1)) if v > 1), 1)
        notes.append(f"{virtual} stages on each rank")
    if name == "interleaved" and (virtual < 2 or accumulation % pp):
        if accumulation % pp:
            notes.append(f"1f1b: {accumulation} micro-batches are not a multiple of {pp} ranks")
        name = "1f1b"
    each = virtual if name == "interleaved" else 0
    stages = pp * (each or (2 if name in ("zb_v", "dualpipe", "dualpipe_v") else 1))
    return replace(
        parallel,
        pp=pp,
        schedule=cast(PipelineSchedule, name),  # some schedules are only simulated and not allowed in a run file
        stages_per_rank=each,
        stage_layers=_balanced(arch, stages),
    )


def _balanced(arch: Arch, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, for a model whose tokens pass the head more than once. The last stage
    has fewer blocks: each pass of the head counts as blocks with as many parameters.

    Return () for other models, which use ingot's own division into stages (theory/layout.py).
    """
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


# Assumptions for unknown accelerators: 16-bit peak FLOP/s divided by memory bandwidth in bytes/s (V100 139, A100 156,
# MI300X 247, H100 295), and the share of that peak that large matrix products reach.
_FLOP_PER_BYTE = 200
_UNKNOWN_EFFICIENCY = 0.75
_DAYS = 30  # assumed duration of a run for which neither the number of devices nor the duration is stated


def known_device(name: str) -> Device | None:
    """Return the device with a name as sources spell it: "A100-80", "TPUv4", "H100-HBM2e-96-500W"; None if unknown."""
    spaced = re.sub(r"tpu[\s-]*v", "tpu v", name.lower())
    sized = re.sub(r"[-_ ](\d{2,3})(?:gb)?\b", r" \1gb", spaced)
    return find_device(re.sub(r"\bmi250\b", "mi250x", sized.replace("_", " ")))


def devices_of(row: PublishedRow, notes: list[str]) -> int | None:
    """Return the number of devices. If only device-hours are given, it is the power of two with which the run takes
    about its stated duration (30 days if not stated); None without device-hours."""
    if (count := row.count("cluster", "n_gpus")) is not None:
        return count
    hours = row.number("measured", "gpu_hours")
    if hours is None:
        return None
    days = row.number("measured", "days") or _DAYS
    count = 2 ** max(round(math.log2(hours / (24 * days))), 0)
    notes.append(f"{count} devices, with which the run takes about {days:g} days")
    return count


def slices_of(row: PublishedRow) -> int:
    """Return the number of TPU slices; only the slow network connects devices of different slices. 1 on GPUs."""
    found = re.search(r"(\d+)[- ](?:slices?|pods?)\b", row.words) if "tpu" in row.text("cluster", "gpu") else None
    return max(int(found[1]), 1) if found else 1


def cluster_for(row: PublishedRow, count: int, notes: list[str]) -> Cluster | None:
    """Return the cluster with `count` devices; None if the device is unknown and the row states no peak FLOP/s."""
    name = row.text("cluster", "gpu")
    device = known_device(name) or _described(row, name, notes)
    if device is None:
        return None
    per_node = min(row.count("cluster", "gpus_per_node") or device.node, count)
    whole = -(-count // per_node) * per_node
    if whole != count:
        notes.append(f"{count} devices fill {whole // per_node} nodes of {per_node}")
    domain = count // slices_of(row) if device.device == "tpu" else 0
    cluster = cluster_of(device, whole, name=name or "unknown", per_node=per_node, domain=domain)
    return _as_stated(row, cluster)


def _as_stated(row: PublishedRow, cluster: Cluster) -> Cluster:
    peaks = dict(cluster.peak_flops)
    if peak := row.number("cluster", "peak_tflops"):
        peaks |= {"bf16": peak * 1e12, "fp16": peak * 1e12}
    if peak := row.number("cluster", "peak_fp8_tflops"):
        peaks["fp8"] = peak * 1e12
    link, network = row.number("cluster", "intra_bw"), row.number("cluster", "inter_bw")
    return replace(
        cluster,
        peak_flops=peaks,
        link_bandwidth=link * 1e9 if link else cluster.link_bandwidth,
        network_bandwidth=network * 1e9 if network else cluster.network_bandwidth,
        network_kind="ethernet" if re.search(r"roce|ethernet", row.words) else cluster.network_kind,
    )


def _described(row: PublishedRow, name: str, notes: list[str]) -> Device | None:
    peak = row.number("cluster", "peak_tflops")
    if peak is None:
        return None
    notes.append(f"{name or 'the device'} is unknown: its memory bandwidth is taken as peak / {_FLOP_PER_BYTE} FLOP/B")
    return Device(
        device_name=name,
        words=(),
        source="the row itself",
        bf16=peak,
        memory="79 GiB",
        memory_bandwidth=peak * 1e12 / _FLOP_PER_BYTE,
        link_bandwidth=(row.number("cluster", "intra_bw") or 64) * 1e9,
        network_bandwidth=(row.number("cluster", "inter_bw") or 12.5) * 1e9,
        host_bandwidth=26e9,
        matmul_efficiency=_UNKNOWN_EFFICIENCY,
        attention_efficiency=0.4,
    )
