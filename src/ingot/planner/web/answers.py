"""The page's access to the planner: settings of the page are converted to a run, a cluster and a plan.

The most recent plans are cached, so that a comparison needs no new predictions. Settings are called "settled" if no
value is missing and their degrees divide the devices. After the user has changed one setting, the others are adapted;
the changed setting keeps its value. If the adapted layout is still not legal, the page shows the problem.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ingot.config import to_toml
from ingot.errors import ConfigError, UsageError
from ingot.planner.predict.time.step_time import simulated
from ingot.planner.request.answer import planned_of
from ingot.planner.request.assumptions import with_properties
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.plan_request import PlanRequest, base_run
from ingot.planner.request.presets import ModelChoice, choose_model, load_model, model_names, unknown
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.plan import PlannedRun, require_executable
from ingot.planner.run.propose import Hints
from ingot.planner.run.scaling import compute_optimal_tokens
from ingot.planner.web.settings import LAYOUT, MAX_BATCH, MAX_DEVICES, PageSettings
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import SPLIT_BACKWARD, TWO_STAGES, V_SHAPED, Parallel
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.theory.layout import layout_problems, positions
from ingot.theory.params import count_active_parameters
from ingot.theory.rules.expert import legal_ep
from ingot.theory.schedule import Timeline, schedule_problems

_NO_LAYOUT = {key: getattr(PageSettings(), key) for key in LAYOUT}
# A schedule is simulated action by action; more actions than this would keep the server busy for seconds.
_MAX_ACTIONS = 400_000


@dataclass(frozen=True, kw_only=True)
class PagePlan:
    """The plan for `settings`, the result of `settled`. reasons: why a rule chose a value, by key. problems: (key,
    sentence) pairs; if there are any, `plan` is None.
    """

    settings: PageSettings
    cluster: Cluster
    run: RunConfig
    reasons: dict[str, str]
    problems: tuple[tuple[str, str], ...] = ()
    plan: Plan | None = None


def model_of(settings: PageSettings) -> ModelChoice:
    """Return the model of the settings: a preset or a size. Files are not allowed, because a link must not make the
    server read files. Raises UsageError."""
    return _subject("" if settings.params else settings.model, settings.params)


@lru_cache(maxsize=64)
def _subject(model: str, parameters: int) -> ModelChoice:
    if model and model not in model_names():
        raise unknown("E-MODEL-UNKNOWN", "model preset", model, model_names(), "choose a model from the list")
    return choose_model(model, parameters=parameters)


@lru_cache(maxsize=64)
def about(model: str) -> str:
    """Return the description of a preset."""
    return load_model(model).about


@lru_cache(maxsize=64)
def cluster_of(name: str) -> Cluster:
    """Return a cluster by name. Raises UsageError for unknown names, and for more devices than the page plans for."""
    cluster = load_cluster(name)
    if cluster.devices > MAX_DEVICES:
        raise UsageError(
            "E-PAGE-CLUSTER",
            f"{name} has {cluster.devices:,} devices",
            rule=f"the page plans for at most {MAX_DEVICES:,} devices",
            fix="choose fewer nodes, or use `ingot plan`",
            devices=cluster.devices,
        )
    return cluster


def filled(settings: PageSettings) -> PageSettings:
    """Return the settings with sequence length, batch and tokens filled in where they are 0: from the preset, or by the
    rules of `ingot plan`."""
    tokens = settings.tokens or compute_optimal_tokens(count_active_parameters(model_of(settings).arch))
    if settings.seq and settings.batch:
        return replace(settings, tokens=tokens)
    seq, batch = _by_rules(settings.model, settings.params, settings.cluster, settings.seq, settings.batch, tokens)
    return replace(settings, seq=seq, batch=min(batch, MAX_BATCH), tokens=tokens)


@lru_cache(maxsize=256)
def _by_rules(model: str, params: int, cluster: str, seq: int, batch: int, tokens: int) -> tuple[int, int]:
    """Return (sequence length, global batch). The rules choose them if `seq` or `batch` is 0."""
    chosen = model_of(PageSettings(model=model, params=params))
    wanted = Hints(seq_len=seq, global_batch=batch)
    train = base_run(PlanRequest(model=chosen, cluster=cluster_of(cluster), tokens=tokens, wanted=wanted))[0].train
    return train.seq_len, train.global_batch


def settled(settings: PageSettings, moved: str = "") -> PageSettings:
    """Return the settings completed and with degrees that fit together. moved: the setting that the user changed last,
    which keeps its value."""
    settings = filled(settings)
    return settle(settings, model_of(settings).arch, cluster_of(settings.cluster), moved)


@lru_cache(maxsize=256)
def answer(settings: PageSettings) -> PagePlan:
    """Return the plan for `settings`, or the problems because of which there is none. settings: the result of
    `settled`.
    """
    run, reasons = run_of(settings)
    found = PagePlan(settings=settings, cluster=cluster_of(settings.cluster), run=run, reasons=reasons)
    if problems := tuple(problems_of(settings, run)):
        return replace(found, problems=problems)
    planned = planned_of(_question(settings), run, reasons)
    return replace(found, run=planned.run, reasons=planned.reasons, plan=planned.plan)


def run_of(settings: PageSettings) -> tuple[RunConfig, dict[str, str]]:
    """Return the run for `settings`, the result of `settled`, and the reason for each value that a rule chose."""
    base, reasons = _base(replace(settings, **_NO_LAYOUT))
    data = data_ranks(settings, cluster_of(settings.cluster)) or 1
    parallel = Parallel(
        tp=settings.tp,
        pp=settings.pp,
        cp=settings.cp,
        ep=settings.ep,
        dp_replicate=settings.dp_replicate,
        dp_shard=max(data // settings.dp_replicate, 1),
        zero=settings.zero,  # type: ignore[arg-type]
        recompute=settings.recompute,  # type: ignore[arg-type]
        schedule=settings.schedule,  # type: ignore[arg-type]
        stages_per_rank=settings.stages_per_rank,
        context=settings.context,  # type: ignore[arg-type]
        **offloading(settings.offload),  # type: ignore[arg-type]
    )
    return replace(base, train=replace(base.train, micro_batch=settings.micro_batch), parallel=parallel), dict(reasons)


def offloading(choice: str) -> dict[str, object]:
    """Return the offload fields of Parallel for a choice on the page: "none", "cpu" (optimizer state) or "all"
    (parameters too)."""
    return {"offload": "none" if choice == "none" else "cpu", "offload_parameters": choice == "all"}


@lru_cache(maxsize=64)
def _base(settings: PageSettings) -> tuple[RunConfig, dict[str, str]]:
    """Return the run before the page's layout is set, with steps, learning rate and warm-up chosen by the rules; and
    the reasons."""
    return base_run(_question(settings))


def software_of(settings: PageSettings) -> Software:
    return with_properties(INGOT, (), settings.recipe)


def _question(settings: PageSettings) -> PlanRequest:
    cluster = cluster_of(settings.cluster)
    given = {"failures_per_node_day": settings.failures, "usd_per_hour": settings.price}
    return PlanRequest(
        model=model_of(settings),
        cluster=cluster,
        tokens=settings.tokens,
        wanted=Hints(
            steps=max(settings.tokens // (settings.batch * settings.seq), 1),
            seq_len=settings.seq,
            global_batch=settings.batch,
        ),
        software=software_of(settings),
        mfu=settings.mfu,
        usd_per_hour=settings.price or cluster.usd_per_hour,
        assumptions=replace(Assumptions(), **{key: value for key, value in given.items() if value}),
    )


def problems_of(settings: PageSettings, run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each problem: degrees that do not divide the devices, otherwise broken layout rules and
    more pipeline actions than the page simulates.

    settings: the result of `settled`. run: the run for these settings (`run_of`).
    """
    cluster = cluster_of(settings.cluster)
    product = settings.tp * settings.pp * settings.cp
    if cluster.devices % product:
        axes = f"tp {settings.tp} x pp {settings.pp} x cp {settings.cp} = {product}"
        yield "parallel.tp", f"{axes} does not divide {cluster.devices:,} devices"
        return
    data = cluster.devices // product
    if data % settings.dp_replicate:
        yield "parallel.dp_replicate", f"{settings.dp_replicate} does not divide {data:,} data-parallel ranks"
        return
    if settings.batch < data:
        rule = "each rank reads at least one sequence"
        yield "train.global_batch", f"{settings.batch:,} sequences for {data:,} data-parallel ranks: {rule}"
        return
    if settings.recipe and (lacking := _lacks(settings.recipe, cluster)):
        yield "recipe", lacking
    yield from layout_problems(run)
    actions = run.parallel.stages * run.accumulation * 3
    if run.parallel.pp > 1 and actions > _MAX_ACTIONS:
        message = f"{actions:,} pipeline actions in one step: the page simulates at most {_MAX_ACTIONS:,}"
        yield "train.micro_batch", message


def _lacks(recipe: str, cluster: Cluster) -> str:
    bits, dtype = (4, "fp4") if recipe == "nvfp4" else (8, "fp8")
    return "" if cluster.peak_flops.get(dtype) else f"{cluster.device_name} has no {bits}-bit matrix products"


def timeline_of(settings: PageSettings) -> Timeline:
    """Return the simulated pipeline for `settings`, the result of `settled`. Raises ConfigError if they have problems
    or pp is 1.
    """
    found = answer(settings)
    if found.plan is None:
        raise _problems_error(found)
    if settings.pp == 1:
        raise ConfigError(
            "E-PIPELINE-NONE",
            "the plan has no pipeline (pp = 1)",
            rule="a timeline shows at least two pipeline ranks",
            fix="set pp to 2 or more",
            pp=settings.pp,
        )
    return simulated(found.run, found.cluster, positions(found.run))


def run_file(settings: PageSettings) -> str:
    """Return the text of the run file, as `ingot plan --out` writes it. Raises ConfigError if the settings have
    problems, or the trainer cannot execute the run."""
    found = answer(settings)
    if found.plan is None:
        raise _problems_error(found)
    require_executable(PlannedRun(run=found.run, plan=found.plan, reasons=found.reasons))
    return to_toml(found.run, found.reasons)


def _problems_error(found: PagePlan) -> ConfigError:
    return ConfigError(
        "E-PAGE-LAYOUT",
        "\n".join(f"{key}: {message}" for key, message in found.problems),
        rule="a layout divides devices, model and batch into equal parts",
        fix="change the settings that the page marks",
        problems=[key for key, _ in found.problems],
    )


# -- adaptation of a layout --


def settle(settings: PageSettings, arch: Arch, cluster: Cluster, moved: str = "") -> PageSettings:
    """Return the settings with degrees that fit together. moved: the setting that keeps its value. `settings` must have
    a sequence length and a batch."""
    settings = _axes(settings, cluster, moved)
    settings = _pipeline(settings, arch, moved)
    settings = _data(settings, arch, cluster, moved)
    return _schedule(settings, cluster, moved)


def data_ranks(settings: PageSettings, cluster: Cluster) -> int:
    """Return the number of data-parallel ranks; 0 if tp x pp x cp does not divide the devices."""
    model_ranks = settings.tp * settings.pp * settings.cp
    return 0 if cluster.devices % model_ranks else cluster.devices // model_ranks


def accumulation(settings: PageSettings, cluster: Cluster) -> int:
    """Return the number of micro-batches per step on each data-parallel rank; 0 if the batch is not a multiple of
    micro-batch x data-parallel ranks."""
    sequences = settings.micro_batch * data_ranks(settings, cluster)
    return settings.batch // sequences if sequences and settings.batch % sequences == 0 else 0


def _at_most(value: int, legal: Iterable[int]) -> int:
    return max((n for n in legal if n <= value), default=1)


def _divisor(value: int, number: int) -> int:
    """Return the largest divisor of `number` that is at most `value`."""
    return next(n for n in range(min(value, number), 0, -1) if number % n == 0)


def _axes(settings: PageSettings, cluster: Cluster, moved: str) -> PageSettings:
    """Return the settings with cp, pp and tp reduced, in this order, until their product divides the devices. The moved
    setting keeps its value."""
    for axis in ("cp", "pp", "tp"):
        if axis == moved:
            continue
        degree = getattr(settings, axis)
        others = settings.tp * settings.pp * settings.cp // degree
        if cluster.devices % (others * degree):
            fits = cluster.devices % others == 0
            settings = replace(settings, **{axis: _divisor(degree, cluster.devices // others) if fits else 1})
    return replace(settings, context="auto") if settings.cp == 1 else settings


def _pipeline(settings: PageSettings, arch: Arch, moved: str) -> PageSettings:
    if settings.pp == 1:
        return replace(settings, schedule="1f1b", stages_per_rank=0)
    if settings.schedule not in TWO_STAGES or settings.schedule in V_SHAPED:
        settings = replace(settings, stages_per_rank=0)
    else:
        most = max(arch.num_layers // settings.pp, 2)
        settings = replace(settings, stages_per_rank=min(max(settings.stages_per_rank, 2), most))
    if settings.schedule in SPLIT_BACKWARD and settings.zero == 3:
        return replace(settings, schedule="1f1b", stages_per_rank=0) if moved == "zero" else replace(settings, zero=1)
    return settings


def _data(settings: PageSettings, arch: Arch, cluster: Cluster, moved: str) -> PageSettings:
    """Return the settings with dp_replicate, ep and micro-batch reduced until they divide the data-parallel ranks, the
    experts and the batch. The moved setting keeps its value."""
    data = data_ranks(settings, cluster)
    if not data:
        return settings
    if moved != "dp_replicate":
        settings = replace(settings, dp_replicate=_divisor(settings.dp_replicate, data))
    if not arch.is_moe:
        settings = replace(settings, ep=1)
    elif moved != "ep" and data % settings.dp_replicate == 0:
        inside = Parallel(dp_shard=data // settings.dp_replicate, cp=settings.cp, tp=settings.tp)
        settings = replace(settings, ep=_at_most(settings.ep, legal_ep(arch.moe.num_experts, inside)))
    if moved != "micro_batch" and settings.batch % data == 0:
        settings = replace(settings, micro_batch=_divisor(settings.micro_batch, settings.batch // data))
    return settings


def _schedule(settings: PageSettings, cluster: Cluster, moved: str) -> PageSettings:
    """Return the settings with 1F1B, which allows any number of micro-batches, if the schedule does not allow this
    number."""
    count = accumulation(settings, cluster)
    if settings.pp == 1 or not count or moved in ("schedule", "stages_per_rank"):
        return settings
    if any(schedule_problems(settings.schedule, settings.pp, count, settings.stages_per_rank)):
        return replace(settings, schedule="1f1b", stages_per_rank=0)
    return settings
