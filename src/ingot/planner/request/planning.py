"""`ingot.plan(...)`, which returns the best layouts of a run as objects, and `make_project`, for `ingot init`.

from ingot import plan
result = plan(params="70b", tokens="1.5T", cluster="128x8xh100", price=4)
result.best.plan.step_seconds, result.plans[1].run.parallel
result.write("run.toml")
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ingot.config import to_toml
from ingot.errors import UsageError
from ingot.planner.request.amounts import (
    Budget,
    parse_batch,
    parse_budget,
    parse_failures,
    parse_parameters,
    parse_price,
    parse_share,
)
from ingot.planner.request.answer import PlanResult, answer
from ingot.planner.request.assumptions import assume, with_properties
from ingot.planner.request.budget import first_size, spend
from ingot.planner.request.clusters import find_cluster
from ingot.planner.request.plan_request import NOWHERE, PlanRequest, read_data, with_init
from ingot.planner.request.presets import ModelChoice, choose_model
from ingot.planner.request.restarts import measured_restart
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.plan import PlannedRun, make_plan
from ingot.planner.run.propose import Hints, propose
from ingot.planner.run.scaling import compute_optimal_tokens
from ingot.planner.search.space import with_context
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data
from ingot.schema.software import INGOT, Software
from ingot.schema.tokens import read_token_manifest
from ingot.storage import write_atomic
from ingot.theory.layout import require_layout
from ingot.theory.params import count_active_parameters
from ingot.theory.rules import load_run

NO_PINS: Mapping[str, object] = MappingProxyType({})
_GITIGNORE = "/data/\n/runs/\n/machine.json\n"


@dataclass(frozen=True, kw_only=True)
class _Conditions:
    """The cluster of a plan, the software, and the quantities that the user gives in place of predictions."""

    cluster: Cluster
    assumptions: Assumptions
    software: Software
    mfu: float
    usd_per_hour: float


def plan(
    model: str = "",
    *,
    params: str | float | None = None,
    init: str | Path | None = None,
    run: str | Path | None = None,
    overrides: Iterable[str] = (),
    cluster: str | Cluster | None = None,
    tokens: str | Path | float | None = None,
    budget: str | None = None,
    steps: int = 0,
    seq: int = 0,
    batch: str | int = 0,
    lr: float = 0.0,
    name: str = "",
    precision: str = "bf16",
    recipe: str = "",
    software: Software | Iterable[str] = INGOT,
    mfu: float | str = 0.0,
    price: float | str = 0.0,
    failures: float | str = 0.0,
    assumptions: Iterable[str] = (),
    restart_from: str | Path | None = None,
    pinned: Mapping[str, object] = NO_PINS,
    top: int = 5,
    relative_to: Path = Path(),
) -> PlanResult:
    """Return ranked plans for a model on a cluster. The arguments are the options that `ingot plan --help` describes.

    run: a run file, which is planned with its own layout. overrides: changes to the run file, like "train.steps=100".
    recipe: recipe of low-precision matrix products (--fp8). restart_from: a run folder whose restarts are the planned
    ones. relative_to: folder of the new run file, to which its
    paths are relative. Raises UsageError, ConfigError or DataError.

        plans = ingot.plan("llama3-8b", tokens="1.5T", cluster="8xh100")
        plans.best.plan.step_seconds, plans.best.run.parallel
    """
    conditions = _conditions(
        cluster, Path(run).parent if run else Path(), assumptions, software, recipe, mfu, price, failures, restart_from
    )
    if run:
        if any((model, params, init, pinned, steps, seq, batch, lr, name)) or not tokens is budget is None:
            raise UsageError(
                "E-PLAN-FILE",
                "a run file and other values are both given",
                rule="a run file has its own model, tokens, batch and layout",
                fix='change the run file with overrides=["train.steps=100"], or on the command line with --set',
                path=str(run),
            )
        return PlanResult(plans=(_plan_file(Path(run), tuple(overrides), conditions),))
    spent = parse_budget(budget) if budget is not None else None
    _require_amount(tokens, spent)
    _require_positive(steps=steps, seq=seq, lr=lr)
    choice, sized = _model_choice(model, params, init, spent, conditions)
    data, manifest, count = read_data(str(tokens), relative_to) if tokens is not None else (NOWHERE, None, 0)
    length = seq or choice.hints.seq_len or min(choice.arch.max_seq_len, 2048)
    sequences, why = parse_batch(batch, length) if batch else (0, "")
    wanted = Hints(steps=steps, seq_len=seq, global_batch=sequences, lr=lr)
    request = PlanRequest(
        model=choice, tokens=count, data=data, manifest=manifest, wanted=wanted, batch_why=why, name=name,
        precision=precision, pinned=pinned, top=top, relative_to=relative_to, **vars(conditions),
    )  # fmt: skip
    return spend(request, spent, sized=sized) if spent else answer(request)


def _plan_file(path: Path, overrides: tuple[str, ...], conditions: _Conditions) -> PlannedRun:
    """Return the plan of a run file. The plan uses the file's checkpoint interval unless `conditions` assume one, and
    counts the passes over the data if the token folder exists."""
    run = load_run(path, overrides)
    if conditions.usd_per_hour:
        run = replace(run, cost=replace(run.cost, usd_per_hour=conditions.usd_per_hour))
    require_layout(run)
    run, reasons = with_context(run, conditions.cluster)
    folder = path.parent / run.data.tokens
    assumptions = conditions.assumptions.with_interval_of(run)
    found = make_plan(
        run,
        conditions.cluster,
        software=conditions.software,
        assumptions=assumptions,
        mfu=conditions.mfu,
        manifest=read_token_manifest(folder) if folder.is_dir() else None,
    )
    return PlannedRun(run=run, plan=found, reasons=reasons)


def _require_amount(tokens: str | Path | float | None, spent: Budget | None) -> None:
    if tokens is None and spent is None:
        raise UsageError(
            "E-PLAN-AMOUNT",
            "neither tokens nor a budget is given",
            rule="a new run is planned for a number of tokens or for a budget",
            fix="give --tokens data, --tokens 1.5T, or --budget 6e23flop",
        )
    if tokens is not None and spent is not None and not Path(str(tokens)).is_dir():
        raise UsageError(
            "E-BUDGET-TOKENS",
            f"--tokens {tokens} and --budget are both given",
            rule="the number of tokens follows from the budget",
            fix="remove one of them, or give --tokens a folder of data",
            tokens=str(tokens),
        )


def _require_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise UsageError(
                "E-OPTION-RANGE",
                f"--{name} {value}",
                rule=f"--{name} is a number above 0",
                fix=f"give such a number, or omit --{name}, and the rules choose it",
                option=f"--{name}",
                value=value,
            )


def _conditions(
    cluster, folder: Path, settings, software, recipe: str, mfu, price, failures, restart_from
) -> _Conditions:
    """Return the parsed conditions. folder: where to look for machine.json if no cluster is named."""
    found = cluster if isinstance(cluster, Cluster) else find_cluster(cluster, folder)
    assumptions = Assumptions()
    if failures:
        assumptions = replace(assumptions, failures_per_node_day=parse_failures("--failures", failures))
    usd_per_hour = parse_price(price) if price else 0.0
    if usd_per_hour:
        assumptions = replace(assumptions, usd_per_hour=usd_per_hour)
    settings = list(settings)
    found, assumptions = assume(found, assumptions, settings)
    if restart_from is not None:
        if any(setting.replace("-", "_").startswith("restart_seconds") for setting in settings):
            raise UsageError(
                "E-RESTART-TWICE",
                f"restart_seconds is assumed and --restart-from {restart_from} is given",
                rule="the time of a restart is either assumed or measured",
                fix="remove one of them",
                run=str(restart_from),
            )
        measured = measured_restart(Path(restart_from))
        assumptions = replace(assumptions, restart_seconds=measured.value, restart_source=measured.formula)
    stack = software if isinstance(software, Software) else with_properties(INGOT, software)
    return _Conditions(
        cluster=found,
        assumptions=assumptions,
        software=with_properties(stack, (), recipe),
        mfu=parse_share("--mfu", mfu) if mfu else 0.0,
        usd_per_hour=usd_per_hour,
    )


def _model_choice(model: str, params, init, spent: Budget | None, given: _Conditions) -> tuple[ModelChoice, bool]:
    """Return the model, and True if the budget decides its size."""
    if spent and not (model or params or init):
        return first_size(spent, given.cluster, given.usd_per_hour), True
    parameters = parse_parameters(params) if params is not None else 0
    return choose_model(model, parameters=parameters, init=Path(init) if init else None), False


def make_project(folder: Path, model: str = "", init: Path | None = None) -> list[Path]:
    """Make `folder` with a .gitignore and a run.toml for the data of `ingot data build --out data`; return both paths.

    model: a preset or a model file; or init: a Hugging Face model folder, with whose weights the run starts. Raises
    UsageError if `folder` has a run.toml already or is a file, ConfigError for a model that ingot does not compute.
    """
    if (folder / "run.toml").exists():
        raise UsageError(
            "E-FILE-EXISTS",
            f"{folder / 'run.toml'} exists already",
            rule="init starts a new project and overwrites no file",
            fix="choose another folder",
            path=str(folder / "run.toml"),
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            "E-FOLDER-FILE",
            f"{folder} is a file",
            rule="init makes a folder for the project",
            fix="choose another name",
            path=str(folder),
        )
    choice = choose_model(model, init=init)
    data = Data(tokens="data/tokens/train", heldout="data/tokens/heldout", tokenizer="data/tokens/tokenizer.json")
    # The data does not exist yet, so the run is planned for the compute-optimal number of tokens.
    count = compute_optimal_tokens(count_active_parameters(choice.arch))
    proposal = propose(
        choice.arch, find_cluster(None, folder), data, name=folder.resolve().name, tokens=count, preset=choice.hints
    )
    run, reasons = with_init(proposal.run, proposal.reasons, choice, folder)
    files = {folder / "run.toml": to_toml(run, reasons), folder / ".gitignore": _GITIGNORE}
    for path, text in files.items():
        if not path.exists():
            write_atomic(path, text)
    return list(files)
