"""What a budget buys: the tokens that fit into it at the predicted speed, and without a model the size to train."""

from dataclasses import replace

from ingot.errors import ConfigError, UsageError
from ingot.planner.request.amounts import Budget
from ingot.planner.request.answer import Planning, answer, assumptions_of, planned_of
from ingot.planner.request.question import Question, base_run
from ingot.planner.request.subject import Subject, by_size
from ingot.planner.run.outlook import outlook
from ingot.planner.run.plan import Planned
from ingot.planner.run.scaling import compute_optimal
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.theory.flops import train_flops_6nd
from ingot.theory.params import count_active_parameters
from ingot.units import format_count, format_usd

# Before anything is predicted: what large runs reach of the peak.
_USUAL_MFU = 0.4
# A size, or a batch, is chosen by a speed, which is then predicted with it, until the next would (hardly) differ.
_ROUNDS, _CLOSE = 4, 0.02
_DAY_SECONDS, _HOUR_SECONDS = 86400.0, 3600.0


def spend(question: Question, budget: Budget, *, sized: bool) -> Planning:
    """The plan for as many tokens as `budget` pays for, failures counted. sized: the size of the model is to be chosen
    as well, with 20 tokens for each parameter (Hoffmann et al. 2022); that of `question` is a first guess.

    Raises UsageError where the cluster has no price for money or no rate for time, or the budget is below one step.
    """
    if question.wanted.steps:
        raise UsageError("--steps and --budget", rule="one follows from the other", fix="leave one of them")
    question = replace(question, tokens=_guessed_tokens(budget, question))
    planning = answer(question)
    for _ in range(_ROUNDS):
        better = _sized(budget, planning, question) if sized else _settled(budget, planning, question)
        if better == question or not planning.fits:
            break
        question, planning = better, answer(better)
    plans = tuple(_cut_to(budget, planned, question) for planned in planning.plans)
    return replace(planning, plans=plans, question=replace(question, tokens=_tokens_of(plans[0].run)))


def _sized(budget: Budget, planning: Planning, question: Question) -> Question:
    """With the size that is compute-optimal at the speed of the plan; as it is where that hardly differs."""
    if budget.flops:
        return question
    size, tokens = compute_optimal(affordable_steps(budget, planning.best, question) * _step_flops(planning.best))
    if abs(size / question.subject.parameters - 1) < _CLOSE:
        return question
    return replace(question, subject=_of_size(rounded(size)), tokens=round(tokens))


def _settled(budget: Budget, planning: Planning, question: Question) -> Question:
    """With the tokens that are paid for, where rules choose another batch for these; as it is where they do not."""
    run = planning.best.run
    tokens = int(affordable_steps(budget, planning.best, question) * run.tokens_per_step)
    other = replace(question, tokens=max(tokens, 1))
    return question if base_run(other)[0].train.global_batch == run.train.global_batch else other


def first_size(budget: Budget, cluster: Cluster, usd_per_hour: float) -> Subject:
    """The compute-optimal model, at the speed that large runs usually reach. Raises UsageError."""
    return _of_size(rounded(compute_optimal(_guessed_flops(budget, cluster, usd_per_hour))[0]))


def _of_size(parameters: int) -> Subject:
    """Raises UsageError where no model is so small, or so large."""
    try:
        return by_size(parameters)
    except ConfigError as error:
        found = f"the compute-optimal size for the budget: {format_count(parameters)} parameters"
        raise UsageError(found, rule=error.rule, fix="another budget, or the size itself: --params 70b") from None


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
        whole = replace(run, train=replace(run.train, steps=max(int(steps), 1)))
        return _share_spent(budget, whole, plan, question)

    steps = float(run.train.steps)
    for _ in range(20):
        steps /= share(steps)
    while steps >= 2 and share(steps) > 1:  # whole steps
        steps = int(steps) - 1
    return steps


def _share_spent(budget: Budget, run: RunConfig, plan: Plan, question: Question) -> float:
    cluster = plan.cluster
    if cluster.device == "cpu":  # nobody counted the failures of one, and plans of it have no outlook
        seconds = run.train.steps * plan.step_seconds
        hours = seconds / _HOUR_SECONDS * cluster.nodes
        usd = hours * _price(question)
    else:
        assumed = assumptions_of(question, run)
        found, _ = outlook(run, cluster, plan.step_seconds, plan.checkpoint_bytes, assumed)
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
    run, reasons = _with_steps(planned, question, int(steps))
    tokens = question.manifest.tokens if question.manifest else _tokens_of(run)
    return planned_of(replace(question, tokens=tokens), run, reasons)


def _with_steps(planned: Planned, question: Question, steps: int) -> tuple[RunConfig, dict[str, str]]:
    """The same layout and batch, with what rules choose by the number of steps."""
    train, run = planned.run.train, planned.run
    wanted = replace(question.wanted, steps=steps, global_batch=train.global_batch)
    other, reasons = base_run(replace(question, tokens=steps * run.tokens_per_step, wanted=wanted))
    reasons |= planned.reasons | {"train.steps": "as many as the budget pays for"}
    other = replace(other, parallel=run.parallel, train=replace(other.train, micro_batch=train.micro_batch))
    if "checkpoint.every_steps" not in planned.reasons:  # those that were counted
        other = replace(other, checkpoint=run.checkpoint)
    return other, reasons


def _tokens_of(run: RunConfig) -> int:
    return run.train.steps * run.tokens_per_step


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
