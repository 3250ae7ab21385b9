"""What the page asks the planner: the one place where its settings become a run, a cluster and a plan.

Answers are kept for the settings that were asked for last, so that a comparison costs nothing.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from ingot.config import to_toml
from ingot.errors import ConfigError, UsageError
from ingot.planner.context import with_context
from ingot.planner.plan import make_plan
from ingot.planner.propose import Hints, propose
from ingot.planner.step_time import simulated
from ingot.recipes.clusters import load_cluster
from ingot.recipes.load import ModelPreset, load_model, model_names, unknown
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Plan
from ingot.schema.run import Data, RunConfig
from ingot.schema.software import INGOT, Software
from ingot.theory.layout import layout_problems, positions
from ingot.theory.params import count_active_parameters
from ingot.theory.scaling import compute_optimal_tokens, suggested_batch_tokens
from ingot.theory.schedule import Timeline
from ingot.web.settle import data_ranks, settle
from ingot.web.state import MAX_BATCH, MAX_DEVICES, State

_TOKENS = "data/tokens/train"
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


def model_of(state: State) -> ModelPreset:
    """Presets only: a link must not make the server read files. Raises UsageError."""
    return _preset(state.model)


@lru_cache(maxsize=64)
def _preset(name: str) -> ModelPreset:
    if name not in model_names():
        raise unknown("model preset", name, model_names(), "choose one of the list")
    return load_model(name)


@lru_cache(maxsize=64)
def cluster_of(name: str) -> Cluster:
    """Raises UsageError."""
    cluster = load_cluster(name)
    if cluster.devices > MAX_DEVICES:
        raise UsageError(f"{name} has {cluster.devices:,} devices", rule=f"the page plans for at most {MAX_DEVICES:,}")
    return cluster


def filled(state: State) -> State:
    """With sequence, batch and tokens of the preset, or of the rules, where the link leaves them open."""
    preset, hints = model_of(state), model_of(state).train
    seq = state.seq or hints.seq_len or min(preset.arch.max_seq_len, 4096)
    tokens = state.tokens or compute_optimal_tokens(count_active_parameters(preset.arch))
    batch = state.batch or hints.global_batch
    if not batch:
        wanted = suggested_batch_tokens(preset.arch, seq, tokens) / seq
        batch = min(max(1 << max(round(wanted) - 1, 0).bit_length(), cluster_of(state.cluster).devices), MAX_BATCH)
    return replace(state, seq=seq, batch=batch, tokens=tokens)


def settled(state: State, moved: str = "") -> State:
    state = filled(state)
    return settle(state, model_of(state).arch, cluster_of(state.cluster), moved)


@lru_cache(maxsize=256)
def answer(state: State) -> Answer:
    """The plan of a settled state, or why there is none."""
    cluster = cluster_of(state.cluster)
    run, reasons = run_of(state)
    problems = tuple(problems_of(state, run))
    if problems:
        return Answer(state=state, cluster=cluster, run=run, reasons=reasons, problems=problems)
    run, chosen = with_context(run, cluster)
    reasons |= chosen
    plan = make_plan(run, cluster, software=software_of(state), mfu=state.mfu)
    return Answer(state=state, cluster=cluster, run=run, reasons=reasons, plan=plan)


def run_of(state: State) -> tuple[RunConfig, dict[str, str]]:
    """The run of a settled state, and the reason of every value that a rule chose."""
    cluster, base = cluster_of(state.cluster), _base(state.model, state.seq, state.batch, state.tokens)
    data = data_ranks(state, cluster) or 1
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
        offload=state.offload,  # type: ignore[arg-type]
    )
    run = replace(
        base.run,
        train=replace(base.run.train, micro_batch=state.micro_batch),
        parallel=parallel,
        cost=replace(base.run.cost, usd_per_hour=state.price or cluster.usd_per_hour),
    )
    chosen = {key: why for key, why in base.reasons.items() if not key.startswith(("parallel.", "train.micro"))}
    return run, chosen


@lru_cache(maxsize=64)
def _base(model: str, seq: int, batch: int, tokens: int):
    """Steps, learning rate and warm-up by the rules, on one device: the layout is the page's."""
    preset = _preset(model)
    wanted = Hints(steps=max(-(-tokens // (batch * seq)), 1), seq_len=seq, global_batch=batch)
    one = replace(load_cluster("h100"), memory_bytes=2**60)
    data = Data(tokens=_TOKENS)
    return propose(preset.arch, one, data, name=model, tokens=tokens, preset=preset.train, wanted=wanted)


def problems_of(state: State, run: RunConfig):
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
    yield from layout_problems(run)
    actions = run.parallel.stages * run.accumulation * 3
    if run.parallel.pp > 1 and actions > _MAX_ACTIONS:
        yield "train.micro_batch", f"{actions:,} actions of a pipeline in one step: the page simulates {_MAX_ACTIONS:,}"


def software_of(state: State) -> Software:
    return replace(INGOT, recipe=state.recipe)


def timeline_of(state: State) -> Timeline:
    """Of a settled state with a pipeline and no problems. Raises ConfigError otherwise."""
    found = answer(state)
    if found.plan is None or state.pp == 1:
        why = found.problems[0][1] if found.problems else "the plan has no pipeline (pp = 1)"
        raise ConfigError(why, rule="a timeline is of a pipeline that can run")
    return simulated(found.run, found.cluster, positions(found.run))


def run_file(state: State) -> str:
    """What `ingot train` executes, as `ingot plan --out` writes it. Raises ConfigError when there is no such run."""
    found = answer(state)
    if found.plan is None:
        raise ConfigError("\n".join(f"{key}: {message}" for key, message in found.problems))
    return to_toml(found.run, found.reasons)
