"""`ingot check RUN_FILE`: every problem at once, before anything starts."""

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.planner.run.check import Finding
    from ingot.rehearse.dryrun.dry_run import DryRun
    from ingot.schema.cluster import Cluster

HELP = "every problem of a run file at once, with file and line; starts nothing"
BALANCED = "balanced"
EXAMPLES = (
    "ingot check run.toml",
    "ingot check run.toml --set optim.lr=1e-3",
    "ingot check run.toml --json",
    "ingot check run.toml --cluster 128x8xh100 --simulate",
    "ingot check run.toml --set parallel.pp=4 --timeline zb_v",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=Path, nargs="?", default=Path("run.toml"), help="run file (default: run.toml)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change one value; repeatable"
    )
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", help="check for 8xh100, 128x8xh100 or a machine.json (default: this machine)"
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="dry run: trace what every rank of the job would do, without its devices: memory, traffic, collectives. "
        "Then data and disk space that are not here are told, but do not count for the exit code",
    )
    parser.add_argument(
        "--expert-load",
        metavar="balanced|FILE",
        default=BALANCED,
        help="with --simulate, the load of each expert: all alike (default), or a JSON list of numbers",
    )
    parser.add_argument(
        "--timeline",
        nargs="?",
        const="",
        metavar="SCHEDULE",
        help="draw the run's pipeline, or how it would look under another schedule (zb_v, dualpipe, ...)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.errors import EXIT_OK, ConfigError
    from ingot.machine.facts import usable_cores
    from ingot.planner.request.clusters import find_cluster
    from ingot.planner.run.check import check_run

    if args.expert_load != BALANCED and not args.simulate:
        raise ConfigError(
            "--expert-load without --simulate", rule="it tells a dry run", fix="add --simulate, or leave it"
        )
    cluster = find_cluster(args.cluster, args.run_file.parent)
    cores = usable_cores()
    findings = check_run(args.run_file, cluster, cores=cores, overrides=tuple(args.overrides))
    findings += _init_problem(args)
    for finding in findings:
        _say(finding, terminal)
    said = _notes(args, cluster)
    show_notes(said.items(), terminal)
    facts, faulty = {"notes": said}, False
    if args.simulate:
        problem, simulated = _simulate(args, cluster.device, terminal)
        if problem is not None:
            findings.append(problem)
            _say(problem, terminal)
        elif simulated is not None:
            from ingot.cli.simulated import facts as facts_of
            from ingot.cli.simulated import show

            facts["simulated"], faulty = facts_of(simulated), simulated.problems
            show(simulated, terminal)
        else:
            terminal.say("Not simulated: the run file has to hold together first.")
    errors = sum(f.severity == "error" for f in findings)
    # A dry run needs neither data nor disk.
    wrong = faulty or any(f.severity == "error" and not (args.simulate and f.missing_here) for f in findings)
    facts |= {"errors": errors, "findings": [asdict(f) for f in findings]}
    if wrong:
        facts |= {"error": ConfigError.kind, "exit_code": ConfigError.exit_code}
    terminal.result(facts)
    counts = ((errors, "error"), (len(findings) - errors, "warning"))
    summary = ", ".join(f"{n} {what}{'s' if n != 1 else ''}" for n, what in counts if n)
    terminal.say(f"{summary}. Nothing was started." if findings else f"{args.run_file}: no problem found")
    if wrong:
        return ConfigError.exit_code
    if not errors:
        terminal.next(" ".join(["ingot train", str(args.run_file), *(f"--set {quote(o)}" for o in args.overrides)]))
    return EXIT_OK


def _say(finding: "Finding", terminal: Terminal) -> None:
    mark = terminal.style(f"{finding.severity:<7}", "red" if finding.severity == "error" else "yellow")
    terminal.say(f"{mark}  {finding.where}: {finding.message}" if finding.where else f"{mark}  {finding.message}")
    if finding.fix:
        terminal.say(f"{'':<9}fix: {finding.fix}")


def _init_problem(args: argparse.Namespace) -> "list[Finding]":
    """Why the run cannot begin with the model in `init`; nothing of a faulty run file, which has been told."""
    from ingot.config import key_lines
    from ingot.errors import ConfigError
    from ingot.hub.config_file import require_fit
    from ingot.planner.run.check import Finding
    from ingot.theory.rules import load_run

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
    """What experts and context parallelism come to; nothing of a run file with a problem, which has been told."""
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


def show_notes(notes: Iterable[tuple[str, str]], terminal: Terminal) -> None:
    for name, text in notes:
        first, *more = textwrap.wrap(text, 108, break_long_words=False)
        terminal.say(f"{name:<9} {first}")
        for line in more:
            terminal.say(f"{'':<9} {line}")


def _simulate(args: argparse.Namespace, device: str, terminal: Terminal) -> tuple["Finding | None", "DryRun | None"]:
    """The dry run, or why there is none; neither if the run file does not hold together, which has been told."""
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
        loads = () if args.expert_load == BALANCED else read_loads(Path(args.expert_load), config.model)
        return None, simulate(config, device=device, loads=loads, progress=progress)
    except IngotError as error:
        return Finding("error", "--simulate", error.found, error.fix), None
