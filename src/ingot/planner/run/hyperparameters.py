"""Proposed hyperparameters of a training run, each with its formula and source; and the bubbles of a batch ramp.

Proposals are starting points. Published rules disagree outside the range of sizes they were fitted on, so there are
several proposals for some names. A proposed run file uses the first proposal for each name.
"""

from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.planner.run import scaling
from ingot.planner.run.scaling import batch_ramp
from ingot.schema.arch import Arch
from ingot.schema.run import Optim, RunConfig, Schedule
from ingot.theory.flops import train_flops_6nd
from ingot.theory.layout import resolve_parallel
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.theory.schedule import build_table, schedule_problems, simulate
from ingot.units import format_count

_BI = "Bi et al. 2024 (DeepSeek LLM), eq. 1"
_HOFFMANN = "Hoffmann et al. 2022, approaches 1 and 2"
# With more tokens per parameter than this, fits predict a lower loss than runs reached (Sardana et al. 2024, sec. 4).
_TOKENS_PER_PARAMETER_SEEN = 500


@dataclass(frozen=True, kw_only=True)
class ProposedValue:
    """A proposed hyperparameter. shown: `value` as text with its unit. formula: the rule with numbers filled in. note:
    the limits of the rule, and what others do."""

    name: str
    value: float
    shown: str
    formula: str
    source: str
    note: str = ""


def propose_hyperparameters(
    arch: Arch, tokens: int, seq_len: int, *, batch_tokens: float = 0.0
) -> tuple[ProposedValue, ...]:
    """Return the proposals for training a model on `tokens` tokens. Several proposals can have the same name.

    batch_tokens: the batch on which the ramp, the schedule and the comparison with the critical batch are based; 0
    means the proposed batch. Raises ConfigError if `tokens` or `seq_len` is below 1.
    """
    if tokens < 1 or seq_len < 1:
        raise ConfigError(
            "E-TOKENS-NONE",
            f"{tokens:,} tokens in sequences of {seq_len:,}",
            rule="a run has at least one token, in sequences of at least one token",
            fix="give a larger --tokens and --seq",
            tokens=tokens,
            seq_len=seq_len,
        )
    parameters = size_in_laws(arch)
    batch = batch_tokens or scaling.suggested_batch_tokens(arch, seq_len, tokens)
    loss = scaling.BESIROGLU.loss(parameters, tokens)
    return (
        *_data(arch, parameters, tokens),
        *_batch(arch, seq_len, tokens, batch, loss),
        *_learning_rate(arch, seq_len, tokens, parameters),
        *_schedule(tokens, batch, count_parameters(arch)),
        *_optimizer(),
        *([_experts(arch)] if arch.is_moe else []),
    )


def size_in_laws(arch: Arch) -> int:
    """Return the N of the scaling laws: the number of parameters, for a model with experts only the active ones."""
    return count_active_parameters(arch) if arch.is_moe else count_parameters(arch)


def _n(arch: Arch, parameters: float) -> str:
    return f"{format_count(parameters)} {'active ' * arch.is_moe}parameters"


def _data(arch: Arch, parameters: int, tokens: int) -> list[ProposedValue]:
    optimal = scaling.compute_optimal_tokens(parameters)
    flops, over = train_flops_6nd(parameters, tokens), scaling.overtraining(parameters, tokens)
    per = scaling.TOKENS_PER_PARAMETER
    best, best_tokens = scaling.compute_optimal(flops)
    fit = scaling.BESIROGLU
    if over.multiple > 1:
        trade = f"{over.wasted:.0%} of the training FLOPs buy a smaller model to serve"
    else:
        trade = f"a smaller model would reach the same loss with {over.wasted:.0%} fewer FLOPs"
    return [
        ProposedValue(
            name="compute-optimal tokens",
            value=optimal,
            shown=format_count(optimal),
            formula=f"{per} x {_n(arch, parameters)} = {format_count(optimal)}; {format_count(tokens)} are"
            f" {over.multiple:.3g} times that",
            source=_HOFFMANN,
            note="more is common for models that are served: Llama 3 8B was trained on 15T, 94 times its 160B",
        ),
        ProposedValue(
            name="compute-optimal size",
            value=best,
            shown=format_count(best),
            formula=f"sqrt({flops:.2e} FLOPs / (6 x {per})) = {format_count(best)}, on {format_count(best_tokens)}",
            source=_HOFFMANN,
            note=f"{format_count(over.best_parameters)} by the fit of {fit.source}",
        ),
        ProposedValue(
            name="loss",
            value=over.loss,
            shown=f"{over.loss:.3f} nats per token",
            formula=f"{fit.e} + {fit.a}/N^{fit.alpha} + {fit.b}/D^{fit.beta}, N {format_count(parameters)},"
            f" D {format_count(tokens)}; best for these FLOPs {over.best_loss:.3f}",
            source=f"{fit.source}, on Hoffmann et al.'s runs",
            note=f"for their text and tokenizer, so compare only differences; {trade}",
        ),
    ]


def _batch(arch: Arch, seq_len: int, tokens: int, batch: float, loss: float) -> list[ProposedValue]:
    """Return the proposals on the batch. batch: tokens of the batch in use. loss: the expected final loss, from which
    the critical batch follows."""
    budget, critical = scaling.compute_budget(arch, seq_len, tokens), scaling.kaplan_critical_batch(loss)
    ruled = scaling.suggested_batch_tokens(arch, seq_len, tokens)
    near = [run for run in scaling.nearest_runs(size_in_laws(arch), arch.is_moe) if run.batch_tokens][:2]
    known = ", ".join(f"{run.name} {format_count(run.batch_tokens)}" for run in near)
    ramp = scaling.batch_ramp(batch, tokens)
    more_tokens, more_steps = scaling.token_factor(batch, critical), scaling.step_factor(batch, critical)
    takes = f"{format_count(batch)} take {more_tokens:.2f} x the fewest tokens and {more_steps:.2f} x the fewest steps"
    return [
        ProposedValue(
            name="batch",
            value=ruled,
            shown=f"{format_count(ruled)} tokens",
            formula=f"0.2920 x ({budget:.2e} FLOPs)^0.3271 = {format_count(ruled)} tokens"
            f" = {max(ruled / seq_len, 1):,.0f} sequences of {seq_len:,}",
            source=_BI,
            note=f"fitted from 1e17 to 2e19 FLOPs; published: {known}",
        ),
        ProposedValue(
            name="critical batch",
            value=critical,
            shown=f"{format_count(critical)} tokens",
            formula=f"2e8 / {loss:.3f}^(1/0.21) = {format_count(critical)}; {takes}",
            source="Kaplan et al. 2020, eq. 1.4; McCandlish et al. 2018, eq. 2.11",
            note="fitted on other text: measure the gradient's noise scale, which grows as the loss falls",
        ),
        ProposedValue(
            name="batch ramp",
            value=ramp[0][0],
            shown=" -> ".join(format_count(size) for size, _ in ramp) + " tokens",
            formula=", ".join(f"{format_count(size)} until {format_count(until)}" for size, until in ramp) + " tokens",
            source="between PaLM, Llama 3 405B and GPT-3 (planner/run/scaling.py)",
            note="while the loss is high, small batches learn more per token; but a pipeline has few micro-batches",
        ),
    ]


def _learning_rate(arch: Arch, seq_len: int, tokens: int, parameters: int) -> list[ProposedValue]:
    budget, lr = scaling.compute_budget(arch, seq_len, tokens), scaling.suggested_learning_rate(arch, seq_len, tokens)
    nearest = scaling.nearest_runs(parameters, arch.is_moe)[0]
    with_batch = f" with batches of {format_count(nearest.batch_tokens)}" if nearest.batch_tokens else ""
    proposals = [
        ProposedValue(
            name="learning rate",
            value=lr,
            shown=f"{lr:.1e}",
            formula=f"0.3118 x ({budget:.2e} FLOPs)^-0.1250 = {lr:.1e}",
            source=_BI,
            note="fitted from 1e17 to 2e19 FLOPs; other published runs of 30B and more stay below it",
        ),
        ProposedValue(
            name="learning rate",
            value=nearest.learning_rate,
            shown=f"{nearest.learning_rate:.1e}",
            formula=f"{nearest.name} has {nearest.learning_rate:.1e}{with_batch}",
            source=nearest.source,
        ),
    ]
    if kaplan := scaling.kaplan_learning_rate(parameters):
        formula = f"0.003239 - 0.0001395 ln({parameters:.3g}) = {kaplan:.1e}"
        note = "breaks down above 10B" if parameters > 1e10 else "fitted below 1.5B, with batches of 0.5M tokens"
        source = "Kaplan et al. 2020, eq. D.1"
        proposals.append(
            ProposedValue(
                name="learning rate", value=kaplan, shown=f"{kaplan:.1e}", formula=formula, source=source, note=note
            )
        )
    return proposals


def _schedule(tokens: int, batch: float, parameters: float) -> list[ProposedValue]:
    steps, final = max(round(tokens / batch), 1), Schedule().final_fraction
    warmup, decay = scaling.warmup_steps(steps, parameters), max(round(0.1 * steps), 1)
    return [
        ProposedValue(
            name="schedule",
            value=final,
            shown=f"cosine to {final:.0%} of the peak",
            formula=f"half a period over all {steps:,} steps",
            source="Hoffmann et al. 2022, appendix B",
            note="a cosine more than 25% longer than the run costs loss: use WSD if the number of tokens is not fixed",
        ),
        ProposedValue(
            name="schedule",
            value=decay,
            shown=f"WSD, decay over {decay:,} steps",
            formula=f"10% of {steps:,} steps",
            source="Hu et al. 2024 (MiniCPM), section 4",
            note="as good as a cosine after the decay, and training can continue from before the decay",
        ),
        ProposedValue(
            name="warm-up",
            value=warmup,
            shown=f"{warmup:,} steps",
            formula=f"5% of {steps:,} steps, at most 2,000; above 1B parameters at least 1,000 or half of them",
            source="Touvron et al. 2023 (LLaMA), section 2.3",
            note="Llama 3 405B had 8,000 steps of warm-up, GPT-3 375M tokens",
        ),
    ]


def _optimizer() -> list[ProposedValue]:
    optim = Optim()
    common = "Brown et al. 2020, appendix B; Touvron et al. 2023, section 2.3"
    given = (
        ("weight decay", optim.weight_decay, "on matrices only, decoupled from the gradient"),
        ("beta2", optim.beta2, "below Adam's 0.999: a rare large gradient has an effect for 20 steps, not 1,000"),
        ("clip norm", optim.clip_norm, "the norm of the whole gradient"),
    )
    return [
        ProposedValue(name=name, value=value, shown=f"{value:g}", formula="as published", source=common, note=note)
        for name, value, note in given
    ]


def _experts(arch: Arch) -> ProposedValue:
    total, active = count_parameters(arch), count_active_parameters(arch)
    return ProposedValue(
        name="experts",
        value=active,
        shown=f"{format_count(active)} of {format_count(total)} parameters are active",
        formula=f"{arch.moe.top_k} of {arch.moe.num_experts} experts, and all parameters that every token uses",
        source="theory/params.py",
        note="the laws above are fitted on dense models: with active parameters they give too high a loss and too few"
        " tokens, with all parameters too low a loss",
    )


def inference_aware(
    parameters: float,
    tokens: float,
    served_tokens: float,
    *,
    weight: float = 1.0,
    fit: scaling.LossFit = scaling.BESIROGLU,
) -> tuple[scaling.CheapestServed, ProposedValue]:
    """Return the model size that is cheapest to train and to serve, at the loss that a model of `parameters` reaches on
    `tokens`; and this size as a proposal.

    served_tokens: number of tokens that the model reads and writes in its whole use. weight: cost of a served FLOP
    relative to a training FLOP (`serving_weight`). Raises ConfigError for numbers that are not positive.
    """
    for name, value in (("parameters", parameters), ("tokens", tokens), ("weight", weight)):
        if not value > 0:
            raise _serving_error(name, value, "above 0")
    if not served_tokens >= 0:
        raise _serving_error("served_tokens", served_tokens, "at least 0")
    loss = fit.loss(parameters, tokens)
    found = scaling.cheapest_to_serve(loss, served_tokens, weight, fit)
    own = train_flops_6nd(parameters, tokens) + weight * train_flops_6nd(parameters, served_tokens) / 3
    ratio = found.tokens / found.parameters
    far = f"; {ratio:,.0f} tokens per parameter are more than fits know" * (ratio > _TOKENS_PER_PARAMETER_SEEN)
    return found, ProposedValue(
        name="inference-aware size",
        value=found.parameters,
        shown=f"{format_count(found.parameters)} on {format_count(found.tokens)} tokens",
        formula=f"minimum of 6 N D + {weight:g} x 2 N x {format_count(served_tokens)} served, at a loss of {loss:.3f},"
        f" = {found.flops:.2e} FLOPs; {format_count(found.usual_parameters)} on {format_count(found.usual_tokens)}, the"
        f" cheapest to train, {found.usual_flops:.2e}; {format_count(parameters)} on {format_count(tokens)} {own:.2e}",
        source=f"Sardana et al. 2024, eq. 3, with the fit of {fit.source}",
        note=f"saves {found.saved:.0%} compared with the cheapest to train{far}",
    )


def _serving_error(name: str, value: float, rule: str) -> ConfigError:
    return ConfigError(
        "E-SERVING-VALUE",
        f"{name} is {value}",
        rule=f"{name} is {rule}",
        fix=f"give a value {rule}",
        name=name,
        value=value,
    )


def serving_weight(training_mfu: float, serving_mfu: float, price_ratio: float = 1.0) -> float:
    """Return the cost of a served FLOP relative to a training FLOP. price_ratio: price of an hour of serving divided by
    that of an hour of training.

    Generation reaches an MFU of about 1% with single sequences, and tens of percent in large batches (Sardana et al.
    2024). Raises ConfigError for an MFU outside 0 to 1, or a price ratio that is not positive.
    """
    for name, mfu in (("training_mfu", training_mfu), ("serving_mfu", serving_mfu)):
        if not 0 < mfu <= 1:
            raise _serving_error(name, mfu, "a share above 0 and at most 1")
    if not price_ratio > 0:
        raise _serving_error("price_ratio", price_ratio, "above 0")
    return training_mfu / serving_mfu * price_ratio


@dataclass(frozen=True)
class RampStage:
    """One stage of a batch ramp. The small batches of early stages give a pipeline few micro-batches.

    until_tokens: number of tokens of the run after which the next stage begins. bubble: share of a step in which
    pipeline ranks wait; None if the schedule does not allow this number of micro-batches.
    """

    batch_tokens: float
    until_tokens: float
    micro_batches: int
    bubble: float | None


def ramp_bubbles(run: RunConfig, tokens: int = 0, first_batch: float = 0.0) -> tuple[RampStage, ...]:
    """Return the stages of a batch ramp with the bubble of each, for equal pipeline stages and F = I = W.

    tokens: number of tokens of the whole run; 0 means those of its steps. first_batch: tokens of the first batch; 0
    means a quarter of the run's.
    """
    ramp = batch_ramp(run.tokens_per_step, tokens or run.train.steps * run.tokens_per_step)
    if first_batch:
        ramp = ((first_batch, ramp[0][1]), *ramp[1:])
    each = run.train.seq_len * run.train.micro_batch * run.parallel.data_ranks
    stages = [(size, until, max(round(size / each), 1)) for size, until in ramp]
    return tuple(RampStage(size, until, count, _bubble(run, count)) for size, until, count in stages)


def _bubble(run: RunConfig, micro_batches: int) -> float | None:
    parallel = resolve_parallel(run)
    if parallel.pp == 1:
        return 0.0
    shape = parallel.schedule, parallel.pp, micro_batches, parallel.stages_on_each_rank
    if any(schedule_problems(*shape)):
        return None
    return simulate(build_table(*shape), forward=1.0, backward_input=1.0, backward_weight=1.0).bubble_fraction


def ramp_warning(run: RunConfig, tolerated: float = 0.25) -> str:
    """Return a warning if, at the start of a batch ramp, pipeline ranks would wait for more than the share `tolerated`
    of a step; otherwise ""."""
    first, *_, last = ramp_bubbles(run)
    if first.bubble is None:
        why = f"{run.parallel.schedule} is not possible with its {first.micro_batches} micro-batches"
    elif first.bubble > tolerated:
        now = "" if last.bubble is None else f", and {last.bubble:.0%} with the whole batch"
        why = f"pipeline ranks would wait {first.bubble:.0%} of a step with {first.micro_batches} micro-batches{now}"
    else:
        return ""
    return (
        f"a batch ramp from {format_count(first.batch_tokens)} tokens: {why}; begin with a larger batch, or use a"
        " shorter pipeline"
    )
