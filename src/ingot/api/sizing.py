"""Answers to single questions about a run's size: memory per GPU, compute-optimal size, a recommended run file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import ConfigError, UsageError
from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.request.amounts import parse_budget, parse_parameters, parse_tokens
from ingot.planner.request.clusters import find_cluster
from ingot.planner.request.planning import NO_PINS, plan
from ingot.planner.request.presets import choose_model
from ingot.planner.run.scaling import TOKENS_PER_PARAMETER, compute_optimal, compute_optimal_tokens
from ingot.planner.search.space import with_context
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.flops import train_flops_6nd
from ingot.theory.layout import require_layout
from ingot.theory.params import count_active_parameters
from ingot.theory.rules import load_run


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory of the rank that needs the most, at its peak. run: the settings, with their layout. bytes_by_kind:
    weights, optimizer, gradients, activations, ... in bytes. formulas: the formula of each kind, as text.
    available_bytes: memory of the device."""

    run: RunConfig
    bytes_by_kind: dict[str, float]
    formulas: dict[str, str]
    available_bytes: float

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes_by_kind.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


def memory_per_gpu(
    model: str = "",
    *,
    params: str | float | None = None,
    run: str | Path | RunConfig | None = None,
    overrides: tuple[str, ...] = (),
    cluster: str | Cluster | None = None,
    tokens: str | float | None = None,
    seq: int = 0,
    batch: str | int = 0,
    precision: str = "bf16",
    pinned: Mapping[str, object] = NO_PINS,
) -> GpuMemory:
    """Return the predicted memory of the GPU that needs the most, by kind, in bytes.

    With `run` (a run file, or its settings), for the layout of that run; `overrides` change the file. Otherwise for a
    model in the fastest layout that the planner finds, with the settings in `pinned`, like {"tp": 8}: `model` names a
    preset or file, `params` a size like "70b". cluster: "8xh100" (default: this machine). tokens: to train on (default:
    20 per parameter). seq, batch: tokens per sequence, and sequences per step. Raises UsageError or ConfigError.

        memory = ingot.memory_per_gpu("llama3-8b", cluster="8xh100", pinned={"tp": 8})
        memory.total_bytes / 2**30, memory.fits, memory.bytes_by_kind["activations"]
    """
    if run is not None:
        if model or params is not None:
            raise UsageError(
                "E-MEMORY-SUBJECT",
                "a run and a model are both given",
                rule="a run has its own model and layout",
                fix="give only the run, or only the model",
            )
        where = Path() if isinstance(run, RunConfig) else Path(run).parent
        config = run if isinstance(run, RunConfig) else load_run(Path(run), overrides)
        found = cluster if isinstance(cluster, Cluster) else find_cluster(cluster, where)
        require_layout(config)
        config, _ = with_context(config, found)
    else:
        if tokens is None:
            choice = choose_model(model, parameters=parse_parameters(params) if params is not None else 0)
            tokens = compute_optimal_tokens(count_active_parameters(choice.arch))
        given = {"seq": seq, "batch": batch, "precision": precision, "pinned": pinned, "top": 1}
        best = plan(model, params=params, cluster=cluster, tokens=tokens, **given).best
        config, found = best.run, best.plan.cluster
    bill = memory_bill(config, found)
    return GpuMemory(
        run=config,
        bytes_by_kind={kind: float(term.value) for kind, term in bill.items()},
        formulas={kind: term.formula for kind, term in bill.items()},
        available_bytes=rank_memory_bytes(found, config.parallel.world_size),
    )


@dataclass(frozen=True)
class ComputeOptimal:
    """A compute-optimal training. flops: 6 x parameters x tokens."""

    parameters: float
    tokens: float
    flops: float


def chinchilla_optimal(
    *, flops: str | float | None = None, params: str | float | None = None, tokens: str | float | None = None
) -> ComputeOptimal:
    """Return the compute-optimal training, 20 tokens per parameter (Hoffmann et al. 2022), for exactly one of: a budget
    of FLOPs (6e23, "6e23flop"), a size ("70b"), a number of tokens ("1.4T"). Raises UsageError.

        ingot.chinchilla_optimal(params="70b").tokens  # 1.4e12
    """
    if sum(value is not None for value in (flops, params, tokens)) != 1:
        raise UsageError(
            "E-OPTIMUM-SUBJECT",
            "chinchilla_optimal needs one of flops, params and tokens",
            rule="two of the three follow from the third",
            fix='give one of them: chinchilla_optimal(params="70b")',
        )
    if flops is not None:
        budget = parse_budget(flops if isinstance(flops, str) else f"{flops:g}flop").flops
        if not budget:
            raise UsageError(
                "E-OPTIMUM-SUBJECT",
                f"flops = {flops!r} is not a number of FLOPs",
                rule="dollars and hours need a model and a cluster: ingot.plan(budget=...)",
                fix='chinchilla_optimal(flops="6e23flop")',
            )
        parameters, count = compute_optimal(budget)
        return ComputeOptimal(parameters, count, budget)
    count = float(parse_tokens(tokens)) if tokens is not None else 0.0
    parameters = count / TOKENS_PER_PARAMETER if params is None else float(parse_parameters(params))
    count = count or TOKENS_PER_PARAMETER * parameters
    return ComputeOptimal(parameters, count, train_flops_6nd(parameters, count))


def recommend_config(
    model: str = "",
    *,
    params: str | float | None = None,
    init: str | Path | None = None,
    cluster: str | Cluster | None = None,
    tokens: str | Path | float | None = None,
    budget: str | None = None,
    seq: int = 0,
    batch: str | int = 0,
    name: str = "",
    precision: str = "bf16",
    pinned: Mapping[str, object] = NO_PINS,
    relative_to: str | Path = "",
) -> RunConfig:
    """Return the settings of the best plan: model, batch, steps, learning rate, layout, checkpoints.

    The arguments are those of `plan`, which also gives the reasons, other layouts, time and cost. The function
    `ingot.config.to_toml` returns the settings as the text of a run file. Raises ConfigError if no layout fits in
    memory, and the errors of `plan`.

        config = ingot.recommend_config("tiny", tokens="data", cluster="8xh100")
        config.train.global_batch, config.parallel, config.optim.lr
    """
    found = plan(
        model,
        params=params,
        init=init,
        cluster=cluster,
        tokens=tokens,
        budget=budget,
        seq=seq,
        batch=batch,
        name=name,
        precision=precision,
        pinned=pinned,
        top=1,
        relative_to=Path(relative_to),
    )
    if not found.fits:
        raise ConfigError(
            "E-RECOMMEND-FIT",
            f"no layout of {found.best.run.name} fits in the memory of {found.best.plan.cluster.name}",
            rule="a recommended run fits in memory",
            fix=found.fix or "use more or larger devices, a shorter sequence, or a smaller model",
            cluster=found.best.plan.cluster.name,
        )
    return found.best.run
