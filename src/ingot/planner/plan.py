"""What a run will need and take, before it starts: memory, time, money, each with the formula it came from."""

from ingot.planner.advice import warnings
from ingot.planner.memory import memory_bill
from ingot.planner.step_time import step_seconds
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.tokens import TokenManifest
from ingot.theory.flops import model_flops_utilisation, train_flops_per_token
from ingot.theory.memory import checkpoint_bytes
from ingot.theory.params import count_parameters
from ingot.units import format_bytes, format_count, format_flops, format_seconds


def make_plan(run: RunConfig, cluster: Cluster, *, tokens: int = 0, manifest: TokenManifest | None = None) -> Plan:
    """tokens: in the training set (taken from `manifest` when given; 0 when unknown).

    The plan is for the cluster's devices of the kind the run asks for; a run that does not fit still gets a plan, with
    a warning. step_seconds is 0.0 when the cluster has no measured or published rate for the run's precision.
    """
    tokens = manifest.tokens if manifest else tokens
    bill = memory_bill(run, cluster)
    parts = step_seconds(run, cluster)
    seconds = sum(term.value for term in parts.values()) if parts else 0.0
    flops = train_flops_per_token(run.model, run.train.seq_len)
    peak = cluster.peak_flops.get(run.train.precision, 0.0) if cluster.device == "cuda" else 0.0
    size = checkpoint_bytes(run.model, run.train.precision)
    price = run.cost.usd_per_hour or cluster.usd_per_hour
    priced_units = run.parallel.world_size if cluster.device == "cuda" else cluster.nodes
    hours = run.train.steps * seconds / 3600
    formulas = {f"memory.{kind}": term.formula for kind, term in bill.items()}
    formulas |= {
        f"time.{part}": f"{term.formula} = {format_seconds(term.value)}" for part, term in (parts or {}).items()
    }
    formulas |= {
        "tokens_per_step": f"{run.train.global_batch} sequences x {run.train.seq_len} = {run.tokens_per_step:,} tokens",
        "flops_per_token": (
            f"6 x matmul parameters + 6 x {run.model.num_layers} layers x {run.model.num_heads * run.model.head_dim}"
            f" x {run.train.seq_len} (causal half) = {format_flops(flops)}"
        ),
        "total_flops": (
            f"{format_count(run.train.steps * run.tokens_per_step)} tokens x {format_flops(flops)}"
            f" = {run.train.steps * run.tokens_per_step * flops:.2e} FLOP"
        ),
        "checkpoint_bytes": f"{size.formula} = {format_bytes(size.value)}",
    }
    mfu = None
    if peak and seconds:
        total_peak = peak * run.parallel.world_size
        mfu = model_flops_utilisation(run.tokens_per_step / seconds, flops, total_peak)
        formulas["mfu"] = (
            f"{format_count(run.tokens_per_step / seconds)} tokens/s x {format_flops(flops)}"
            f" / {format_flops(total_peak)}/s = {mfu:.1%}"
        )
    if tokens:
        passes = run.train.steps * run.tokens_per_step / tokens
        formulas["epochs"] = f"{run.train.steps:,} steps x {run.tokens_per_step:,} / {tokens:,} tokens = {passes:.2f}"
    if price and seconds:
        formulas["usd"] = f"{priced_units} x {hours:,.2f} h x ${price:g}"
    return Plan(
        run_sha256=run.training_sha256(),
        cluster=cluster,
        parameters=count_parameters(run.model),
        flops_per_token=flops,
        tokens_per_step=run.tokens_per_step,
        steps=run.train.steps,
        memory_bytes={kind: round(term.value) for kind, term in bill.items()},
        step_seconds=seconds,
        mfu=mfu,
        checkpoint_bytes=round(size.value),
        usd=priced_units * hours * price,
        formulas=formulas,
        warnings=tuple(warnings(run, cluster, bill, seconds, tokens, manifest)),
    )
