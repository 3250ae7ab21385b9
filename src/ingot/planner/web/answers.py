"""What the page asks the planner: the one place where its settings become a run, a cluster and a plan.

Answers are kept for the settings that were asked for last, so that a comparison costs nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ingot.config import to_toml
from ingot.errors import ConfigError, UsageError
from ingot.planner.predict.time.step_time import simulated
from ingot.planner.request.answer import planned_of
from ingot.planner.request.assumptions import with_properties
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model, model_names, unknown
from ingot.planner.request.project import require_executable
from ingot.planner.request.question import Question, base_run
from ingot.planner.request.subject import Subject, find_subject
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.plan import Planned
from ingot.planner.run.propose import Hints
from ingot.planner.run.scaling import compute_optimal_tokens
from ingot.planner.web.settle import data_ranks, settle
from ingot.planner.web.state import LAYOUT, MAX_BATCH, MAX_DEVICES, State
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.theory.layout import layout_problems, positions
from ingot.theory.params import count_active_parameters
from ingot.theory.schedule import Timeline

_NO_LAYOUT = {key: getattr(State(), key) for key in LAYOUT}
# A schedule is simulated action by action: more of them than this would keep the server busy for seconds.
_MAX_ACTIONS = 400_000


@dataclass(frozen=True, kw_only=True)
class Answer:
    """state: settled. problems: (key, what is wrong and the way out); without any there is a plan."""

    state: State
    cluster: Cluster
    run: RunConfig
    reasons: dict[str, str]
    problems: tuple[tuple[str, str], ...] = ()
    plan: Plan | None = None


def subject_of(state: State) -> Subject:
    """Presets and sizes only: a link must not make the server read files. Raises UsageError."""
    return _subject("" if state.params else state.model, state.params)


@lru_cache(maxsize=64)
def _subject(model: str, parameters: int) -> Subject:
    if model and model not in model_names():
        raise unknown("model preset", model, model_names(), "choose one of the list")
    return find_subject(model, parameters=parameters)


@lru_cache(maxsize=64)
def about(model: str) -> str:
    """Of a preset, in its own words."""
    return load_model(model).about


@lru_cache(maxsize=64)
def cluster_of(name: str) -> Cluster:
    """Raises UsageError."""
    cluster = load_cluster(name)
    if cluster.devices > MAX_DEVICES:
        raise UsageError(f"{name} has {cluster.devices:,} devices", rule=f"the page plans for at most {MAX_DEVICES:,}")
    return cluster


def filled(state: State) -> State:
    """With sequence, batch and tokens of the preset, or by the rules of `ingot plan`, where the link leaves them."""
    tokens = state.tokens or compute_optimal_tokens(count_active_parameters(subject_of(state).arch))
    if state.seq and state.batch:
        return replace(state, tokens=tokens)
    seq, batch = _by_rules(state.model, state.params, state.cluster, state.seq, state.batch, tokens)
    return replace(state, seq=seq, batch=min(batch, MAX_BATCH), tokens=tokens)


@lru_cache(maxsize=256)
def _by_rules(model: str, params: int, cluster: str, seq: int, batch: int, tokens: int) -> tuple[int, int]:
    """Sequence and batch of which either may be open."""
    subject = subject_of(State(model=model, params=params))
    wanted = Hints(seq_len=seq, global_batch=batch)
    train = base_run(Question(subject=subject, cluster=cluster_of(cluster), tokens=tokens, wanted=wanted))[0].train
    return train.seq_len, train.global_batch


def settled(state: State, moved: str = "") -> State:
    state = filled(state)
    return settle(state, subject_of(state).arch, cluster_of(state.cluster), moved)


@lru_cache(maxsize=256)
def answer(state: State) -> Answer:
    """The plan of a settled state, or why there is none."""
    run, reasons = run_of(state)
    found = Answer(state=state, cluster=cluster_of(state.cluster), run=run, reasons=reasons)
    if problems := tuple(problems_of(state, run)):
        return replace(found, problems=problems)
    planned = planned_of(_question(state), run, reasons)
    return replace(found, run=planned.run, reasons=planned.reasons, plan=planned.plan)


def run_of(state: State) -> tuple[RunConfig, dict[str, str]]:
    """The run of a settled state, and the reason of every value that a rule chose."""
    base, reasons = _base(replace(state, **_NO_LAYOUT))
    data = data_ranks(state, cluster_of(state.cluster)) or 1
    parallel = Parallel(
        tp=state.tp,
        pp=state.pp,
        cp=state.cp,
        ep=state.ep,
        dp_replicate=state.dp_replicate,
        dp_shard=max(data // state.dp_replicate, 1),
        zero=state.zero,  # type: ignore[arg-type]
        recompute=state.recompute,  # type: ignore[arg-type]
        schedule=state.schedule,  # type: ignore[arg-type]
        stages_per_rank=state.stages_per_rank,
        context=state.context,  # type: ignore[arg-type]
        **offloading(state.offload),  # type: ignore[arg-type]
    )
    return replace(base, train=replace(base.train, micro_batch=state.micro_batch), parallel=parallel), dict(reasons)


def offloading(word: str) -> dict[str, object]:
    """Settings of a layout by the page's word for them: "all" are parameters as well as optimizer state."""
    return {"offload": "none" if word == "none" else "cpu", "offload_parameters": word == "all"}


@lru_cache(maxsize=64)
def _base(state: State) -> tuple[RunConfig, dict[str, str]]:
    """Steps, learning rate and warm-up by the rules; the layout is the page's."""
    return base_run(_question(state))


def software_of(state: State) -> Software:
    return with_properties(INGOT, (), state.recipe)


def _question(state: State) -> Question:
    cluster = cluster_of(state.cluster)
    given = {"failures_per_node_day": state.failures, "usd_per_hour": state.price}
    return Question(
        subject=subject_of(state),
        cluster=cluster,
        tokens=state.tokens,
        wanted=Hints(
            steps=max(state.tokens // (state.batch * state.seq), 1), seq_len=state.seq, global_batch=state.batch
        ),
        software=software_of(state),
        mfu=state.mfu,
        usd_per_hour=state.price or cluster.usd_per_hour,
        assumptions=replace(Assumptions(), **{key: value for key, value in given.items() if value}),
    )


def problems_of(state: State, run: RunConfig) -> Iterator[tuple[str, str]]:
    """Of a settled state: the page's own, then those of the trainer's rules."""
    cluster = cluster_of(state.cluster)
    product = state.tp * state.pp * state.cp
    if cluster.devices % product:
        axes = f"tp {state.tp} x pp {state.pp} x cp {state.cp} = {product}"
        yield "parallel.tp", f"{axes} does not divide {cluster.devices:,} devices"
        return
    data = cluster.devices // product
    if data % state.dp_replicate:
        yield "parallel.dp_replicate", f"{state.dp_replicate} does not divide {data:,} data-parallel ranks"
        return
    if state.batch < data:
        rule = "each reads at least one sequence"
        yield "train.global_batch", f"{state.batch:,} sequences for {data:,} data-parallel ranks: {rule}"
        return
    if state.recipe and (lacking := _lacks(state.recipe, cluster)):
        yield "recipe", lacking
    yield from layout_problems(run)
    actions = run.parallel.stages * run.accumulation * 3
    if run.parallel.pp > 1 and actions > _MAX_ACTIONS:
        yield "train.micro_batch", f"{actions:,} actions of a pipeline in one step: the page simulates {_MAX_ACTIONS:,}"


def _lacks(recipe: str, cluster: Cluster) -> str:
    bits, dtype = (4, "fp4") if recipe == "nvfp4" else (8, "fp8")
    return "" if cluster.peak_flops.get(dtype) else f"{cluster.device_name} has no products in {bits} bits"


def timeline_of(state: State) -> Timeline:
    """Of a settled state with a pipeline and no problems. Raises ConfigError otherwise."""
    found = answer(state)
    if found.plan is None or state.pp == 1:
        why = found.problems[0][1] if found.problems else "the plan has no pipeline (pp = 1)"
        raise ConfigError(why, rule="a timeline is of a pipeline that can run")
    return simulated(found.run, found.cluster, positions(found.run))


def run_file(state: State) -> str:
    """What `ingot train` executes, as `ingot plan --out` writes it. Raises ConfigError when there is no such run, or
    the trainer cannot execute it."""
    found = answer(state)
    if found.plan is None:
        raise ConfigError("\n".join(f"{key}: {message}" for key, message in found.problems))
    require_executable(Planned(run=found.run, plan=found.plan, reasons=found.reasons))
    return to_toml(found.run, found.reasons)
