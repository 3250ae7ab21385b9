"""The plan of a run before it starts: memory, time and cost, each with its formula."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.config import to_dict, to_toml
from ingot.errors import ConfigError, UsageError
from ingot.planner.predict.memory.peak_memory import moments, rank_memory_bytes, stage_bills
from ingot.planner.predict.time.constants import error_band
from ingot.planner.predict.time.step_time import StepTime, estimate
from ingot.planner.run.advice import double_discount, outlook_warnings, warnings
from ingot.planner.run.outlook import Assumptions, outlook
from ingot.planner.search.search import Found
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Outlook, Plan
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.schema.tokens import TokenManifest
from ingot.storage import write_atomic, write_json
from ingot.theory.flops import mean_keys, model_flops_utilization, train_flops_per_token
from ingot.theory.layout import positions
from ingot.theory.memory import Term, checkpoint_bytes
from ingot.theory.params import count_active_parameters, count_matrix_parameters, count_parameters, value_width
from ingot.theory.update import mean_moments
from ingot.theory.work import step_work
from ingot.units import format_bytes, format_count, format_flops, format_seconds

GIVEN_MFU = "at the MFU that was given"
# Runs longer than this count as whole trainings, which texts about training costs describe.
_WHOLE_TRAINING_SECONDS = 3 * 86400.0


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run with its plan. reasons: why the planner chose a value, by its dotted key in the run file."""

    run: RunConfig
    plan: Plan
    reasons: dict[str, str]

    @property
    def fits(self) -> bool:
        return self.plan.total_memory_bytes <= rank_memory_bytes(self.plan.cluster, self.run.parallel.world_size)


@dataclass(frozen=True, kw_only=True)
class RankedPlans:
    """The plans of one run, best first; if no layout fits, only the one that needs the least memory.

    search_result: the result of the search; None on a CPU and for a run file, which are planned without a search.
    parameters: the size of a model given only by its size, otherwise 0. shape: the name of the shape used for it.
    pinned: the settings that the search had to keep.
    """

    plans: tuple[PlannedRun, ...]
    search_result: Found | None = None
    parameters: int = 0
    shape: str = ""
    pinned: Mapping[str, object] = field(default_factory=dict)

    @property
    def best(self) -> PlannedRun:
        return self.plans[0]

    @property
    def fits(self) -> bool:
        return self.best.fits

    @property
    def fix(self) -> str:
        """The cheapest change with which a layout would fit; "" if a layout fits already or no change was found."""
        return "" if self.fits or not self.search_result else self.search_result.fix

    @property
    def why_not_executed(self) -> str:
        """The reason why ingot's trainer cannot execute the best plan, "" if the trainer can."""
        try:
            require_executable(self.best)
        except ConfigError as error:
            return f"{error.found}; {error.rule}"
        return ""

    @property
    def texts(self) -> str:
        """An explanation of why common texts predict other days and dollars for a model of this size; "" if they do
        not.

        Such texts are about whole trainings, so there is no explanation for short runs.
        """
        asked = self.parameters and self.best.plan.total_seconds > _WHOLE_TRAINING_SECONDS
        return double_discount(self.best.plan, self.best.run, self.parameters) if asked else ""

    def facts(self) -> dict:
        """Return all plans as plain values, for JSON."""
        best = self.best
        facts: dict = {"run": to_dict(best.run), "plan": to_dict(best.plan), "reasons": best.reasons, "fits": self.fits}
        facts |= {"why_not_executed": self.why_not_executed, "texts": self.texts}
        if self.search_result:
            names = ("considered", "fitting", "seconds", "fix", "idle")
            facts["search"] = {name: getattr(self.search_result, name) for name in names}
            facts["layouts"] = [_layout_facts(planned) for planned in self.plans]
        return facts


def _layout_facts(planned: PlannedRun) -> dict:
    """Return the values of one plan in which ranked layouts differ, for JSON."""
    plan, outlook = planned.plan, planned.plan.outlook
    return {
        "parallel": to_dict(planned.run.parallel),
        "micro_batch": planned.run.train.micro_batch,
        "memory_bytes": plan.total_memory_bytes,
        "step_seconds": plan.step_seconds,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "tokens": plan.steps * plan.tokens_per_step,
        "bubble": plan.bubble,
        "exposed_seconds": sum(line.exposed_seconds for line in plan.communication.values()),
        "days": outlook.days if outlook else None,
        "productive_days": outlook.productive_days if outlook else None,
        "usd": plan.usd,
        "usd_with_failures": sum(outlook.usd_by_kind.values()) if outlook else None,
    }


def write_plan(out: Path, planned: PlannedRun, *, force: bool = False) -> Path:
    """Write the run file `out`, with the reason for each chosen value, and plan.json in the same folder; return the
    path of plan.json.

    Raises UsageError if `out` exists and `force` is off, because a user may have edited it; ConfigError if ingot's
    trainer cannot execute the plan.
    """
    require_executable(planned)
    if out.exists() and not force:
        raise UsageError(
            "E-FILE-EXISTS",
            f"{out} exists already",
            rule="a run file is not overwritten, because it may have been edited",
            fix="add --force, or choose another --out",
            path=str(out),
        )
    write_atomic(out, to_toml(planned.run, planned.reasons))
    plan_file = out.parent / "plan.json"
    write_json(plan_file, to_dict(planned.plan))
    return plan_file


def require_executable(planned: PlannedRun) -> None:
    """Raise ConfigError if ingot's trainer cannot execute the plan, because it is for TPUs or for other software."""
    plan = planned.plan
    if plan.cluster.device == "tpu":
        raise ConfigError(
            "E-PLAN-DEVICE",
            f"{plan.cluster.name} has TPUs: this plan is only an estimate",
            rule="ingot trains on CPUs and GPUs",
            fix="remove --out, or use a cluster of GPUs",
            cluster=plan.cluster.name,
            device=plan.cluster.device,
        )
    if plan.software != INGOT:
        raise ConfigError(
            "E-PLAN-SOFTWARE",
            f"the plan is for other software than ingot's own: {plan.software.name}",
            rule="ingot's trainer computes in 16 bits, with its own kernels",
            fix="remove --out, or plan without --fp8 and --software",
            software=plan.software.name,
        )


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
    """Return the plan of a run on a cluster. A run that does not fit still gets a plan, with a warning.

    The plan's step_seconds is 0.0 if the cluster has no measured or published rate for the run's precision.
    tokens: number of tokens in the training set, 0 if unknown; ignored if there is a `manifest`.
    mfu: if not 0, the step time follows from this MFU instead of the prediction.
    parameters: the size of a model given only by its size, whose FLOPs are then 6 per parameter and token; 0 means to
    count the FLOPs of the model's shape, including attention.
    """
    tokens = manifest.tokens if manifest else tokens
    bills = stage_bills(run, cluster, software)
    bill = max(bills, key=lambda stage: sum(term.value for term in stage.values()))
    flops, size = _flops_per_token(run, parameters), checkpoint_bytes(run.model, run.train.precision, mean_moments(run))
    timing = _timing(run, cluster, software, flops.value, mfu)
    seconds = sum(term.value for term in timing.terms.values())
    reached, worked = _mfu(run, cluster, flops.value, seconds), _hfu(run, cluster, seconds)
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
    """Return the fields of a plan that need no prediction: cluster, software, the run's hash, and counts."""
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
    """Return the formulas of the parts of memory and time, of a checkpoint's size, and of all terms in `known` that are
    not None."""
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
    """Return the time of one step; it has no terms if no rate is known. A given MFU replaces all terms by one, but
    keeps the predicted bubble and communication."""
    found = estimate(run, cluster, software) or StepTime({}, {})
    peak = _peak(run, cluster)
    if not mfu or not peak:
        return found
    each = f"{run.parallel.world_size:,} x {format_flops(peak / run.parallel.world_size)}/s x {mfu:.1%} MFU"
    formula = f"{format_count(run.tokens_per_step)} tokens x {format_flops(flops)} / ({each})"
    return replace(found, terms={GIVEN_MFU: Term(run.tokens_per_step * flops / (peak * mfu), formula)})


def _band(cluster: Cluster, seconds: float, mfu: float) -> tuple[float, float]:
    """Return the low and high end of the error band in seconds; zeros if the time is measured or follows from a given
    MFU."""
    low, high = error_band(seconds)
    return (0.0, 0.0) if mfu or cluster.device == "cpu" or low == high else (low, high)


def _peak(run: RunConfig, cluster: Cluster) -> float:
    """Return the peak FLOP/s of all devices in the run's precision, which is the 16-bit peak even if products run in
    8 bits."""
    return cluster.peak_flops.get(run.train.precision, 0.0) * run.parallel.world_size


def _counts(run: RunConfig, flops: Term, tokens: int) -> dict[str, str]:
    """Return the formulas of the run's counts: tokens per step, FLOPs and epochs. tokens: number of tokens in the
    training set, 0 if unknown."""
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


def _mfu(run: RunConfig, cluster: Cluster, flops: float, seconds: float) -> Term | None:
    """Return the MFU of a step with `flops` per token; None on a CPU, or if the peak or the step time is unknown."""
    peak = _peak(run, cluster)
    if cluster.device == "cpu" or not peak or not seconds:
        return None
    speed = run.tokens_per_step / seconds
    mfu = model_flops_utilization(speed, flops, peak)
    return Term(mfu, f"{format_count(speed)} tokens/s x {format_flops(flops)} / {format_flops(peak)}/s = {mfu:.1%}")


def _hfu(run: RunConfig, cluster: Cluster, seconds: float) -> Term | None:
    """Return the hardware FLOPs utilization, which counts all products and attention of the devices, even recomputed
    ones; None if `_mfu` is None."""
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
    """Return the outlook and its formulas; (None, {}) on a CPU, for which no failure rate is published, or if the step
    time is unknown."""
    if cluster.device == "cpu" or not seconds:
        return None, {}
    return outlook(run, cluster, seconds, checkpoint, assumptions)


def _cost(run: RunConfig, cluster: Cluster, seconds: float) -> Term | None:
    """Return the cost of all steps in US dollars, for all devices (on CPU: machines); None without a price or time."""
    price = run.cost.usd_per_hour or cluster.usd_per_hour
    if not price or not seconds:
        return None
    units = run.parallel.world_size if cluster.device != "cpu" else cluster.nodes
    hours = run.train.steps * seconds / 3600
    return Term(units * hours * price, f"{units:,} x {format_seconds(hours * 3600)} x ${price:g} per hour")
