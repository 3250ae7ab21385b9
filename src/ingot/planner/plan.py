"""What a run will need and take, before it starts: memory, time, money, each with the formula it came from."""

from ingot.planner.advice import warnings
from ingot.planner.memory import memory_bill
from ingot.planner.step_time import step_seconds
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.tokens import TokenManifest
from ingot.theory.flops import mean_keys, model_flops_utilisation, train_flops_per_token
from ingot.theory.memory import checkpoint_bytes
from ingot.theory.params import count_active_parameters, count_matrix_parameters, count_parameters, value_width
from ingot.theory.term import Term
from ingot.units import format_bytes, format_count, format_flops, format_seconds


def make_plan(run: RunConfig, cluster: Cluster, *, tokens: int = 0, manifest: TokenManifest | None = None) -> Plan:
    """tokens: in the training set (taken from `manifest` when given; 0 when unknown).

    The plan is for the cluster's devices of the kind the run asks for; a run that does not fit still gets a plan, with
    a warning. step_seconds is 0.0 when the cluster has no measured or published rate for the run's precision.
    """
    tokens = manifest.tokens if manifest else tokens
    bill = memory_bill(run, cluster)
    parts = step_seconds(run, cluster) or {}
    seconds = sum(term.value for term in parts.values())
    size = checkpoint_bytes(run.model, run.train.precision)
    mfu, cost = _utilisation(run, cluster, seconds), _cost(run, cluster, seconds)
    formulas = {f"memory.{kind}": term.formula for kind, term in bill.items()}
    formulas |= {f"time.{part}": f"{term.formula} = {format_seconds(term.value)}" for part, term in parts.items()}
    formulas |= _counts(run, tokens)
    formulas["checkpoint_bytes"] = f"{size.formula} = {format_bytes(size.value)}"
    formulas |= {name: term.formula for name, term in (("mfu", mfu), ("usd", cost)) if term}
    return Plan(
        run_sha256=run.training_sha256(),
        cluster=cluster,
        parameters=count_parameters(run.model),
        active_parameters=count_active_parameters(run.model),
        flops_per_token=train_flops_per_token(run.model, run.train.seq_len),
        tokens_per_step=run.tokens_per_step,
        steps=run.train.steps,
        memory_bytes={kind: round(term.value) for kind, term in bill.items()},
        step_seconds=seconds,
        mfu=mfu.value if mfu else None,
        checkpoint_bytes=round(size.value),
        usd=cost.value if cost else 0.0,
        formulas=formulas,
        warnings=tuple(warnings(run, cluster, bill, seconds, tokens, manifest)),
    )


def _counts(run: RunConfig, tokens: int) -> dict[str, str]:
    """Formulas of what follows from the run file alone. tokens: in the training set, 0 when unknown."""
    arch, train = run.model, run.train
    flops, total = train_flops_per_token(arch, train.seq_len), train.steps * run.tokens_per_step
    formulas = {
        "tokens_per_step": f"{train.global_batch} sequences x {train.seq_len} = {run.tokens_per_step:,} tokens",
        "flops_per_token": (
            f"6 x {format_count(count_matrix_parameters(arch))} {'active ' * arch.is_moe}matmul parameters"
            f" + 6 x {arch.num_layers} layers x {arch.num_heads * (arch.head_dim + value_width(arch))}"
            f" x {mean_keys(train.seq_len, arch.sliding_window):,.0f} keys = {format_flops(flops)}"
        ),
        "total_flops": f"{format_count(total)} tokens x {format_flops(flops)} = {total * flops:.2e} FLOP",
    }
    if tokens:
        passes = f"{total / tokens:.2f}"
        formulas["epochs"] = f"{train.steps:,} steps x {run.tokens_per_step:,} / {tokens:,} tokens = {passes}"
    return formulas


def _utilisation(run: RunConfig, cluster: Cluster, seconds: float) -> Term | None:
    """MFU in the "norm" convention of theory/flops.py. None on a CPU, which has no peak, and without a time."""
    peak = cluster.peak_flops.get(run.train.precision, 0.0) * run.parallel.world_size
    if cluster.device != "cuda" or not peak or not seconds:
        return None
    flops, speed = train_flops_per_token(run.model, run.train.seq_len), run.tokens_per_step / seconds
    mfu = model_flops_utilisation(speed, flops, peak)
    return Term(mfu, f"{format_count(speed)} tokens/s x {format_flops(flops)} / {format_flops(peak)}/s = {mfu:.1%}")


def _cost(run: RunConfig, cluster: Cluster, seconds: float) -> Term | None:
    """US dollars: GPUs, or machines, by the hour. None when price or time is not known."""
    price = run.cost.usd_per_hour or cluster.usd_per_hour
    if not price or not seconds:
        return None
    units = run.parallel.world_size if cluster.device == "cuda" else cluster.nodes
    hours = run.train.steps * seconds / 3600
    return Term(units * hours * price, f"{units} x {format_seconds(hours * 3600)} x ${price:g} per hour")
