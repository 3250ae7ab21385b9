"""Ranked plans as text for `ingot plan`, and as HTML for notebooks: a table of layouts, then the best plan in full."""

import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.planner.run.advice import notes
from ingot.planner.run.plan import GIVEN_MFU, PlannedRun, RankedPlans
from ingot.planner.search.candidates import EQUAL
from ingot.planner.show.layout import layout_text, settings_text
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Outlook, Plan
from ingot.schema.run import RunConfig
from ingot.theory.failures import DAY_SECONDS
from ingot.theory.flops import mfu_words, train_flops_6nd, train_flops_per_token
from ingot.theory.layout import resolve_parallel
from ingot.units import format_bytes, format_count, format_seconds, format_usd

WIDTH = 118
TABLE_WIDTH = 80
_BAR_WIDTH = 32
_MOST_STAGES = 8  # with more pipeline ranks, only the two first, the two last and the fullest are shown
_MUCH_ATTENTION = 0.25  # of 6ND
_LABEL = 10  # columns reserved for the label of a line
# The colors of kinds of memory, in the order of the HTML bar. Color-blind people can distinguish them (Okabe & Ito
# 2008).
_COLORS = {
    "weights": "#0072B2", "gradients": "#56B4E9", "optimizer": "#009E73", "gathered": "#F0E442",
    "activations": "#E69F00", "logits": "#D55E00", "fragmentation": "#CC79A7", "runtime": "#999999",
}  # fmt: skip
_OTHER_COLOR = "#666666"
_CELL = "padding:2px 8px;text-align:right;white-space:nowrap"


def plans_text(ranked: RankedPlans) -> Iterator[str]:
    """Yield the lines that `ingot plan` prints for ranked plans."""
    best = ranked.best
    yield from _model(ranked)
    yield from _ranking(ranked)
    yield from plan_lines(best)
    yield from labelled("texts", ranked.texts)
    yield from labelled("fix", ranked.fix)
    yield from labelled("idle", ranked.search_result.idle if ranked.search_result else "")
    yield from labelled("look", ranked.why_not_executed)


def _model(ranked: RankedPlans) -> Iterator[str]:
    plan, arch = ranked.best.plan, ranked.best.run.model
    shape = f"{arch.num_layers} layers, width {arch.d_model}, {arch.num_heads}/{arch.num_kv_heads} heads"
    yield f"model     {format_count(plan.parameters)} parameters: {shape}, vocabulary {arch.vocab_size:,}"
    if ranked.parameters:
        yield f"          in the shape of {ranked.shape}; FLOPs are counted as 6 x {ranked.parameters:,} x tokens"
    yield f"compute   {plan.formulas['total_flops']}"
    if ranked.parameters:
        yield from _left_out(ranked.best.run, ranked.parameters)


def _left_out(run: RunConfig, parameters: float) -> Iterator[str]:
    """Yield a line if attention is so much of the work that 6ND, and an MFU counted with it, mean little."""
    counted = train_flops_6nd(parameters, 1)
    more = train_flops_per_token(run.model, run.train.seq_len) / counted - 1
    if more > _MUCH_ATTENTION:
        yield from labelled(
            "",
            f"at {run.train.seq_len:,} tokens, attention brings the work to {1 + more:.3g} times 6ND: the MFU below "
            "counts 6ND only; name the model with --model to count it all",
        )


def _ranking(ranked: RankedPlans) -> Iterator[str]:
    found = ranked.search_result
    if not found or not found.best:
        return
    cluster = ranked.best.plan.cluster
    count = f"{found.considered:,} considered, {found.fitting:,} found to fit, {found.seconds:.1f} s"
    order = (
        "in the order predicted, all at the MFU given"
        if GIVEN_MFU in ranked.best.plan.time_seconds
        else f"fastest first, simplest first within {EQUAL:.0%}"
    )
    yield f"layouts   for {cluster.devices:,} devices, {order} ({count})"
    figures = [RANKING.index(name) for name in ("", "memory", "bubble", "exposed", "step", "MFU", "tokens", "days")]
    rows = [[row[i] for i in figures] for row in ranking_rows(ranked)]
    head, *lines = table(rows, [RANKING[i] for i in figures], right=range(len(figures)))
    yield head
    for line, planned in zip(lines, ranked.plans, strict=True):
        yield line
        layout = f"{layout_text(planned.run)}, {settings_text(planned.run)}"
        yield from textwrap.wrap(layout, TABLE_WIDTH, initial_indent="    ", subsequent_indent="    ")


RANKING = (
    "", "tp", "pp", "cp", "ep", "dp", "zero", "micro", "recompute", "memory", "bubble", "exposed", "step", "MFU",
    "tokens", "days",
)  # fmt: skip


def ranking_rows(ranked: RankedPlans) -> list[tuple[str, ...]]:
    """Return one row of cells per plan, with the columns of RANKING. A cell is "-" if the layout does not use the axis
    or the figure is unknown."""
    alike = len({planned.run.train.steps for planned in ranked.plans}) == 1
    return [_row(number, planned, "-" if alike else _tokens(planned)) for number, planned in enumerate(ranked.plans, 1)]


def _tokens(planned: PlannedRun) -> str:
    return format_count(planned.plan.steps * planned.plan.tokens_per_step)


def _row(number: int, planned: PlannedRun, tokens: str) -> tuple[str, ...]:
    run, plan, parallel = planned.run, planned.plan, resolve_parallel(planned.run)
    known = plan.step_seconds > 0
    exposed = sum(line.exposed_seconds for line in plan.communication.values())
    days = plan.outlook.days if plan.outlook else plan.total_seconds / DAY_SECONDS
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
        if known and plan.communication and GIVEN_MFU not in plan.time_seconds
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
    """Format the duration of a run, on the command line and on the page: '1.2 d', below a day '23 h 5 min'."""
    return f"{days:.1f} d" if 1 <= days < 1000 else format_seconds(days * DAY_SECONDS)


def plan_lines(planned: PlannedRun) -> Iterator[str]:
    """Yield the lines that describe one plan in full: notes, layout, memory, time, communication, failures, cost."""
    run, plan = planned.run, planned.plan
    for name, text in notes(run, plan.cluster):
        yield from labelled(name, text)
    layout = f" ({layout_text(run)})" if run.parallel.world_size > 1 else ""
    yield from labelled(
        "layout",
        f"{run.parallel.world_size:,} ranks{layout} on {plan.cluster.name},"
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
        yield from labelled("stages", _stages([sum(stage.values()) for stage in plan.stage_memory_bytes]))
    if len(set(plan.moments_bytes.values())) > 1:
        moments = ", ".join(f"{moment} {format_bytes(size)}" for moment, size in plan.moments_bytes.items())
        yield from labelled("phases", moments)


def _stages(totals: list[int]) -> str:
    """Return the memory of all pipeline ranks as text; if there are more than _MOST_STAGES, only that of the two first,
    the two last and the fullest."""
    last, fullest = len(totals) - 1, totals.index(max(totals))
    if len(totals) <= _MOST_STAGES:
        return f"pipeline ranks 0 to {last}: {', '.join(map(format_bytes, totals))}"
    shown = sorted({0, 1, fullest, last - 1, last})
    return ", ".join(
        f"{'the fullest, ' * (rank == fullest)}rank {rank}: {format_bytes(totals[rank])}" for rank in shown
    )


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
    if plan.cluster.device != "cpu" and GIVEN_MFU not in plan.time_seconds:
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
    given = ", as given" if GIVEN_MFU in plan.time_seconds else ""
    done = f"; HFU {plan.hfu:.1%} (what is recomputed counts)" if plan.hfu and not given else ""
    peak = " of the 16-bit peak" if plan.software.recipe else ""
    words = f" ({mfu_words(plan.mfu)})" if plan.mfu and plan.cluster.device != "cpu" else ""
    return f"{plan.mfu:.1%}{peak}{words}{band}{given} ({how}){done}"


def _communication(plan: Plan) -> Iterator[str]:
    lines = {line: c for line, c in plan.communication.items() if c.sent_bytes}
    if not lines or GIVEN_MFU in plan.time_seconds:
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
    kept = run.checkpoint.most_kept(run.train.steps, run.guard.proven_steps)
    yield f"disk      {format_bytes(plan.checkpoint_bytes)} per checkpoint, {kept} are kept"
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
    yield f"days      {steps} of steps, {clock} wall-clock{band}: goodput {outlook.goodput:.1%}"
    rate = f"{outlook.failures_per_node_day:.2%} per node-day"
    measured = " (measured)" if "outlook.restart" in plan.formulas else ""
    restart = f"{format_seconds(outlook.restart_seconds)}{measured}"
    yield (
        f"failures  {outlook.failures:,.1f} to expect ({rate}), {restart} to restart;"
        f" keep {outlook.spare_nodes} spare nodes"
    )
    stall = format_seconds(outlook.checkpoint_stall_seconds)
    copied = f"; a copy of {format_bytes(outlook.snapshot_bytes_per_node)} in each node's memory"
    copied = copied if outlook.snapshot_bytes_per_node else ""
    yield f"saving    every {format_seconds(outlook.checkpoint_every_seconds)}, a stall of {stall} each{copied}"
    yield from labelled("reading", plan.formulas.get("outlook.reading", ""))
    if plan.usd:
        total, parts = sum(outlook.usd_by_kind.values()), outlook.usd_by_kind
        yield f"cost      {format_usd(plan.usd)} = {plan.formulas['usd']}"
        shown = " + ".join(f"{format_usd(usd)} {kind}" for kind, usd in parts.items())
        yield f"          {format_usd(total)} with failures and storage: {shown}"


def labelled(name: str, text: str) -> Iterator[str]:
    """Yield `text` after the label `name`, wrapped to WIDTH; no line for an empty text."""
    for number, line in enumerate(textwrap.wrap(text, WIDTH - _LABEL, break_long_words=False)):
        yield f"{name if not number else '':<{_LABEL}}{line}"


def wrapped(line: str) -> list[str]:
    """Return `line` wrapped to WIDTH; further lines have its indentation, or three columns if it has none."""
    rest = " " * (len(line) - len(line.lstrip()) or 3)
    return textwrap.wrap(line, WIDTH, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def columns_in_use(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of columns in which not every cell is "-"."""
    return [i for i in range(len(rows[0])) if any(row[i] != "-" for row in rows)] if rows else []


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), *, right: Sequence[int] = ()) -> Iterator[str]:
    """Yield lines of aligned columns. right: indices of right-aligned columns. Columns of only "-" are omitted."""
    used = columns_in_use(rows)
    cells = [[row[i] for i in used] for row in ([header, *rows] if header else rows)]
    aligned = [i in right for i in used]
    widths = [max(len(row[i]) for row in cells) for i in range(len(used))]
    for row in cells:
        columns = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, aligned, strict=True))
        yield "  ".join(columns).rstrip()


def plans_html(ranked: RankedPlans) -> str:
    """Return ranked plans as self-contained HTML with all text escaped. No text color is set, so that light and dark
    pages can show it."""
    best = ranked.best
    head = f"{format_count(best.plan.parameters)} parameters on {best.plan.cluster.name}"
    rows = ranking_rows(ranked)
    used = columns_in_use(rows)
    names = [*(RANKING[i] for i in used), "memory of the device"]
    titles = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in names)
    body = "".join(_html_row([row[i] for i in used], planned) for row, planned in zip(rows, ranked.plans, strict=True))
    details = escape("\n".join(plan_lines(best)))
    texts = (ranked.fix, ranked.texts, ranked.why_not_executed)
    remarks = "".join(f"<p>{escape(text)}</p>" for text in texts if text)
    return (
        f'<div><p><b>{escape(best.run.name)}</b>: {escape(head)}</p><div style="overflow-x:auto">'
        f'<table style="border-collapse:collapse;font-size:90%"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody>'
        f"</table></div><p>{_legend(ranked)}</p>{remarks}"
        f"<details><summary>the best in full</summary><pre>{details}</pre></details></div>"
    )


def _html_row(cells: list[str], planned: PlannedRun) -> str:
    shown = "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in cells)
    return f'<tr>{shown}<td style="padding:2px 8px">{_bar(planned)}</td></tr>'


def _bar(planned: PlannedRun) -> str:
    plan = planned.plan
    there = rank_memory_bytes(plan.cluster, planned.run.parallel.world_size)
    scale = 100 / max(there, plan.total_memory_bytes)
    parts = "".join(
        f'<span title="{escape(kind)} {format_bytes(size)}" style="display:inline-block;height:12px;'
        f'width:{size * scale:.2f}%;background:{_COLORS.get(kind, _OTHER_COLOR)}"></span>'
        for kind, size in _ordered(plan.memory_bytes)
        if size
    )
    label = f"{format_bytes(plan.total_memory_bytes)} of {format_bytes(there)}"
    border = "#D55E00" if plan.total_memory_bytes > there else "currentColor"
    return (
        f'<span role="img" aria-label="{label}" title="{label}" style="display:inline-block;width:220px;height:12px;'
        f'line-height:0;font-size:0;border:1px solid {border};white-space:nowrap">{parts}</span>'
    )


def _legend(ranked: RankedPlans) -> str:
    kinds = [kind for kind, size in _ordered(ranked.best.plan.memory_bytes) if size]
    return " ".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{_COLORS.get(kind, _OTHER_COLOR)}"></span> {escape(kind)}</span>'
        for kind in kinds
    )


def _ordered(memory: dict[str, int]) -> list[tuple[str, int]]:
    order = [*_COLORS, *(kind for kind in memory if kind not in _COLORS)]
    return sorted(memory.items(), key=lambda item: order.index(item[0]))
