"""`ingot.plan(...)`: the best layouts of a run on a cluster, as objects; `ingot plan` prints them.

from ingot import plan
planning = plan(params="70b", tokens="1.5T", cluster="128x8xh100", price=4)
planning.best.plan.step_seconds, planning.plans[1].run.parallel
planning.write("run.toml")
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

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
from ingot.planner.request.answer import Planning, answer
from ingot.planner.request.assumptions import assume, with_properties
from ingot.planner.request.budget import first_size, spend
from ingot.planner.request.clusters import find_cluster
from ingot.planner.request.project import plan_file
from ingot.planner.request.question import NOWHERE, Question, read_data
from ingot.planner.request.subject import Subject, find_subject
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.plan import Planned
from ingot.planner.run.propose import Hints
from ingot.schema.cluster import Cluster
from ingot.schema.software import INGOT, Software

NO_PINS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Where a plan is for, and what it takes as given."""

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
    pinned: Mapping[str, object] = NO_PINS,
    top: int = 5,
    beside: Path = Path(),
) -> Planning:
    """Ranked plans of a model on a cluster. Arguments are the options of `ingot plan`, which say what each means.

    run: a run file; it has a layout, and is planned as it is. overrides: changes to it, "train.steps=100".
    beside: the folder that a run file will be written to; its paths are relative to it.
    Raises UsageError, ConfigError, DataError, each with the way out.
    """
    given = _given(cluster, Path(run).parent if run else Path(), assumptions, software, recipe, mfu, price, failures)
    if run:
        if any((model, params, init, pinned, steps, seq, batch, lr, name)) or not tokens is budget is None:
            raise UsageError("a run file, and values beside it", rule="a run file has them", fix="overrides=[...]")
        return Planning(plans=(_of_file(Path(run), overrides, given),))
    spent = parse_budget(budget) if budget is not None else None
    _require_amount(tokens, spent)
    _require_positive(steps=steps, seq=seq, lr=lr)
    subject, sized = _subject(model, params, init, spent, given)
    data, manifest, count = read_data(str(tokens), beside) if tokens is not None else (NOWHERE, None, 0)
    length = seq or subject.hints.seq_len or min(subject.arch.max_seq_len, 2048)
    sequences, why = parse_batch(batch, length) if batch else (0, "")
    wanted = Hints(steps=steps, seq_len=seq, global_batch=sequences, lr=lr)
    question = Question(
        subject=subject, tokens=count, data=data, manifest=manifest, wanted=wanted, batch_why=why, name=name,
        precision=precision, pinned=pinned, top=top, beside=beside, **vars(given),
    )  # fmt: skip
    return spend(question, spent, sized=sized) if spent else answer(question)


def _of_file(path: Path, overrides: Iterable[str], given: _Given) -> Planned:
    return plan_file(
        path,
        given.cluster,
        tuple(overrides),
        given.usd_per_hour,
        software=given.software,
        assumptions=given.assumptions,
        mfu=given.mfu,
    )


def _require_amount(tokens: str | Path | float | None, spent: Budget | None) -> None:
    if tokens is None and spent is None:
        raise UsageError(
            "a plan without tokens or a budget",
            rule="a new run is planned for some tokens",
            fix="--tokens data, --tokens 1.5T, or --budget 6e23flop",
        )
    if tokens is not None and spent is not None and not Path(str(tokens)).is_dir():
        raise UsageError("--tokens COUNT and --budget", rule="one follows from the other", fix="leave one of them")


def _require_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"--{name} {value}", rule="above 0, or left to the rules")


def _given(cluster, folder: Path, settings, software, recipe: str, mfu, price, failures) -> _Given:
    place = cluster if isinstance(cluster, Cluster) else find_cluster(cluster, folder)
    assumptions = Assumptions()
    if failures:
        assumptions = replace(assumptions, failures_per_node_day=parse_failures("--failures", failures))
    usd_per_hour = parse_price(price) if price else 0.0
    if usd_per_hour:
        assumptions = replace(assumptions, usd_per_hour=usd_per_hour)
    place, assumptions = assume(place, assumptions, settings)
    stack = software if isinstance(software, Software) else with_properties(INGOT, software)
    return _Given(
        cluster=place,
        assumptions=assumptions,
        software=with_properties(stack, (), recipe),
        mfu=parse_share("--mfu", mfu) if mfu else 0.0,
        usd_per_hour=usd_per_hour,
    )


def _subject(model: str, params, init, spent: Budget | None, given: _Given) -> tuple[Subject, bool]:
    """And whether its size follows from the budget."""
    if spent and not (model or params or init):
        return first_size(spent, given.cluster, given.usd_per_hour), True
    parameters = parse_parameters(params) if params is not None else 0
    return find_subject(model, parameters=parameters, init=Path(init) if init else None), False
