"""What a user should know about the experts and the context parallelism of a run: legal, and likely to disappoint."""

from collections.abc import Iterator

from ingot.planner.predict.time.links import LineTime
from ingot.schema.cluster import Cluster
from ingot.schema.expert_rules import legal_ep
from ingot.schema.nearest import nearest
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.theory.context import imbalance
from ingot.theory.layout import Position
from ingot.units import format_bytes, format_seconds

# Rows of a product below which a GPU reads the weights longer than it multiplies (an H100: 300 FLOP to the byte).
_FEW_ROWS = 128
_UNEVEN = 1.1


def expert_advice(run: RunConfig, cluster: Cluster, position: Position, times: dict[str, LineTime]) -> Iterator[str]:
    """One sentence each, with the way out. position: of the busiest pipeline rank, times: the slowest of each line."""
    if not run.model.is_moe:
        return
    moe, parallel = run.model.moe, run.parallel
    if not (moe.bias_rate or moe.sequence_loss or moe.global_loss):
        yield (
            "nothing balances the experts, and a few of them may take all tokens: set model.moe.global_loss = 0.01,"
            " or model.moe.bias_rate = 0.001 (Wang et al. 2024)"
        )
    if "ep" in times and times["ep"].crosses:
        legal = [ep for ep in legal_ep(moe.num_experts, parallel) if ep <= cluster.domain]
        each = over_network(times["ep"])
        yield f"ep = {parallel.ep} spans nodes of {cluster.domain}: {each}; use ep of at most {max(legal)}"
    if moe.groups > 1 and parallel.ep > 1 and moe.groups % parallel.ep and parallel.ep % moe.groups:
        whole = [ep for ep in legal_ep(moe.num_experts, parallel) if moe.groups % ep == 0 or ep % moe.groups == 0]
        found = f"model.moe.groups = {moe.groups} and parallel.ep = {parallel.ep} cut experts in different places"
        why = "so choosing few groups does not send a token to few ranks"
        yield f"{found}, {why}; use ep = {nearest(parallel.ep, whole)}"
    if run.train.compile == "on":
        found, kept = 'train.compile = "on" leaves experts uncompiled', parallel.recompute == "selective"
        also = ", and all of the blocks that are recomputed selectively" if kept else ""
        yield f"{found}{also}: the host has to read how many rows each has"
    rows = position.assignments * parallel.ep / moe.num_experts
    if cluster.device == "cuda" and rows < _FEW_ROWS:
        found = f"an expert multiplies {rows:.0f} rows of a micro-batch at once, too few to keep a GPU busy"
        yield f"{found}; raise train.micro_batch or parallel.ep"


def context_advice(run: RunConfig, parallel: Parallel, times: dict[str, LineTime], cluster: Cluster) -> Iterator[str]:
    """parallel: resolved. times: the slowest of each line."""
    if parallel.cp == 1:
        return
    if "ulysses" in times and times["ulysses"].crosses:
        inside = max(cluster.domain // parallel.tp, 1)
        sides = [u for u in range(2, parallel.ulysses) if parallel.cp % u == parallel.ulysses % u == 0 and u <= inside]
        use = f'context = "usp" with ulysses = {max(sides)}' if sides else 'context = "ring"'
        yield f"the heads of attention travel between nodes: {over_network(times['ulysses'])}; use {use}"
    uneven = imbalance(parallel, run.train.seq_len, run.model.sliding_window)
    if uneven > _UNEVEN:
        found = f"context_layout = {parallel.context_layout!r} gives one rank {uneven:.2f} times the mean of attention"
        yield f'{found}, and all wait for it; use "zigzag"'


def without_effect(run: RunConfig) -> Iterator[str]:
    """Settings of the model that do nothing with these sequences."""
    moe, train, window = run.model.moe, run.train, run.model.sliding_window
    if window >= train.seq_len:
        yield f"model.sliding_window = {window} hides nothing in training: train.seq_len is {train.seq_len}"
    if moe.capacity_factor and moe.capacity(train.seq_len) >= train.seq_len:
        found = f"model.moe.capacity_factor = {moe.capacity_factor:g} drops nothing: an expert may take whole sequences"
        yield f"{found}; use less than {moe.num_experts / moe.top_k:g}, or remove it"


def over_network(time: LineTime) -> str:
    took = f" ({format_seconds(time.seconds)})" if time.seconds else ""
    return f"{format_bytes(time.sent)} per rank and step{took} over the network"
