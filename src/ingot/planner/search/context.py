"""The form of context parallelism that suits a run on a cluster, written down."""

import sys
from dataclasses import replace

from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.context import H100_NODES, Links, explain_context, resolve_context


def with_context(run: RunConfig, cluster: Cluster) -> tuple[RunConfig, dict[str, str]]:
    """`run`, which has no problems, with "auto" decided by the links of `cluster`; dotted key -> why.

    The trainer decides by the figures of a fixed machine, so that all ranks decide alike; a plan knows its cluster.
    """
    parallel = run.parallel
    if parallel.cp == 1 or parallel.context != "auto":
        return run, {}
    links = links_of(cluster, run.train.precision)
    decided = resolve_context(run.model, run.train, parallel, links)
    why, _, _ = explain_context(run.model, run.train, parallel, links).partition(":")
    degree = decided.ulysses if decided.context == "usp" else 0
    chosen = replace(parallel, context=decided.context, ulysses=degree)
    return replace(run, parallel=chosen), {"parallel.context": f"{why}: what adds least to a layer on {cluster.name}"}


def links_of(cluster: Cluster, precision: str) -> Links:
    """Those of the cluster, as far as they are known. One machine is one node, however many ranks share it; where fast
    links join several nodes, a node here is all of them."""
    flops = cluster.peak_flops.get(precision, 0.0) * cluster.attention_efficiency
    return Links(
        ranks_per_node=cluster.domain if cluster.nodes > 1 else sys.maxsize,
        inside=cluster.link_bandwidth or H100_NODES.inside,
        across=cluster.network_bandwidth or H100_NODES.across,
        flops=flops or H100_NODES.flops,
        memory=cluster.memory_bandwidth or H100_NODES.memory,
    )
