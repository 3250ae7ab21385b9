"""Plans for a budget: the number of tokens it pays for at the predicted speed and, if no model is named, the size of
the model to train."""

from dataclasses import replace

from ingot.errors import ConfigError, UsageError
from ingot.planner.request.amounts import Budget
from ingot.planner.request.answer import PlanResult, answer, assumptions_of, planned_of
from ingot.planner.request.plan_request import PlanRequest, base_run
from ingot.planner.request.presets import ModelChoice, model_of_size
from ingot.planner.run.outlook import outlook
from ingot.planner.run.plan import PlannedRun
from ingot.planner.run.scaling import compute_optimal
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.theory.flops import train_flops_6nd
from ingot.theory.params import count_active_parameters
from ingot.units import format_count, format_usd

# The MFU that large runs usually reach: the first guess, used before a speed is predicted.
_USUAL_MFU = 0.4
# The predicted speed decides the size or the batch, and these change the predicted speed. The planner iterates at most
# _ROUNDS times, until the sizes of two rounds differ by less than the share _CLOSE.
_ROUNDS, _CLOSE = 4, 0.02
_DAY_SECONDS, _HOUR_SECONDS = 86400.0, 3600.0


def spend(request: PlanRequest, budget: Budget, *, sized: bool) -> PlanResult:
    """Return the plans for as many tokens as `budget` pays for, including the cost of failures.

    sized: choose the model's size too, with 20 tokens per parameter (Hoffmann et al. 2022); the size in `request` is
    then a first guess. Raises UsageError if the budget pays for less than one step, if it is money and the cluster has
    no price, or if it is not operations and the cluster's FLOP/s are unknown.
    """
    if request.wanted.steps:
        raise UsageError(
            "E-BUDGET-STEPS",
            "--steps and --budget are both given",
            rule="the number of steps follows from the budget",
            fix="remove --steps, or give --tokens instead of --budget",
            steps=request.wanted.steps,
        )
    request = replace(request, tokens=_guessed_tokens(budget, request))
    result = answer(request)
    for _ in range(_ROUNDS):
        better = _sized(budget, result, request) if sized else _settled(budget, result, request)
        if better == request or not result.fits:
            break
        request, result = better, answer(better)
    plans = tuple(_cut_to(budget, planned, request) for planned in result.plans)
    return replace(result, plans=plans)


def _sized(budget: Budget, result: PlanResult, request: PlanRequest) -> PlanRequest:
    """Return the request with the model size that is compute-optimal at the predicted speed. The request is unchanged
    if its size is within 2% of that, or if the budget is in FLOPs."""
    if budget.flops:
        return request
    size, tokens = compute_optimal(affordable_steps(budget, result.best, request) * _step_flops(result.best))
    if abs(size / request.model.parameters - 1) < _CLOSE:
        return request
    return replace(request, model=_of_size(rounded(size)), tokens=round(tokens))


def _settled(budget: Budget, result: PlanResult, request: PlanRequest) -> PlanRequest:
    """Return the request with the number of tokens that the budget pays for; the same request if the batch that the
    rules choose would not change."""
    run = result.best.run
    tokens = int(affordable_steps(budget, result.best, request) * run.tokens_per_step)
    other = replace(request, tokens=max(tokens, 1))
    return request if base_run(other)[0].train.global_batch == run.train.global_batch else other


def first_size(budget: Budget, cluster: Cluster, usd_per_hour: float) -> ModelChoice:
    """Return the compute-optimal model for the budget at the usual MFU of large runs. Raises UsageError."""
    return _of_size(rounded(compute_optimal(_guessed_flops(budget, cluster, usd_per_hour))[0]))


def _of_size(parameters: int) -> ModelChoice:
    """Return a dense model with `parameters` parameters. Raises UsageError if this is below 1M or above 100T."""
    try:
        return model_of_size(parameters)
    except ConfigError as error:
        raise UsageError(
            "E-BUDGET-SIZE",
            f"the compute-optimal size for the budget is {format_count(parameters)} parameters",
            rule=error.rule,
            fix="give another budget, or the size itself: --params 70b",
            parameters=parameters,
        ) from None


def rounded(parameters: float) -> int:
    """Return the size rounded to two significant digits, the accuracy of the scaling law."""
    return round(float(f"{parameters:.2g}"))


def affordable_steps(budget: Budget, planned: PlannedRun, request: PlanRequest) -> float:
    """Return the number of steps of a plan that the budget pays for.

    The cost per step (failures, storage) depends on the number of steps, so this number is found by iteration.
    """
    run, plan = planned.run, planned.plan
    if budget.flops:
        return budget.flops / _step_flops(planned)
    _require_known(budget, planned, request)

    def share(steps: float) -> float:
        whole = replace(run, train=replace(run.train, steps=max(int(steps), 1)))
        return _share_spent(budget, whole, plan, request)

    steps = float(run.train.steps)
    for _ in range(20):
        steps /= share(steps)
    while steps >= 2 and share(steps) > 1:  # whole steps
        steps = int(steps) - 1
    return steps


def _share_spent(budget: Budget, run: RunConfig, plan: Plan, request: PlanRequest) -> float:
    cluster = plan.cluster
    if cluster.device == "cpu":  # no published failure rate, so plans for CPUs have no outlook
        seconds = run.train.steps * plan.step_seconds
        hours = seconds / _HOUR_SECONDS * cluster.nodes
        usd = hours * _price(request)
    else:
        assumed = assumptions_of(request, run)
        found, _ = outlook(run, cluster, plan.step_seconds, plan.checkpoint_bytes, assumed)
        seconds, hours, usd = found.days * _DAY_SECONDS, found.device_hours, sum(found.usd_by_kind.values())
    if budget.usd:
        return usd / budget.usd
    return seconds / budget.seconds if budget.seconds else hours / budget.device_hours


def _cut_to(budget: Budget, planned: PlannedRun, request: PlanRequest) -> PlannedRun:
    """Return the plan with as many steps as the budget pays for. Raises UsageError if that is less than one."""
    steps = affordable_steps(budget, planned, request)
    if steps < 1:
        raise UsageError(
            "E-BUDGET-SMALL",
            f"the budget pays for {steps:.2g} steps of {format_count(planned.run.tokens_per_step)} tokens",
            rule="a budget pays for at least one step",
            fix="give a larger budget, a smaller --model, or a smaller --batch",
            steps=steps,
        )
    run, reasons = _with_steps(planned, request, int(steps))
    tokens = request.manifest.tokens if request.manifest else _tokens_of(run)
    return planned_of(replace(request, tokens=tokens), run, reasons)


def _with_steps(planned: PlannedRun, request: PlanRequest, steps: int) -> tuple[RunConfig, dict[str, str]]:
    """Return the run with `steps` steps in the same layout and batch, and the reasons of its settings. Rules choose
    the values that depend on the number of steps."""
    train, run = planned.run.train, planned.run
    wanted = replace(request.wanted, steps=steps, global_batch=train.global_batch)
    other, reasons = base_run(replace(request, tokens=steps * run.tokens_per_step, wanted=wanted))
    reasons |= planned.reasons | {"train.steps": "as many as the budget pays for"}
    other = replace(other, parallel=run.parallel, train=replace(other.train, micro_batch=train.micro_batch))
    if "checkpoint.every_steps" not in planned.reasons:  # the plan counted the interval of this run
        other = replace(other, checkpoint=run.checkpoint)
    return other, reasons


def _tokens_of(run: RunConfig) -> int:
    return run.train.steps * run.tokens_per_step


def _step_flops(planned: PlannedRun) -> float:
    return planned.plan.flops_per_token * planned.run.tokens_per_step


def _price(request: PlanRequest) -> float:
    return request.usd_per_hour or request.cluster.usd_per_hour


def _guessed_flops(budget: Budget, cluster: Cluster, usd_per_hour: float) -> float:
    if budget.flops:
        return budget.flops
    price = usd_per_hour or cluster.usd_per_hour
    if budget.usd and not price:
        raise _no_price(budget, cluster)
    hours = (
        budget.usd / price if budget.usd else budget.device_hours or budget.seconds / _HOUR_SECONDS * cluster.devices
    )
    rate = (
        max(cluster.peak_flops.values(), default=0.0)
        if cluster.device == "cpu"
        else cluster.peak_flops.get("bf16", 0.0)
    )
    if not rate:
        raise _no_rate(cluster)
    return hours * _HOUR_SECONDS * rate * _USUAL_MFU


def _guessed_tokens(budget: Budget, request: PlanRequest) -> int:
    flops = _guessed_flops(budget, request.cluster, request.usd_per_hour)
    parameters = request.model.parameters or count_active_parameters(request.model.arch)
    return max(round(flops / train_flops_6nd(parameters, 1)), 1)


def _require_known(budget: Budget, planned: PlannedRun, request: PlanRequest) -> None:
    if not planned.plan.step_seconds:
        raise _no_rate(planned.plan.cluster)
    if budget.usd and not _price(request):
        raise _no_price(budget, planned.plan.cluster)


def _no_rate(cluster: Cluster) -> UsageError:
    return UsageError(
        "E-BUDGET-RATE",
        f"the FLOP/s of {cluster.name} are not known, so --budget cannot be converted to steps",
        rule="a budget of money or time is divided by the predicted time of a step",
        fix="measure them with `ingot doctor --bench`, or plan with a budget of operations (6e23flop)",
        cluster=cluster.name,
    )


def _no_price(budget: Budget, cluster: Cluster) -> UsageError:
    return UsageError(
        "E-BUDGET-PRICE",
        f"--budget is {format_usd(budget.usd)}, but {cluster.name} has no price",
        rule="a budget of money needs the price of a device-hour",
        fix="give --price USD",
        cluster=cluster.name,
    )
