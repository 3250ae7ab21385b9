"""What a run will need and take, before it starts: memory, time, money, each with the formula it came from."""

from dataclasses import dataclass, replace
from typing import Any

from ingot.planner.predict.memory.peak_memory import moments, stage_bills
from ingot.planner.predict.time.band import error_band
from ingot.planner.predict.time.step_time import StepTime, estimate
from ingot.planner.run.advice import warnings
from ingot.planner.run.outlook import Assumptions, outlook
from ingot.planner.run.outlook_advice import outlook_warnings
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Outlook, Plan
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.schema.tokens import TokenManifest
from ingot.theory.flops import mean_keys, model_flops_utilisation, train_flops_per_token
from ingot.theory.layout import positions
from ingot.theory.memory import checkpoint_bytes
from ingot.theory.params import count_active_parameters, count_matrix_parameters, count_parameters, value_width
from ingot.theory.term import Term
from ingot.theory.work import step_work
from ingot.units import format_bytes, format_count, format_flops, format_seconds

GIVEN = "at the MFU that was given"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run with its plan. reasons: dotted key -> why that value; of a run file of the user's, for what was open."""

    run: RunConfig
    plan: Plan
    reasons: dict[str, str]


def make_plan(
    run: RunConfig,
    cluster: Cluster,
    *,
    software: Software = INGOT,
    assumptions: Assumptions | None = None,
    mfu: float = 0.0,
    parameters: int = 0,
    tokens: int = 0,
    manifest: TokenManifest | None = None,
) -> Plan:
    """tokens: in the training set (taken from `manifest` when given; 0 when unknown).

    The plan is for the cluster's devices of the kind the run asks for; a run that does not fit still gets a plan, with
    a warning. step_seconds is 0.0 when the cluster has no measured or published rate for the run's precision.

    mfu: in place of the predicted step time. parameters: of a model that is known by its size alone, whose FLOPs are
    then 6 for each of them and token, whatever shape stands in for it; 0: those of the shape, attention included.
    """
    tokens = manifest.tokens if manifest else tokens
    bills = stage_bills(run, cluster, software)
    bill = max(bills, key=lambda stage: sum(term.value for term in stage.values()))
    flops, size = _flops_per_token(run, parameters), checkpoint_bytes(run.model, run.train.precision)
    timing = _timing(run, cluster, software, flops.value, mfu)
    seconds = sum(term.value for term in timing.terms.values())
    reached, worked = _utilisation(run, cluster, flops.value, seconds), _hardware_utilisation(run, cluster, seconds)
    cost, (low, high) = _cost(run, cluster, seconds), _band(cluster, seconds, mfu)
    whole, how = _outlook(run, cluster, seconds, size.value, assumptions)
    formulas = _formulas(bill, timing, size, {"mfu": reached, "hfu": worked, "usd": cost})
    later = outlook_warnings(run, seconds, whole, assumptions) if whole else ()
    return Plan(
        **_asked(run, cluster, software),
        flops_per_token=flops.value,
        memory_bytes=_bytes(bill),
        stage_memory_bytes=tuple(map(_bytes, bills)),
        moments_bytes=_bytes(moments(run, cluster, software)),
        step_seconds=seconds,
        step_seconds_low=low,
        step_seconds_high=high,
        mfu=reached.value if reached else None,
        hfu=worked.value if worked else None,
        time_seconds={part: term.value for part, term in timing.terms.items()},
        communication=timing.communication,
        bubble=timing.bubble,
        outlook=whole,
        checkpoint_bytes=round(size.value),
        usd=cost.value if cost else 0.0,
        formulas=formulas | _counts(run, flops, tokens) | how,
        warnings=(*warnings(run, cluster, bill, seconds, tokens, manifest, software), *later),
    )


def _asked(run: RunConfig, cluster: Cluster, software: Software) -> dict[str, Any]:
    """What is planned and where, before anything is predicted."""
    return {
        "cluster": cluster,
        "software": software,
        "run_sha256": run.training_sha256(),
        "parameters": count_parameters(run.model),
        "active_parameters": count_active_parameters(run.model),
        "tokens_per_step": run.tokens_per_step,
        "steps": run.train.steps,
    }


def _formulas(bill: dict[str, Term], timing: StepTime, size: Term, known: dict[str, Term | None]) -> dict[str, str]:
    """Of memory and time by their parts, of a checkpoint, and of what is `known`."""
    formulas = {f"memory.{kind}": term.formula for kind, term in bill.items()}
    for part, term in timing.terms.items():
        formulas[f"time.{part}"] = f"{term.formula} = {format_seconds(term.value)}"
    formulas["checkpoint_bytes"] = f"{size.formula} = {format_bytes(size.value)}"
    return formulas | {name: term.formula for name, term in known.items() if term}


def _bytes(bill: dict[str, Term]) -> dict[str, int]:
    return {kind: round(term.value) for kind, term in bill.items()}


def _flops_per_token(run: RunConfig, parameters: int) -> Term:
    if parameters:
        return Term(6.0 * parameters, f"6 x {format_count(parameters)} parameters, by their number alone")
    arch, train = run.model, run.train
    return Term(
        train_flops_per_token(arch, train.seq_len),
        f"6 x {format_count(count_matrix_parameters(arch))} {'active ' * arch.is_moe}matmul parameters"
        f" + 6 x {arch.num_layers} layers x {arch.num_heads * (arch.head_dim + value_width(arch))}"
        f" x {mean_keys(train.seq_len, arch.sliding_window):,.0f} keys",
    )


def _timing(run: RunConfig, cluster: Cluster, software: Software, flops: float, mfu: float) -> StepTime:
    """Of one step; without a rate one of no parts. A given MFU takes the place of the parts, not of who waits for
    whom."""
    found = estimate(run, cluster, software) or StepTime({}, {})
    peak = _peak(run, cluster)
    if not mfu or not peak:
        return found
    each = f"{run.parallel.world_size:,} x {format_flops(peak / run.parallel.world_size)}/s x {mfu:.1%} MFU"
    formula = f"{format_count(run.tokens_per_step)} tokens x {format_flops(flops)} / ({each})"
    return replace(found, terms={GIVEN: Term(run.tokens_per_step * flops / (peak * mfu), formula)})


def _band(cluster: Cluster, seconds: float, mfu: float) -> tuple[float, float]:
    """Around a prediction by published figures; zeros around what was measured or given."""
    low, high = error_band(seconds)
    return (0.0, 0.0) if mfu or cluster.device == "cpu" or low == high else (low, high)


def _peak(run: RunConfig, cluster: Cluster) -> float:
    """FLOP/s of all devices, in the run's precision: that of 16 bits also where products are in 8."""
    return cluster.peak_flops.get(run.train.precision, 0.0) * run.parallel.world_size


def _counts(run: RunConfig, flops: Term, tokens: int) -> dict[str, str]:
    """Formulas of what follows from the run file alone. tokens: in the training set, 0 when unknown."""
    train = run.train
    total = train.steps * run.tokens_per_step
    formulas = {
        "tokens_per_step": f"{train.global_batch} sequences x {train.seq_len} = {run.tokens_per_step:,} tokens",
        "flops_per_token": f"{flops.formula} = {format_flops(flops.value)}",
        "total_flops": f"{format_count(total)} tokens x {format_flops(flops.value)} = {total * flops.value:.2e} FLOP",
    }
    if tokens:
        passes = f"{total / tokens:.2f}"
        formulas["epochs"] = f"{train.steps:,} steps x {run.tokens_per_step:,} / {tokens:,} tokens = {passes}"
    return formulas


def _utilisation(run: RunConfig, cluster: Cluster, flops: float, seconds: float) -> Term | None:
    """MFU by `flops` per token. None on a CPU, which has no peak, and without a time."""
    peak = _peak(run, cluster)
    if cluster.device == "cpu" or not peak or not seconds:
        return None
    speed = run.tokens_per_step / seconds
    mfu = model_flops_utilisation(speed, flops, peak)
    return Term(mfu, f"{format_count(speed)} tokens/s x {format_flops(flops)} / {format_flops(peak)}/s = {mfu:.1%}")


def _hardware_utilisation(run: RunConfig, cluster: Cluster, seconds: float) -> Term | None:
    """The same of all operations that devices do: what is recomputed, and the shape's attention, count as well."""
    peak = _peak(run, cluster)
    if cluster.device == "cpu" or not peak or not seconds:
        return None
    work = [step_work(position, cluster.device) for position in positions(run)]
    each = sum(w.matmul_flops + w.attention_flops for w in work) / len(work)
    done = each * run.parallel.world_size
    hfu = done / seconds / peak
    return Term(hfu, f"{format_flops(done)} of products and attention / {format_seconds(seconds)}"
                f" / {format_flops(peak)}/s = {hfu:.1%}")  # fmt: skip


def _outlook(
    run: RunConfig, cluster: Cluster, seconds: float, checkpoint: float, assumptions: Assumptions | None
) -> tuple[Outlook | None, dict[str, str]]:
    """None on a CPU, of which nobody has counted failures, and without a time."""
    if cluster.device == "cpu" or not seconds:
        return None, {}
    return outlook(run, cluster, seconds, checkpoint, assumptions)


def _cost(run: RunConfig, cluster: Cluster, seconds: float) -> Term | None:
    """US dollars: devices, or machines, by the hour. None when price or time is not known."""
    price = run.cost.usd_per_hour or cluster.usd_per_hour
    if not price or not seconds:
        return None
    units = run.parallel.world_size if cluster.device != "cpu" else cluster.nodes
    hours = run.train.steps * seconds / 3600
    return Term(units * hours * price, f"{units:,} x {format_seconds(hours * 3600)} x ${price:g} per hour")
