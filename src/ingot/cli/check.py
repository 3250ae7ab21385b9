"""`ingot check RUN_FILE`: report all problems of a run file together, before anything starts."""

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ingot.cli.arguments import path
from ingot.cli.options import add_cluster, add_overrides
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.planner.run.check import Finding
    from ingot.rehearse.dryrun.dry_run import DryRun, Trace
    from ingot.schema.cluster import Cluster

_BALANCED = "balanced"
EXAMPLES = (
    "ingot check run.toml",
    "ingot check run.toml --set optim.lr=1e-3",
    "ingot check run.toml --json",
    "ingot check run.toml --cluster 128x8xh100 --simulate",
    "ingot check run.toml --set parallel.pp=4 --timeline zb_v",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=path, nargs="?", default=Path("run.toml"), help="run file (default: run.toml)")
    add_overrides(parser)
    add_cluster(parser, "check for this cluster")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="dry run: trace memory, traffic and collectives of every rank, without the cluster's devices; missing data"
        " and disk space are then reported, but do not change the exit code",
    )
    parser.add_argument(
        "--expert-load",
        metavar="balanced|FILE",
        default=_BALANCED,
        help="with --simulate: the load of each expert, a JSON list of numbers (default: balanced, equal loads)",
    )
    parser.add_argument(
        "--timeline",
        nargs="?",
        const="",
        metavar="SCHEDULE",
        help="draw the pipeline of the run, under its own schedule or another one (zb_v, dualpipe, ...)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.errors import EXIT_OK, ConfigError
    from ingot.machine.facts import usable_cores
    from ingot.planner.request.clusters import find_cluster
    from ingot.planner.run.check import check_run

    if args.expert_load != _BALANCED and not args.simulate:
        raise ConfigError(
            "E-EXPERT-LOAD-ALONE",
            "--expert-load is given without --simulate",
            rule="--expert-load is a setting of the dry run",
            fix="add --simulate, or remove --expert-load",
        )
    cluster = find_cluster(args.cluster, args.run_file.parent)
    cores = usable_cores()
    findings = check_run(args.run_file, cluster, cores=cores, overrides=tuple(args.overrides))
    findings += _init_problems(args)
    for finding in findings:
        _show_finding(finding, terminal)
    notes = _notes(args, cluster)
    _show_notes(notes.items(), terminal)
    facts: dict = {"notes": notes}
    faulty = False
    if args.timeline is not None:
        facts["timeline"] = _timeline(args, cluster)
        for line in facts["timeline"]:
            terminal.say(line)
    if args.simulate:
        problem, simulated = _simulate(args, cluster.device, terminal)
        if problem is not None:
            findings.append(problem)
            _show_finding(problem, terminal)
        elif simulated is not None:
            facts["simulated"], faulty = _dry_run_facts(simulated), simulated.problems
            _show_dry_run(simulated, terminal)
        else:
            terminal.say("Not simulated: correct the run file first.")
    errors = sum(f.severity == "error" for f in findings)
    # A dry run needs neither data nor disk space.
    wrong = faulty or any(f.severity == "error" and not (args.simulate and f.missing_here) for f in findings)
    facts |= {"errors": errors, "findings": [asdict(f) for f in findings]}
    if wrong:
        facts |= {"error": "E-CHECK-FAILED", "kind": ConfigError.kind, "exit_code": ConfigError.exit_code}
    terminal.result(facts)
    counts = ((errors, "error"), (len(findings) - errors, "warning"))
    summary = ", ".join(f"{n} {kind}{'s' if n != 1 else ''}" for n, kind in counts if n)
    terminal.say(f"{summary}. Nothing was started." if findings else f"{args.run_file}: no problem found")
    if wrong:
        return ConfigError.exit_code
    if not errors:
        terminal.next(" ".join(["ingot train", str(args.run_file), *(f"--set {quote(o)}" for o in args.overrides)]))
    return EXIT_OK


def _show_finding(finding: "Finding", terminal: Terminal) -> None:
    mark = terminal.style(f"{finding.severity:<7}", "red" if finding.severity == "error" else "yellow")
    terminal.say(f"{mark}  {finding.where}: {finding.message}" if finding.where else f"{mark}  {finding.message}")
    if finding.fix:
        terminal.say(f"{'':<9}fix: {finding.fix}")


def _init_problems(args: argparse.Namespace) -> "list[Finding]":
    """Return a finding if the run cannot start from the model in `init`; [] if it can, or if the run file has problems,
    which are reported already."""
    from ingot.errors import ConfigError
    from ingot.hub.config_file import require_fit
    from ingot.planner.run.check import Finding
    from ingot.theory.rules import load_run
    from ingot.toml import key_lines

    try:
        config = load_run(args.run_file, tuple(args.overrides))
    except ConfigError:
        return []
    folder = args.run_file.parent / config.init
    try:
        if config.init:
            require_fit(folder, config.model)
    except ConfigError as error:
        given = any(override.partition("=")[0].strip() == "init" for override in args.overrides)
        where = "--set init" if given else f"{args.run_file}:{key_lines(args.run_file.read_text()).get('init', '')}"
        return [Finding("error", where, error.found, error.fix, missing_here=not folder.is_dir())]
    return []


def _notes(args: argparse.Namespace, cluster: "Cluster") -> dict[str, str]:
    """Return the notes on experts and context parallelism, by name; {} if the run file has problems."""
    from ingot.errors import ConfigError
    from ingot.planner.run.advice import notes
    from ingot.theory.layout import require_layout
    from ingot.theory.rules import load_run

    try:
        config = load_run(args.run_file, tuple(args.overrides))
        require_layout(config)
    except ConfigError:
        return {}
    return dict(notes(config, cluster))


def _show_notes(notes: Iterable[tuple[str, str]], terminal: Terminal) -> None:
    for name, text in notes:
        first, *more = textwrap.wrap(text, 108, break_long_words=False)
        terminal.say(f"{name:<9} {first}")
        for line in more:
            terminal.say(f"{'':<9} {line}")


def _timeline(args: argparse.Namespace, cluster: "Cluster") -> list[str]:
    """Return the lines of the pipeline's drawing; [] if the run file has problems. Raises ConfigError if the run has
    no pipeline."""
    import shutil

    from ingot.errors import ConfigError
    from ingot.planner.show.explain import timeline_lines
    from ingot.theory.layout import require_layout
    from ingot.theory.rules import load_run

    try:
        config = load_run(args.run_file, tuple(args.overrides))
        require_layout(config)
    except ConfigError:
        return []
    width = max(shutil.get_terminal_size((120, 24)).columns, 80)
    return timeline_lines(config, cluster, args.timeline, width)


def _simulate(args: argparse.Namespace, device: str, terminal: Terminal) -> tuple["Finding | None", "DryRun | None"]:
    """Return (None, dry run), or (the finding why it failed, None), or (None, None) if the run file has problems."""
    from ingot.errors import ConfigError, IngotError, require
    from ingot.planner.run.check import Finding
    from ingot.rehearse.dryrun.dry_run import simulate
    from ingot.rehearse.dryrun.expert_load import read_loads
    from ingot.theory.layout import require_layout
    from ingot.theory.rules import load_run

    require("torch", "train")
    try:
        config = load_run(args.run_file, tuple(args.overrides))
        require_layout(config)
    except ConfigError:
        return None, None
    wanted = config.train.device
    device = device if wanted == "auto" else wanted

    def progress(done: int, ranks: int) -> None:
        terminal.progress(done / ranks, f"traced {done} of {ranks} ranks")

    try:
        loads = () if args.expert_load == _BALANCED else read_loads(Path(args.expert_load), config.model)
        return None, simulate(config, device=device, loads=loads, progress=progress)
    except IngotError as error:
        return Finding("error", "--simulate", error.found, error.fix), None


_KINDS = ("parameters", "optimizer", "gradients", "activations", "communication", "logits", "backward", "other", "host")


def _show_dry_run(found: "DryRun", terminal: Terminal) -> None:
    from ingot.rehearse.dryrun.dry_run import MOMENTS, STEADY
    from ingot.units import format_bytes

    first = [trace for trace in found.traces if trace.rank == found.bases[trace.position]]
    terminal.say(
        f"\n{found.grid.world_size:,} ranks, of which {len(found.traces)} were traced. Memory of tensors at the peak,"
        " by phase (planner: the prediction of `ingot plan`):"
    )
    rows = [
        [t.name, *(format_bytes(t.moments[m].bytes) for m in MOMENTS), format_bytes(found.bills[t.position])]
        for t in first
    ]
    terminal.table(rows, ("rank", *MOMENTS, "planner"), right=range(1, len(MOMENTS) + 2))
    _show_over_bill(found, terminal)
    terminal.say("\nPeak of the steady step, by kind of memory, and the place where it is reached:")
    kinds = [kind for kind in _KINDS if any(t.moments[STEADY].by_kind.get(kind) for t in first)]
    rows = [
        [t.name, *(format_bytes(t.moments[STEADY].by_kind.get(kind, 0)) for kind in kinds), t.moments[STEADY].place]
        for t in first
    ]
    terminal.table(rows, ("rank", *kinds, "at"), right=range(1, len(kinds) + 1))
    terminal.say(
        "\nOne optimizer step, per rank: work (computed includes recomputation), collectives and bytes sent by axis:"
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
        terminal.say("The overlap of parallel.async_tp is not traced: collectives are shown as if there were none.")
    _verdicts(found, terminal)


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
    calls = f"{collectives} calls" if collectives else f"{sends} sends"
    return f"{calls}, {format_bytes(trace.sent.get(axis, 0))}"


def _verdicts(found: "DryRun", terminal: Terminal) -> None:
    world, wrong = found.world, [c for c in found.compared if not c.agrees]
    if world.fault:
        terminal.say(terminal.style(f"\nCollectives: {world.fault.kind}", "red"))
        terminal.say("\n".join(f"  {line}" for line in world.fault.message.splitlines()))
    else:
        calls = sum(len(trace.calls) for trace in found.traces)
        terminal.say(f"\nCollectives: {calls:,} calls of {len(found.traces)} ranks match; no mismatch, no deadlock.")
    if not world.alike:
        terminal.say(f"First and last ranks differ, so {world.followed} corners of the mesh were traced.")
    names = {trace.rank: trace.name for trace in found.traces}
    for c in wrong:
        terminal.say(
            f"{names[c.rank]}: {c.what}: traced {c.traced:.4g}, by formula {c.formula:.4g} ({c.deviation:.1%})"
        )
    _other_loads(found, names, terminal)
    if not wrong:
        worst = max((c.deviation for c in found.compared if not c.other_loads), default=0.0)
        terminal.say(f"Work and traffic agree with the formulas of the planner within {max(worst, 1e-4):.2%}.")


def _other_loads(found: "DryRun", names: dict[int, str], terminal: Terminal) -> None:
    """Print the work and traffic that differ with the given expert loads from those with equal loads."""
    changed = [c for c in found.compared if c.other_loads and c.formula]
    if changed:
        terminal.say("\nWith these expert loads, compared with equal loads:")
        rows = [[names[c.rank], c.what, f"{c.traced:.4g}", f"{c.traced / c.formula:.2f} times"] for c in changed]
        terminal.table(rows, ("rank", "what", "traced", "of balanced"), right=(2, 3))


def _dry_run_facts(found: "DryRun") -> dict:
    """Return the dry run as JSON values."""
    from dataclasses import asdict, replace

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
