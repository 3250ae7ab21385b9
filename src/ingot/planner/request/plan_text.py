"""A planning as text: ranked layouts as a table, then the best plan in full. `ingot plan` prints these lines."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.planner.run.plan import GIVEN, Planned
from ingot.planner.search.candidates import EQUAL
from ingot.planner.show.notes import notes
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Outlook, Plan
from ingot.schema.run import RunConfig
from ingot.theory.layout import resolve_parallel
from ingot.units import format_bytes, format_count, format_seconds, format_usd

if TYPE_CHECKING:
    from ingot.planner.request.answer import Planning

WIDTH = 118
_BAR_WIDTH = 32
_DAY_SECONDS = 86400
_MOST_STAGES = 8  # pipeline ranks whose memory is told one by one
_LABEL = 10  # columns of the names of lines


def as_text(planning: "Planning") -> Iterator[str]:
    best = planning.best
    yield from _model(planning)
    yield from _ranking(planning)
    yield from plan_lines(best)
    yield from _wrapped("texts", planning.texts)
    yield from _wrapped("fix", planning.fix)
    yield from _wrapped("idle", planning.found.idle if planning.found else "")
    yield from _wrapped("look", planning.why_not_executed)


def _model(planning: "Planning") -> Iterator[str]:
    plan, arch, question = planning.best.plan, planning.best.run.model, planning.question
    shape = f"{arch.num_layers} layers, width {arch.d_model}, {arch.num_heads}/{arch.num_kv_heads} heads"
    yield f"model     {format_count(plan.parameters)} parameters: {shape}, vocabulary {arch.vocab_size:,}"
    if question and question.subject.parameters:
        bare = question.subject.parameters
        yield f"          the shape of {question.subject.shape} stands in; FLOPs are counted as 6 x {bare:,} x tokens"
    yield f"compute   {plan.formulas['total_flops']}"


def _ranking(planning: "Planning") -> Iterator[str]:
    found = planning.found
    if not found or not found.best:
        return
    cluster = planning.best.plan.cluster
    count = f"{found.considered:,} considered, {found.fitting:,} seen to fit, {found.seconds:.1f} s"
    order = (
        "in the order predicted, all at the MFU given"
        if GIVEN in planning.best.plan.time_seconds
        else f"fastest first, the simplest of those within {EQUAL:.0%}"
    )
    yield f"layouts   for {cluster.devices:,} devices, {order} ({count})"
    yield from table(ranking_rows(planning), RANKING, right=range(len(RANKING)))


RANKING = (
    "", "tp", "pp", "cp", "ep", "dp", "zero", "micro", "recompute", "memory", "bubble", "exposed", "step", "MFU",
    "tokens", "days",
)  # fmt: skip


def ranking_rows(planning: "Planning") -> list[tuple[str, ...]]:
    """The cells of RANKING for each plan; "-" where an axis is not used or a figure not known."""
    alike = len({planned.run.train.steps for planned in planning.plans}) == 1
    return [
        _row(number, planned, "-" if alike else _tokens(planned)) for number, planned in enumerate(planning.plans, 1)
    ]


def _tokens(planned: Planned) -> str:
    return format_count(planned.plan.steps * planned.plan.tokens_per_step)


def _row(number: int, planned: Planned, tokens: str) -> tuple[str, ...]:
    run, plan, parallel = planned.run, planned.plan, resolve_parallel(planned.run)
    known = plan.step_seconds > 0
    exposed = sum(line.exposed_seconds for line in plan.communication.values())
    days = plan.outlook.days if plan.outlook else plan.total_seconds / _DAY_SECONDS
    return (
        f"{number}",
        str(parallel.tp) if parallel.tp > 1 else "-",
        _pipeline(parallel),
        _context(parallel),
        str(parallel.ep) if parallel.ep > 1 else "-",
        _data(parallel),
        str(parallel.zero) if parallel.shard_ranks > 1 else "-",
        f"{run.train.micro_batch} x {run.accumulation}",
        parallel.recompute if parallel.offload == "none" else f"{parallel.recompute}, offload",
        format_bytes(plan.total_memory_bytes),
        f"{plan.bubble:.1%}" if parallel.pp > 1 else "-",
        f"{exposed / plan.step_seconds:.1%}"
        if known and plan.communication and GIVEN not in plan.time_seconds
        else "-",
        format_seconds(plan.step_seconds) if known else "-",
        f"{plan.mfu:.1%}" if plan.mfu else "-",
        tokens,
        format_days(days) if known else "-",
    )


def _pipeline(parallel: Parallel) -> str:
    if parallel.pp == 1:
        return "-"
    each = parallel.stages_on_each_rank
    return f"{parallel.pp} {parallel.schedule}" + (f" x{each}" if each > 1 else "")


def _context(parallel: Parallel) -> str:
    return f"{parallel.cp} {parallel.context_form}" if parallel.cp > 1 else "-"


def _data(parallel: Parallel) -> str:
    copies, shards = parallel.dp_replicate, parallel.dp_shard
    return f"{copies} x {shards}" if copies > 1 and shards > 1 else str(copies * shards)


def format_days(days: float) -> str:
    return f"{days:.1f} d" if 1 <= days < 1000 else format_seconds(days * _DAY_SECONDS)


def plan_lines(planned: Planned) -> Iterator[str]:
    """One plan in full, without its model."""
    run, plan = planned.run, planned.plan
    for name, text in notes(run, plan.cluster):
        yield from _wrapped(name, text)
    yield from _wrapped(
        "layout",
        f"{run.parallel.world_size:,} ranks{_degrees(run.parallel)} on {plan.cluster.name},"
        f" {plan.software.recipe or run.train.precision};"
        f" batch {run.train.global_batch:,} = {run.train.micro_batch} x {run.accumulation:,} accumulated"
        f" x {run.parallel.data_ranks:,} ranks",
    )
    yield (
        f"steps     {plan.steps:,} x {plan.tokens_per_step:,} tokens in sequences of {run.train.seq_len:,}"
        f" = {format_count(plan.steps * plan.tokens_per_step)}, learning rate {run.optim.lr:g}"
    )
    if "epochs" in plan.formulas:
        yield f"data      {plan.formulas['epochs'].rpartition('= ')[2]} passes"
    yield from _memory(plan, run)
    yield from _time(plan)
    yield from _communication(plan)
    yield from _disk_and_money(plan, run)


def _degrees(parallel: Parallel) -> str:
    """ " (pp 4 x dp_shard 8 x tp 4, ep 8)" where more than one axis is used, or experts are divided."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    used = [f"{name} {getattr(parallel, name)}" for name in names if getattr(parallel, name) > 1]
    shown = [" x ".join(used)] if len(used) > 1 else []
    shown += [f"ep {parallel.ep}"] if parallel.ep > 1 else []
    return f" ({', '.join(shown)})" if shown else ""


def _memory(plan: Plan, run: RunConfig) -> Iterator[str]:
    there = rank_memory_bytes(plan.cluster, run.parallel.world_size)
    share = plan.total_memory_bytes / there
    which = "per rank" if run.parallel.pp == 1 else "on the fullest pipeline rank"
    yield f"memory    {format_bytes(plan.total_memory_bytes)} {which}, {share:.0%} of {format_bytes(there)}"
    largest = max(plan.memory_bytes.values())
    rows = [
        (f"  {kind}", format_bytes(size), "█" * max(round(_BAR_WIDTH * size / largest), 1 if size else 0))
        for kind, size in sorted(plan.memory_bytes.items(), key=lambda item: -item[1])
    ]
    yield from table(rows, right=(1,))
    if len(plan.stage_memory_bytes) > 1:
        yield from _wrapped("stages", _stages([sum(stage.values()) for stage in plan.stage_memory_bytes]))
    if len(set(plan.moments_bytes.values())) > 1:
        moments = ", ".join(f"{moment} {format_bytes(size)}" for moment, size in plan.moments_bytes.items())
        yield from _wrapped("moments", moments)


def _stages(totals: list[int]) -> str:
    """Of all pipeline ranks, or of many those at the ends and the fullest."""
    last, fullest = len(totals) - 1, totals.index(max(totals))
    if len(totals) <= _MOST_STAGES:
        return f"pipeline ranks 0 to {last}: {', '.join(map(format_bytes, totals))}"
    told = sorted({0, 1, fullest, last - 1, last})
    return ", ".join(f"{'the fullest, ' * (rank == fullest)}rank {rank}: {format_bytes(totals[rank])}" for rank in told)


def _time(plan: Plan) -> Iterator[str]:
    if not plan.step_seconds:
        yield "time      unknown until this machine is measured"
        return
    speed = format_count(plan.tokens_per_step / plan.step_seconds)
    band = ""
    if plan.step_seconds_high:
        band = f" ({format_seconds(plan.step_seconds_low)} to {format_seconds(plan.step_seconds_high)})"
    yield f"time      {format_seconds(plan.step_seconds)} per step{band}, {speed} tokens/s"
    parts = sorted(plan.time_seconds.items(), key=lambda part: -part[1])
    if plan.cluster.device != "cpu" and GIVEN not in plan.time_seconds:
        rows = [(f"  {part}", format_seconds(s), f"{s / plan.step_seconds:.1%}") for part, s in parts if s > 0]
        yield from table(rows, right=(1, 2))
    if plan.mfu:
        yield f"MFU       {_mfu(plan)}"
    if plan.bubble:
        yield f"bubble    pipeline ranks wait {plan.bubble:.1%} of a step"


def _mfu(plan: Plan) -> str:
    band = ""
    if plan.step_seconds_high and plan.mfu:
        slow, fast = plan.step_seconds / plan.step_seconds_high, plan.step_seconds / plan.step_seconds_low
        band = f", {plan.mfu * slow:.1%} to {plan.mfu * fast:.1%}"
    how = (
        "6ND of the given size"
        if "by their number alone" in plan.formulas["flops_per_token"]
        else "causal attention counted half"
    )
    given = ", as given" if GIVEN in plan.time_seconds else ""
    done = f"; HFU {plan.hfu:.1%} (what is recomputed counts)" if plan.hfu and not given else ""
    peak = " of the 16-bit peak" if plan.software.recipe else ""
    return f"{plan.mfu:.1%}{peak}{band}{given} ({how}){done}"


def _communication(plan: Plan) -> Iterator[str]:
    lines = {line: c for line, c in plan.communication.items() if c.sent_bytes}
    if not lines or GIVEN in plan.time_seconds:
        return
    yield "links     what one rank sends in a step, and what of it a step waits for"
    rows = [
        (f"  {line}", format_bytes(c.sent_bytes), f"{format_seconds(c.seconds)} alone",
         f"{format_seconds(c.exposed_seconds)} exposed", "over the network" if c.crosses else "over fast links")
        for line, c in lines.items()
    ]  # fmt: skip
    yield from table(rows, right=(1, 2, 3))


def _disk_and_money(plan: Plan, run: RunConfig) -> Iterator[str]:
    if plan.step_seconds and not plan.outlook:
        yield f"          {format_seconds(plan.total_seconds)} for all steps"
    yield f"disk      {format_bytes(plan.checkpoint_bytes)} per checkpoint, {run.checkpoint.keep} are kept"
    if plan.outlook:
        yield from _outlook(plan, plan.outlook)
    elif plan.usd:
        yield f"cost      {format_usd(plan.usd)} = {plan.formulas['usd']}"


def _outlook(plan: Plan, outlook: Outlook) -> Iterator[str]:
    steps, clock = format_days(outlook.productive_days), format_days(outlook.days)
    band = ""
    if plan.step_seconds_high:
        low, high = (outlook.days * s / plan.step_seconds for s in (plan.step_seconds_low, plan.step_seconds_high))
        band = f" ({format_days(low)} to {format_days(high)})"
    yield f"days      {steps} of steps, {clock} by the clock{band}: goodput {outlook.goodput:.1%}"
    rate = f"{outlook.failures_per_node_day:.2%} per node-day"
    yield (
        f"failures  {outlook.failures:,.1f} to expect ({rate}), {format_seconds(outlook.restart_seconds)} to restart;"
        f" keep {outlook.spare_nodes} spare nodes"
    )
    stall = format_seconds(outlook.checkpoint_stall_seconds)
    yield f"saving    every {format_seconds(outlook.checkpoint_every_seconds)}, a stall of {stall} each"
    yield from _wrapped("reading", plan.formulas.get("outlook.reading", ""))
    if plan.usd:
        total, parts = sum(outlook.usd_by_kind.values()), outlook.usd_by_kind
        yield f"cost      {format_usd(plan.usd)} = {plan.formulas['usd']}"
        shown = " + ".join(f"{format_usd(usd)} {kind}" for kind, usd in parts.items())
        yield f"          {format_usd(total)} with failures and storage: {shown}"


def _wrapped(name: str, text: str) -> Iterator[str]:
    """`text` beside `name`, on as many lines as it takes; nothing of an empty one."""
    for number, line in enumerate(textwrap.wrap(text, WIDTH - _LABEL, break_long_words=False)):
        yield f"{name if not number else '':<{_LABEL}}{line}"


def wrapped(line: str) -> list[str]:
    """`line` on as many lines as it takes, those after the first as far in as it is, and three columns more."""
    rest = " " * (len(line) - len(line.lstrip()) or 3)
    return textwrap.wrap(line, WIDTH, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def columns_in_use(rows: Sequence[Sequence[str]]) -> list[int]:
    """The numbers of those columns that have more than "-" in them."""
    return [i for i in range(len(rows[0])) if any(row[i] != "-" for row in rows)] if rows else []


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), *, right: Sequence[int] = ()) -> Iterator[str]:
    """Aligned columns, those in `right` (0-based) on the right, as numbers are. A column of "-" alone is left out."""
    used = columns_in_use(rows)
    cells = [[row[i] for i in used] for row in ([header, *rows] if header else rows)]
    aligned = [i in right for i in used]
    widths = [max(len(row[i]) for row in cells) for i in range(len(used))]
    for row in cells:
        columns = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, aligned, strict=True))
        yield "  ".join(columns).rstrip()
