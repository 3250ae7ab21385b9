"""What a user should know before a run starts: things that are legal, and likely to disappoint."""

from collections.abc import Iterator

from ingot.planner.memory import rank_memory_bytes
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.tokens import TokenManifest
from ingot.theory.params import count_parameters
from ingot.theory.scaling import MAX_USEFUL_EPOCHS, compute_optimal_tokens
from ingot.theory.term import Term
from ingot.units import format_bytes, format_count

_TIGHT = 0.9
_UINT16_IDS = 65_536


def warnings(
    run: RunConfig,
    cluster: Cluster,
    bill: dict[str, Term],
    seconds: float,
    tokens: int,
    manifest: TokenManifest | None,
) -> Iterator[str]:
    """One sentence each, with the way out. tokens: in the training set, 0 when unknown."""
    yield from _memory(run, cluster, bill)
    yield from _devices(run, cluster)
    if tokens:
        yield from _passes(run, tokens)
        yield from _compute_optimal(run)
    yield from _rates(run, cluster, seconds, manifest)


def check_warnings(
    run: RunConfig, cluster: Cluster, bill: dict[str, Term], seconds: float, manifest: TokenManifest | None
) -> Iterator[str]:
    """Those that may stop or spoil the run; what the size of model and data implies was said by the plan."""
    yield from _memory(run, cluster, bill)
    if cluster.device == "cpu":
        yield from _devices(run, cluster)
    if manifest and manifest.tokens:
        yield from _passes(run, manifest.tokens)
    yield from _rates(run, cluster, seconds, manifest)


def _rates(run: RunConfig, cluster: Cluster, seconds: float, manifest: TokenManifest | None) -> Iterator[str]:
    if run.model.vocab_size > _UINT16_IDS and manifest is None:
        yield f"a vocabulary of {run.model.vocab_size:,} ids needs uint32 token shards: 4 bytes per token"
    if not seconds:
        yield f"no {run.train.precision} rate of {cluster.name} is known: run `ingot doctor --bench` to predict time"
    elif not cluster.measured:
        yield f"time on {cluster.name} follows from published figures; `ingot doctor --bench` there measures it"


def _memory(run: RunConfig, cluster: Cluster, bill: dict[str, Term]) -> Iterator[str]:
    needed = sum(term.value for term in bill.values())
    there = rank_memory_bytes(cluster, run.parallel.world_size)
    largest = max((kind for kind in bill if kind != "runtime"), key=lambda kind: bill[kind].value)
    if largest in ("activations", "logits", "fragmentation"):
        fix = "lower train.micro_batch" if run.train.micro_batch > 1 else "shorten train.seq_len"
    else:
        fix = "use more devices (parallel.dp_shard)" if cluster.device == "cuda" else "use a smaller model"
    if needed > there:
        yield f"does not fit: {format_bytes(needed)} per rank of {format_bytes(there)}, mostly {largest}; {fix}"
    elif needed > _TIGHT * there:
        yield f"tight: {format_bytes(needed)} per rank of {format_bytes(there)}, mostly {largest}; {fix}"


def _devices(run: RunConfig, cluster: Cluster) -> Iterator[str]:
    ranks = run.parallel.world_size
    if cluster.device == "cuda" and ranks > cluster.devices:
        yield f"{ranks} ranks want {ranks} GPUs, {cluster.name} has {cluster.devices}; lower parallel.dp_shard"
    elif cluster.device == "cpu" and cluster.measured and ranks != cluster.devices_per_node:
        yield f"{cluster.name} was measured with {cluster.devices_per_node} ranks, the run has {ranks}; times differ"


def _passes(run: RunConfig, tokens: int) -> Iterator[str]:
    consumed = run.train.steps * run.tokens_per_step
    passes = consumed / tokens
    if passes > MAX_USEFUL_EPOCHS:
        yield (
            f"{passes:.1f} passes over the data: beyond {MAX_USEFUL_EPOCHS} repetition brings little"
            f" (Muennighoff et al. 2023); lower train.steps to {MAX_USEFUL_EPOCHS * tokens // run.tokens_per_step:,}"
        )


def _compute_optimal(run: RunConfig) -> Iterator[str]:
    consumed, parameters = run.train.steps * run.tokens_per_step, count_parameters(run.model)
    optimal = compute_optimal_tokens(parameters)
    if consumed < optimal / 2:
        yield (
            f"{consumed / parameters:.1f} tokens per parameter: a smaller model would reach a lower loss with the same"
            f" compute (about {optimal // parameters}: {format_count(optimal)} tokens; Hoffmann et al. 2022)"
        )
