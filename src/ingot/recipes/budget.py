"""What a budget buys: the tokens that fit into it at the predicted speed, and without a model the size to train."""

from dataclasses import replace

from ingot.errors import UsageError
from ingot.planner.outlook import outlook
from ingot.planner.plan import Planned
from ingot.recipes.amounts import Budget
from ingot.recipes.answer import Planning, answer
from ingot.recipes.question import Question, plan_of
from ingot.recipes.subject import by_size
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.flops import train_flops_6nd
from ingot.theory.params import count_active_parameters
from ingot.theory.scaling import compute_optimal
from ingot.units import format_count, format_usd

# Before anything is predicted: what large runs reach of the peak.
_USUAL_MFU = 0.4
# A size is chosen by a speed, which is then predicted of that size, until the next would differ by less.
_ROUNDS, _CLOSE = 4, 0.02
_DAY_SECONDS, _HOUR_SECONDS = 86400.0, 3600.0


def spend(question: Question, budget: Budget, *, sized: bool) -> Planning:
    """The plan for as many tokens as `budget` pays for, failures counted. sized: the size of the model is to be chosen
    as well, with 20 tokens for each parameter (Hoffmann et al. 2022); that of `question` is a first guess.

    Raises UsageError where the cluster has no price for money or no rate for time, or the budget is below one step.
    """
    question = replace(question, tokens=_guessed_tokens(budget, question))
    planning = answer(question)
    for _ in range(_ROUNDS if sized and not budget.flops else 0):
        flops = affordable_steps(budget, planning.best, question) * _step_flops(planning.best)
        size, tokens = compute_optimal(flops)
        if abs(size / question.subject.parameters - 1) < _CLOSE:
            break
        question = replace(question, subject=by_size(rounded(size)), tokens=round(tokens))
        planning = answer(question)
    plans = tuple(_cut_to(budget, planned, question) for planned in planning.plans)
    return replace(planning, plans=plans, question=replace(question, tokens=_tokens(plans[0])))


def first_size(budget: Budget, cluster: Cluster, usd_per_hour: float) -> int:
    """Parameters of the compute-optimal model, at the speed that large runs usually reach."""
    return rounded(compute_optimal(_guessed_flops(budget, cluster, usd_per_hour))[0])


def rounded(parameters: float) -> int:
    """To two digits: a size is chosen by a fit that is not better known."""
    return round(float(f"{parameters:.2g}"))


def affordable_steps(budget: Budget, planned: Planned, question: Question) -> float:
    """How many steps of a plan the budget pays for. Failures and storage cost more the longer a run is, so steps are
    raised or lowered by what is over until nothing is."""
    run, plan = planned.run, planned.plan
    if budget.flops:
        return budget.flops / _step_flops(planned)
    _require_known(budget, planned, question)

    def share(steps: float) -> float:
        return _share_spent(
            budget, _with_steps(run, steps), plan.cluster, plan.step_seconds, plan.checkpoint_bytes, question
        )

    steps = float(run.train.steps)
    for _ in range(20):
        steps /= share(steps)
    while steps >= 2 and share(steps) > 1:  # whole steps
        steps = int(steps) - 1
    return steps


def _share_spent(
    budget: Budget, run: RunConfig, cluster: Cluster, step_seconds: float, checkpoint_bytes: float, question: Question
) -> float:
    if cluster.device == "cpu":  # nobody counted the failures of one, and plans of it have no outlook
        seconds = run.train.steps * step_seconds
        hours = seconds / _HOUR_SECONDS * cluster.nodes
        usd = hours * _price(question)
    else:
        found, _ = outlook(run, cluster, step_seconds, checkpoint_bytes, question.assumptions)
        seconds, hours, usd = found.days * _DAY_SECONDS, found.device_hours, sum(found.usd_by_kind.values())
    if budget.usd:
        return usd / budget.usd
    return seconds / budget.seconds if budget.seconds else hours / budget.device_hours


def _cut_to(budget: Budget, planned: Planned, question: Question) -> Planned:
    """The plan with the steps that are paid for."""
    steps = affordable_steps(budget, planned, question)
    if steps < 1:
        raise UsageError(
            f"the budget pays for {steps:.2g} steps of {format_count(planned.run.tokens_per_step)} tokens",
            rule="at least one step",
            fix="a larger budget, a smaller --model, or a smaller --batch",
        )
    run = _with_steps(planned.run, steps)
    reasons = planned.reasons | {"train.steps": "as many as the budget pays for"}
    tokens = question.manifest.tokens if question.manifest else _tokens_of(run)
    plan = plan_of(replace(question, tokens=tokens), run)
    return Planned(run=run, plan=plan, reasons=reasons)


def _with_steps(run: RunConfig, steps: float) -> RunConfig:
    whole = max(int(steps), 1)
    warmup = min(run.schedule.warmup_steps, max(whole // 20, 1))
    return replace(run, train=replace(run.train, steps=whole), schedule=replace(run.schedule, warmup_steps=warmup))


def _tokens_of(run: RunConfig) -> int:
    return run.train.steps * run.tokens_per_step


def _tokens(planned: Planned) -> int:
    return _tokens_of(planned.run)


def _step_flops(planned: Planned) -> float:
    return planned.plan.flops_per_token * planned.run.tokens_per_step


def _price(question: Question) -> float:
    return question.usd_per_hour or question.cluster.usd_per_hour


def _guessed_flops(budget: Budget, cluster: Cluster, usd_per_hour: float) -> float:
    if budget.flops:
        return budget.flops
    price = usd_per_hour or cluster.usd_per_hour
    if budget.usd and not price:
        raise UsageError(f"{format_usd(budget.usd)} on {cluster.name}, which has no price", fix="--price USD")
    hours = (
        budget.usd / price if budget.usd else budget.device_hours or budget.seconds / _HOUR_SECONDS * cluster.devices
    )
    rate = (
        max(cluster.peak_flops.values(), default=0.0)
        if cluster.device == "cpu"
        else cluster.peak_flops.get("bf16", 0.0)
    )
    if not rate:
        raise UsageError(f"a budget on {cluster.name}, whose rate is not known", fix="ingot doctor --bench measures it")
    return hours * _HOUR_SECONDS * rate * _USUAL_MFU


def _guessed_tokens(budget: Budget, question: Question) -> int:
    flops = _guessed_flops(budget, question.cluster, question.usd_per_hour)
    parameters = question.subject.parameters or count_active_parameters(question.subject.arch)
    return max(round(flops / train_flops_6nd(parameters, 1)), 1)


def _require_known(budget: Budget, planned: Planned, question: Question) -> None:
    if not planned.plan.step_seconds:
        found = f"time and money on {planned.plan.cluster.name}, whose rate is not known"
        raise UsageError(found, fix="ingot doctor --bench measures it, or plan with a budget of operations (6e23flop)")
    if budget.usd and not _price(question):
        raise UsageError(
            f"{format_usd(budget.usd)} on {planned.plan.cluster.name}, which has no price", fix="--price USD"
        )
