"""A published row as a run that can be predicted: model, layout, hardware, software, and the measured figures.

Runs of other systems are translated into ingot's own terms. If a source does not state a value, a rule chooses it. The
rules are the same for all rows and sources, and a note records each value that a rule chose or changed.
"""

import re
from dataclasses import dataclass, replace
from importlib import resources

from ingot.errors import IngotError
from ingot.planner.predict.memory.peak_memory import memory_bill
from ingot.planner.published.layout import batch_of, cluster_for, degrees_of, devices_of, parallel_of, train_of
from ingot.planner.published.row import PublishedRow, read_rows
from ingot.planner.published.shape import arch_of, sequence_of
from ingot.planner.published.software import software_of
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data, RunConfig
from ingot.schema.software import Software
from ingot.theory.flops import train_flops_per_token

__all__ = [
    "PublishedFigures",
    "PublishedRow",
    "SkippedRow",
    "PublishedRun",
    "read_rows",
    "shipped_rows",
    "published_run",
    "published_runs",
]

# If a source times one layer alone, the prediction is for a model of _LAYERS such layers and _LAYER_BATCHES
# micro-batches per step.
_LAYERS, _LAYER_BATCHES = 64, 16
# Share of a run's device-hours spent on steps that count: above 0.9 in "The Llama 3 herd of models" (2024, 3.3.4).
_GOODPUT = 0.9
# The year in which NVIDIA's recipes began to use Megatron-Core's recompute_modules, which name parts of blocks.
_PARTS_YEAR = 2025
_MOST_DEVICES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PublishedFigures:
    """The measured figures of a row; None for a figure that the row does not have.

    step_seconds: time of the row's step. derived: the figure of the row from which step_seconds was computed, like
    "tokens/s"; "" if the row has the step time itself. memory_bytes: peak of one device. memory_without: kinds of a
    memory bill that the source did not count. bubble: share of a step. ran_out: the run did not fit in memory.
    """

    step_seconds: float | None = None
    derived: str = ""
    memory_bytes: float | None = None
    memory_without: tuple[str, ...] = ()
    bubble: float | None = None
    ran_out: bool = False


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A published row in ingot's terms.

    scale: duration of the row's step in steps of `run`: 1, unless the batch was rounded or part of a step was timed.
    part: the source timed one layer, and `run` has many of them, so its predicted memory has no meaning.
    notes: the values that rules chose because the source does not state them. why: reasons for the software's
    properties.
    """

    id: str
    family: str
    row: PublishedRow
    run: RunConfig
    cluster: Cluster
    software: Software
    measured: PublishedFigures
    scale: float = 1.0
    part: bool = False
    notes: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    @property
    def tokens(self) -> float:
        """The number of tokens in the row's step, divided by the run's number of layers if one layer was timed."""
        return self.run.tokens_per_step * self.scale

    @property
    def devices(self) -> int:
        return self.run.parallel.world_size


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be expressed as a run, with the reason."""

    id: str
    family: str
    row: PublishedRow
    reason: str


def shipped_rows() -> list[PublishedRow]:
    """Return the rows of published_runs.json, to which the planner's constants are fitted."""
    with resources.as_file(resources.files("ingot.planner.published").joinpath("published_runs.json")) as path:
        return read_rows(path)


def published_runs(rows: list[PublishedRow]) -> list[PublishedRun]:
    """Return all rows that can be expressed in ingot's terms, as PublishedRuns; other rows are left out."""
    found = [published_run(row) for row in rows]
    return [one for one in found if isinstance(one, PublishedRun)]


def published_run(row: PublishedRow) -> PublishedRun | SkippedRow:
    """Return a row as a run, or as a SkippedRow with the reason if it cannot be expressed in ingot's terms. A bad row
    never raises an error."""
    try:
        return _translated(row)
    except (IngotError, ArithmeticError, LookupError, ValueError) as error:
        return SkippedRow(row.id, row.family, row, f"cannot be read: {error}")


def _impossible(row: PublishedRow) -> str:
    counts = [("cluster", "n_gpus"), *(("plan", name) for name in ("dp", "tp", "pp", "vpp", "cp", "ep"))]
    for section, name in counts:
        if (row.count(section, name) or 0) > _MOST_DEVICES:
            return f"{section}.{name} is more than {_MOST_DEVICES:,}"
    return ""


def _translated(row: PublishedRow) -> PublishedRun | SkippedRow:
    if found := _impossible(row):
        return SkippedRow(row.id, row.family, row, found)
    notes: list[str] = []
    arch = arch_of(row, notes)
    if arch is None:
        return SkippedRow(row.id, row.family, row, "gives neither layers and width nor a number of parameters")
    count = devices_of(row, notes)
    if count is None:
        return SkippedRow(row.id, row.family, row, "gives neither a number of devices nor device-hours")
    cluster = cluster_for(row, count, notes)
    if cluster is None:
        return SkippedRow(
            row.id, row.family, row, f"device {row.text('cluster', 'gpu')!r} is unknown, and no peak is given"
        )
    seq_len = sequence_of(row)
    degrees = degrees_of(row, arch, cluster, count, notes)
    batch, micro = batch_of(row, seq_len, degrees, notes)
    scale = (row.count("plan", "global_batch") or batch) / batch
    part = "one layer" in row.text("model", "name")
    if part:
        many, batches = _LAYERS, _LAYER_BATCHES  # many, so that costs per step or per micro-batch hardly count
        arch = replace(arch, vocab_size=degrees.tp, num_layers=many)
        batch, scale = batch * batches, scale / (many * batches)
        notes.append("one layer alone, without embedding, head and update")
    run = RunConfig(
        name=row.id,
        model=arch,
        data=Data(tokens=""),
        train=train_of(row, seq_len, batch, micro),
        parallel=parallel_of(row, arch, cluster, degrees, batch // (micro * degrees.dp), notes),
    )
    software, why = software_of(row)
    run, software = _recomputed(row, run, cluster, software, notes)
    return PublishedRun(
        id=row.id,
        family=row.family,
        row=row,
        run=run,
        cluster=cluster,
        software=software,
        measured=_measured(row, run, count, run.tokens_per_step * scale),
        scale=scale,
        part=part,
        notes=tuple(notes),
        why=why,
    )


def _recomputed(
    row: PublishedRow, run: RunConfig, cluster: Cluster, software: Software, notes: list[str]
) -> tuple[RunConfig, Software]:
    """Return the run and software with recomputation if they are for GPUs, state none and would not fit without it.

    Since 2025 Megatron-Core recomputes parts of blocks, at almost no cost. In other runs without a stated layout, whole
    blocks are recomputed.
    """
    if row.value("plan", "recompute") is not None or cluster.device != "cuda" or _fits(run, cluster, software):
        return run, software
    if software.megatron_state and row.year >= _PARTS_YEAR:
        notes.append("norms, activation functions and up projections are recomputed, because they do not fit otherwise")
        software = replace(software, parts_recomputed=True)
    elif all(row.value("plan", name) is None for name in ("dp", "tp", "pp")):
        notes.append("blocks are recomputed, because they do not fit otherwise")
        run = replace(run, parallel=replace(run.parallel, recompute="full"))
    return run, software


def _fits(run: RunConfig, cluster: Cluster, software: Software) -> bool:
    return sum(term.value for term in memory_bill(run, cluster, software).values()) <= cluster.memory_bytes


def _measured(row: PublishedRow, run: RunConfig, count: int, tokens: float) -> PublishedFigures:
    seconds, derived = _step_seconds(row, run, count, tokens)
    memory, kind = row.number("measured", "mem_gb"), row.text("measured", "mem_kind")
    if memory is not None:
        memory *= 2**30 if "gib" in kind else 1e9
    return PublishedFigures(
        step_seconds=seconds,
        derived=derived,
        memory_bytes=memory,
        memory_without=_not_counted(kind),
        bubble=row.number("bubble_rate_theoretical"),
        ran_out=bool(row.flag("measured", "oom")) or re.search(r"\boom\b|out of memory", row.words) is not None,
    )


def _not_counted(kind: str) -> tuple[str, ...]:
    """Return the kinds of a memory bill that the source's memory counter does not include.

    PyTorch's counters leave out the device's context. The count of allocated bytes also leaves out memory that the
    allocator has reserved but not given to tensors.
    """
    if "accounting" in kind or "alloc" in kind:
        return "runtime", "fragmentation"
    return ("runtime",)


def _step_seconds(row: PublishedRow, run: RunConfig, count: int, tokens: float) -> tuple[float | None, str]:
    """Return (seconds of the row's step, the figure they are computed from, or "").

    The row's own step time comes first, then tokens/s, device-hours, days, and last FLOP/s or MFU.
    """
    if (seconds := row.number("measured", "step_s")) is not None:
        return seconds, ""
    if (rate := row.number("measured", "tok_s_gpu")) is not None:
        return tokens / (rate * count), "tokens/s"
    hours, total = row.number("measured", "gpu_hours"), row.number("measured", "tokens")
    if hours is not None and total is not None:
        goodput = 1.0 if "iteration time" in row.words else _GOODPUT
        return goodput * hours * 3600 / count * tokens / total, "device-hours"
    days = row.number("measured", "days")
    if days is not None and total is not None:
        return days * 86400 * tokens / total, "days"
    rate = row.number("measured", "tflops_gpu")
    peak, share = row.number("cluster", "peak_tflops"), row.number("measured", "mfu_pct")
    if rate is None and peak is not None and share is not None and "fp8" not in row.text("plan", "precision"):
        rate = peak * share / 100  # not in fp8, where sources differ in the peak that MFU refers to
    if rate is None:
        return None, ""
    return tokens * _row_flops_per_token(row, run) / (rate * 1e12 * count), "FLOP/s"


def _row_flops_per_token(row: PublishedRow, run: RunConfig) -> float:
    """Return the FLOPs per token as the row's source counts them.

    Sources that state no convention count attention without the causal mask, as Megatron-LM introduced. Hardware FLOPs
    include a recomputed forward.
    """
    causal = "causal" in row.text("flops_convention")
    again = 4 / 3 if row.text("measured", "tflops_kind") == "hardware" and run.parallel.recompute == "full" else 1.0
    return again * train_flops_per_token(run.model, run.train.seq_len, causal=causal)
