"""How `ingot check --simulate` shows a dry run."""

from dataclasses import asdict, replace

from ingot.cli.terminal import Terminal
from ingot.rehearse.dryrun.dry_run import MOMENTS, STEADY, WORLD, DryRun, Trace
from ingot.rehearse.dryrun.rendezvous import ISEND, MESSAGES, SEND
from ingot.units import format_bytes

_KINDS = ("parameters", "optimizer", "gradients", "activations", "communication", "logits", "backward", "other", "host")


def show(found: DryRun, terminal: Terminal) -> None:
    first = [trace for trace in found.traces if trace.rank == found.bases[trace.position]]
    terminal.say(
        f"\n{found.grid.world_size:,} ranks, followed through {len(found.traces)}. Memory of tensors at the peak, by "
        "moment (planner: what `ingot plan` bills):"
    )
    rows = [
        [t.name, *(format_bytes(t.moments[m].bytes) for m in MOMENTS), format_bytes(found.bills[t.position])]
        for t in first
    ]
    terminal.table(rows, ("rank", *MOMENTS, "planner"), right=range(1, len(MOMENTS) + 2))
    _over_bill(found, terminal)
    terminal.say("\nOf the steady step's peak, by kind, and where it is reached:")
    kinds = [kind for kind in _KINDS if any(t.moments[STEADY].by_kind.get(kind) for t in first)]
    rows = [
        [t.name, *(format_bytes(t.moments[STEADY].by_kind.get(kind, 0)) for kind in kinds), t.moments[STEADY].place]
        for t in first
    ]
    terminal.table(rows, ("rank", *kinds, "at"), right=range(1, len(kinds) + 1))
    terminal.say(
        "\nOne optimizer step, per rank: work (computed: with what is recomputed), collectives and bytes sent by axis:"
    )
    axes = sorted({axis for t in first for axis in t.counts}, key=lambda axis: _outermost(axis, found))
    rows = [
        [
            t.name,
            _tera(found.useful[t.position]),
            _tera(t.matmul_flops + t.attention_flops),
            *(_sent(t, a) for a in axes),
        ]
        for t in first
    ]
    terminal.table(rows, ("rank", "useful TFLOP", "computed TFLOP", *axes), right=range(1, len(axes) + 3))
    if found.overlap_left_out:
        terminal.say("The overlap of parallel.async_tp is not followed: collectives are told as they are without it.")
    _verdicts(found, terminal)


def _over_bill(found: DryRun, terminal: Terminal) -> None:
    if not found.over_bill:
        return
    worst, *others = found.over_bill
    moment, peak = worst.peak
    bill = found.bills[worst.position]
    more = f"; {len(others)} more of the {len(found.traces)} ranks followed are above theirs" if others else ""
    terminal.say(
        f"More memory than planned: {worst.name} peaks at {format_bytes(peak)} ({moment}), the planner bills"
        f" {format_bytes(bill)}: {peak / bill - 1:.0%} above it{more}."
    )


def _outermost(axis: str, found: DryRun) -> tuple[bool, int, int]:
    """Axes in their order, several together behind the first of them, and the whole world at the end."""
    order, names = list(found.grid.sizes), axis.split("+")
    return axis == WORLD, order.index(names[0]) if axis != WORLD else 0, len(names)


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.0f}"


def _sent(trace: Trace, axis: str) -> str:
    counts = trace.counts.get(axis, {})
    collectives = sum(n for op, n in counts.items() if op not in MESSAGES)
    sends = sum(counts.get(op, 0) for op in (SEND, ISEND))
    calls = f"{collectives} calls" if collectives else f"{sends} sends"
    return f"{calls}, {format_bytes(trace.sent.get(axis, 0))}"


def _verdicts(found: DryRun, terminal: Terminal) -> None:
    world, wrong = found.world, [c for c in found.compared if not c.agrees]
    if world.fault:
        terminal.say(terminal.style(f"\nCollectives: {world.fault.kind}", "red"))
        terminal.say("\n".join(f"  {line}" for line in world.fault.message.splitlines()))
    else:
        calls = sum(len(trace.calls) for trace in found.traces)
        terminal.say(f"\nCollectives: {calls:,} calls of {len(found.traces)} ranks meet; no mismatch, no deadlock.")
    if not world.alike:
        terminal.say(f"First and last ranks differ, so {world.followed} corners of the mesh were followed.")
    names = {trace.rank: trace.name for trace in found.traces}
    for c in wrong:
        terminal.say(
            f"{names[c.rank]}: {c.what}: traced {c.traced:.4g}, by formula {c.formula:.4g} ({c.deviation:.1%})"
        )
    _other_loads(found, names, terminal)
    if not wrong:
        worst = max((c.deviation for c in found.compared if not c.other_loads), default=0.0)
        terminal.say(f"Work and traffic agree with the formulas of the planner within {max(worst, 1e-4):.2%}.")


def _other_loads(found: DryRun, names: dict[int, str], terminal: Terminal) -> None:
    """What the given loads of experts make of the ranks that were followed."""
    changed = [c for c in found.compared if c.other_loads and c.formula]
    if changed:
        terminal.say("\nWith these loads of experts, beside what a step is if all have the same:")
        rows = [[names[c.rank], c.what, f"{c.traced:.4g}", f"{c.traced / c.formula:.2f} times"] for c in changed]
        terminal.table(rows, ("rank", "what", "traced", "of balanced"), right=(2, 3))


def facts(found: DryRun) -> dict:
    """For --json."""
    return {
        "world_size": found.grid.world_size,
        "ranks": [asdict(replace(trace, calls=[])) | {"calls": len(trace.calls)} for trace in found.traces],
        "fault": found.world.fault and asdict(found.world.fault),
        "alike": found.world.alike,
        "compared": [asdict(c) | {"deviation": c.deviation, "agrees": c.agrees} for c in found.compared],
        "planner_bytes": found.bills,
        "over_bill": [trace.rank for trace in found.over_bill],
        "useful_flops": found.useful,
    }
