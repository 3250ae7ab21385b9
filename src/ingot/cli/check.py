"""`ingot check RUN_FILE`: report all problems of a run file together, before anything starts."""

import argparse
import textwrap
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ingot.cli.arguments import path
from ingot.cli.check_dry_run import add_dry_run, show_dry_run
from ingot.cli.options import add_cluster, add_overrides
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.api.checking import CheckResult
    from ingot.planner.run.check import Finding

EXAMPLES = (
    "ingot check run.toml",
    "ingot check run.toml --set optim.lr=1e-3",
    "ingot check run.toml --json",
    "ingot check run.toml --cluster 128x8xh100 --simulate",
    "ingot check run.toml --proof",
    "ingot check run.toml --set parallel.pp=4 --timeline zb_v",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_file",
        type=path,
        nargs="?",
        default=Path("run.toml"),
        metavar="RUN",
        help="run file, or a folder with a run.toml (default: run.toml)",
    )
    add_overrides(parser)
    add_cluster(parser, "check for this cluster")
    parser.add_argument(
        "--timeline",
        nargs="?",
        const="",
        metavar="SCHEDULE",
        help="draw the pipeline of the run, under its own schedule or another one (zb_v, dualpipe, ...)",
    )
    parser.add_argument(
        "--proof",
        action="store_true",
        help="train a tiny version of the model, with its layers, optimizer and callbacks, on layouts of up to four "
        "processes, and compare with one process in float64 (half a minute to two minutes)",
    )
    add_dry_run(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    import shutil

    from ingot.api import checking

    checking.require_simulate(args.simulate, expert_load=args.expert_load, patience=args.patience)
    found = checking.examine(
        args.run_file,
        overrides=args.overrides,
        cluster=args.cluster,
        timeline=args.timeline,
        anywhere=args.simulate,
        width=max(shutil.get_terminal_size((120, 24)).columns, 80),
    )
    _show(found, terminal)
    if args.simulate:
        problems = len(found.findings)
        found = checking.add_dry_run(
            found,
            expert_load=args.expert_load,
            patience=args.patience,
            say=terminal.say,
            progress=terminal.progress,
        )
        for finding in found.findings[problems:]:
            _show_finding(finding, terminal)
        if found.simulated:
            show_dry_run(found.simulated, terminal)
        elif not found.config:
            terminal.say("Not simulated: correct the run file first.")
    if args.proof:
        found = _prove(found, terminal)
    terminal.result(found.facts())
    summary = ", ".join(f"{n} {kind}{'s' if n != 1 else ''}" for kind, n in found.counts.items() if n)
    terminal.say(f"{summary}. Nothing was started." if summary else f"{found.run_file}: no problem found")
    if found.ok and not found.counts["note"]:
        terminal.next(" ".join(["ingot train", str(found.run_file), *(f"--set {quote(o)}" for o in args.overrides)]))
    return found.exit_code


def _prove(found: "CheckResult", terminal: Terminal) -> "CheckResult":
    from ingot.api import checking

    if not found.config:
        terminal.say("Not proven: correct the run file first.")
        return found
    terminal.say("Layouts against one process, tiny model, float64:")
    problems = len(found.findings)
    found = checking.add_proof(found, terminal.say)
    if found.proof and found.proof.ok:
        terminal.say(f"All {len(found.proof.compared)} layouts are equal to one process.")
    for finding in found.findings[problems:]:
        _show_finding(finding, terminal)
    return found


def _show(found: "CheckResult", terminal: Terminal) -> None:
    """Print whether and how well the run works on the cluster, then its problems, notes and pipeline."""
    from ingot.planner.show.feasibility import feasibility_lines

    if found.config and found.predicted:
        terminal.say(f"{terminal.style(found.config.name, 'bold')} on {found.cluster.name}, as predicted:")
        for line in feasibility_lines(found.predicted):
            terminal.say(line)
        terminal.say()
    for finding in found.findings:
        _show_finding(finding, terminal)
    for name, text in found.notes.items():
        first, *more = textwrap.wrap(text, 108, break_long_words=False)
        terminal.say(f"{name:<9} {first}")
        for line in more:
            terminal.say(f"{'':<9} {line}")
    for line in found.timeline or ():
        terminal.say(line)


def _show_finding(finding: "Finding", terminal: Terminal) -> None:
    mark = terminal.style(f"{finding.severity:<7}", "red" if finding.severity == "error" else "yellow")
    terminal.say(f"{mark}  {finding.where}: {finding.message}" if finding.where else f"{mark}  {finding.message}")
    if finding.fix:
        terminal.say(f"{'':<9}fix: {finding.fix}")
    if finding.code:
        terminal.say(f"{'':<9}more: ingot explain {finding.code}")
