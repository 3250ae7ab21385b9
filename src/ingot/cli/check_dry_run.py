"""The dry run of `ingot check --simulate`: its options and its tables."""

import argparse
from typing import TYPE_CHECKING

from ingot.cli.arguments import fraction
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.rehearse.dryrun.dry_run import DryRun, PhaseMemory, Trace

_PATIENCE_SECONDS = 900.0  # api/checking.py, which is imported only when the verb runs


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of the dry run to the parser of `ingot check`."""
    dry = parser.add_argument_group("dry run")
    dry.add_argument(
        "--simulate",
        action="store_true",
        help="dry run: trace memory, traffic and collectives of a few ranks that represent all, without devices,"
        " data or disk; traces are kept, so a repeated dry run traces only what is missing",
    )
    dry.add_argument(
        "--expert-load",
        metavar="balanced|FILE",
        help="the load of each expert, a JSON list of numbers (default: balanced, equal loads)",
    )
    dry.add_argument(
        "--patience",
        type=fraction("patience", 1.0, 1e6),
        metavar="SECONDS",
        help=f"end with what is traced when no rank makes progress for so long (default: {_PATIENCE_SECONDS:.0f})",
    )


_KINDS = ("parameters", "optimizer", "gradients", "activations", "communication", "logits", "backward", "other", "host")
_SHORT = {"communication": "comms", "activations": "activ.", "parameters": "params", "optimizer": "optim."}


def show_dry_run(found: "DryRun", terminal: Terminal) -> None:
    """Print the tables of a dry run, and whether its collectives match and the formulas agree."""
    from ingot.rehearse.dryrun.dry_run import MOMENTS, STEADY
    from ingot.units import format_bytes

    first = [trace for trace in found.traces if trace.rank == found.bases[trace.position]]
    if not found.traces:
        _show_missing(found, terminal)
        return
    several = found.grid.sizes["pp"] > 1
    names = [f"pp {t.position}" if several else t.name for t in first]
    of_each = "; one rank of each pipeline position is shown" if several else ""
    terminal.say(
        f"\n{found.grid.world_size:,} ranks, of which {len(found.traces)} were traced{of_each}.\n"
        "Memory of tensors at the peak, by phase (planner: the prediction of `ingot plan`):"
    )
    rows = [
        [name, *(format_bytes(t.moments[m].bytes) for m in MOMENTS), format_bytes(found.bills[t.position])]
        for name, t in zip(names, first, strict=True)
    ]
    terminal.table(_folded(rows), ("rank", *MOMENTS, "planner"), right=range(1, len(MOMENTS) + 2))
    _show_over_bill(found, terminal)
    terminal.say("\nPeak of the steady step, by kind of memory, and the place where it is reached:")
    kinds = [kind for kind in _KINDS if any(_is_large(t.moments[STEADY], kind) for t in first)]
    rows = [
        [name, *(format_bytes(t.moments[STEADY].by_kind.get(kind, 0)) for kind in kinds), t.moments[STEADY].place]
        for name, t in zip(names, first, strict=True)
    ]
    headings = [_SHORT.get(kind, kind) for kind in kinds]
    terminal.table(_folded(rows), ("rank", *headings, "at"), right=range(1, len(kinds) + 1))
    terminal.say(
        "\nOne optimizer step: TFLOP (computed ones include recomputation), operations, bytes sent by axis (calls):"
    )
    axes = sorted({axis for t in first for axis in t.counts}, key=lambda axis: _outermost(axis, found))
    rows = [
        [
            name,
            _tera(found.useful[t.position]),
            _tera(t.matmul_flops + t.attention_flops),
            f"{t.operations:,}",
            *(_sent(t, a) for a in axes),
        ]
        for name, t in zip(names, first, strict=True)
    ]
    terminal.table(_folded(rows), ("rank", "useful", "computed", "operations", *axes), right=(1, 2, 3))
    if found.overlap_left_out:
        terminal.say("The overlap of parallel.async_tp is not traced: collectives are shown as if there were none.")
    _verdicts(found, terminal)


def _is_large(phase: "PhaseMemory", kind: str) -> bool:
    return phase.by_kind.get(kind, 0) > 0.001 * phase.bytes


def _folded(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows of pipeline ranks, with neighbors that differ in nothing but their number as one: "pp 1-8"."""
    folded: list[list[str]] = []
    for name, *cells in rows:
        if folded and folded[-1][1:] == cells:
            start, _, _ = folded[-1][0].partition("-")
            folded[-1][0] = f"{start}-{name.removeprefix('pp ')}"
        else:
            folded.append([name, *cells])
    return folded


def _show_over_bill(found: "DryRun", terminal: Terminal) -> None:
    from ingot.units import format_bytes

    if not found.over_bill:
        return
    worst, *others = found.over_bill
    phase, peak = worst.peak
    bill = found.bills[worst.position]
    more = f"; {len(others)} more of the {len(found.traces)} traced ranks are above their bills" if others else ""
    terminal.say(
        f"More memory than planned: {worst.name} peaks at {format_bytes(peak)} ({phase}), the planner bills"
        f" {format_bytes(bill)}: {peak / bill - 1:.0%} above it{more}."
    )
    _blame_declared(found, terminal)


def _blame_declared(found: "DryRun", terminal: Terminal) -> None:
    """Name the parts of plug-ins, if there are any: the formulas rest on what they declare."""
    if found.declared:
        terminal.say(f"The formulas rest on what plug-ins declare: {'; '.join(found.declared)}. Compare their costs.")


def _outermost(axis: str, found: "DryRun") -> tuple[bool, int, int]:
    """Return a sort key for axes: mesh order, combined axes ("a+b") after their first axis, the whole world last."""
    from ingot.rehearse.dryrun.dry_run import WORLD

    order, names = list(found.grid.sizes), axis.split("+")
    return axis == WORLD, order.index(names[0]) if axis != WORLD else 0, len(names)


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.0f}"


def _sent(trace: "Trace", axis: str) -> str:
    from ingot.rehearse.dryrun.rendezvous import ISEND, MESSAGES, SEND
    from ingot.units import format_bytes

    counts = trace.counts.get(axis, {})
    collectives = sum(n for op, n in counts.items() if op not in MESSAGES)
    sends = sum(counts.get(op, 0) for op in (SEND, ISEND))
    return f"{format_bytes(trace.sent.get(axis, 0))} ({collectives or f'{sends} sends'})"


def _verdicts(found: "DryRun", terminal: Terminal) -> None:
    world, wrong = found.world, [c for c in found.compared if not c.agrees]
    if world is None:
        _show_missing(found, terminal)
    elif world.fault:
        terminal.say(terminal.style(f"\nCollectives: {world.fault.kind}", "red"))
        terminal.say("\n".join(f"  {line}" for line in world.fault.message.splitlines()))
    else:
        calls = sum(len(trace.calls) for trace in found.traces)
        terminal.say(f"\nCollectives: {calls:,} calls of {len(found.traces)} ranks match; no mismatch, no deadlock.")
    _show_streams(found, terminal)
    if world and not world.alike:
        terminal.say(f"First and last ranks differ, so {world.followed} corners of the mesh were traced.")
    names = {trace.rank: trace.name for trace in found.traces}
    for c in wrong:
        terminal.say(
            f"{names[c.rank]}: {c.what}: traced {c.traced:.4g}, by formula {c.formula:.4g} ({c.deviation:.1%})"
        )
    if wrong:
        _blame_declared(found, terminal)
    _other_loads(found, names, terminal)
    if not wrong:
        worst = max((c.deviation for c in found.compared if not c.other_loads), default=0.0)
        terminal.say(f"Work and traffic agree with the formulas of the planner within {max(worst, 1e-4):.2%}.")


def _show_streams(found: "DryRun", terminal: Terminal) -> None:
    """Print the communicators of the rank with the most streams, and whether an order of queues can lock the ranks."""
    from ingot.rehearse.dryrun.communicators import MOST_QUEUES, QUEUES_VARIABLE

    if (streams := found.streams) is None:
        return
    own = streams.communicators[streams.widest]
    name = next(trace.name for trace in found.traces if trace.rank == streams.widest)
    used = sum(bool(one.calls) for one in own)
    terminal.say(
        f"\nCommunicators of {name}, {used} of {len(own)} used in a step; with the stream that computes, the step has"
        f" {streams.most} streams:"
    )
    rows = [
        [one.axes, one.purpose, f"{one.ranks:,}", ", ".join(f"{n:,} {op}" for op, n in one.calls.items()) or "none"]
        for one in own
    ]
    terminal.table(rows, ("axis", "purpose", "ranks", "calls in a step"), right=(2,))
    if streams.stuck is not None:
        terminal.say(terminal.style("Streams: ranks that wait for each other, with one hardware queue", "red"))
        terminal.say("\n".join(f"  {line}" for line in streams.stuck.circle))
    else:
        terminal.say(
            "Streams: no order of hardware queues can lock the ranks. Exchanges that a device must run side by side:"
            f" {streams.room} with one queue, at most {streams.enough} with any."
        )
    if streams.shared or streams.stuck is not None:
        terminal.say(
            f"{streams.most} streams on {streams.queues} hardware queues: those that share one wait for each other."
            f" Set {QUEUES_VARIABLE}={min(streams.most, MOST_QUEUES)} in the environment of the ranks."
        )


def _show_missing(found: "DryRun", terminal: Terminal) -> None:
    ranks = len(found.traces) + len(found.missing)
    terminal.say(
        terminal.style(f"\nNot finished: {len(found.missing)} of {ranks} ranks were not traced in time.", "red")
    )
    terminal.say("Without them, collectives are not checked. What is traced is kept: the same command goes on there.")
    terminal.say("If it makes no progress again, give it a longer --patience.")


def _other_loads(found: "DryRun", names: dict[int, str], terminal: Terminal) -> None:
    """Print the work and traffic that differ with the given expert loads from those with equal loads."""
    changed = [c for c in found.compared if c.other_loads and c.formula]
    if changed:
        terminal.say("\nWith these expert loads, compared with equal loads:")
        rows = [[names[c.rank], c.what, f"{c.traced:.4g}", f"{c.traced / c.formula:.2f} times"] for c in changed]
        terminal.table(rows, ("rank", "what", "traced", "of balanced"), right=(2, 3))
