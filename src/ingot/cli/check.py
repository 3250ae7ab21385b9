"""`ingot check RUN_FILE`: report all problems of a run file together, before anything starts."""

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ingot.cli.arguments import path
from ingot.cli.check_dry_run import add_dry_run, dry_run, dry_run_facts, require_simulate, show_dry_run
from ingot.cli.options import add_cluster, add_overrides
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.planner.run.check import Finding
    from ingot.rehearse.dryrun.dry_run import DryRun
    from ingot.schema.cluster import Cluster
    from ingot.schema.run import RunConfig

EXAMPLES = (
    "ingot check run.toml",
    "ingot check run.toml --set optim.lr=1e-3",
    "ingot check run.toml --json",
    "ingot check run.toml --cluster 128x8xh100 --simulate",
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
    add_dry_run(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.errors import EXIT_OK, ConfigError
    from ingot.machine.facts import usable_cores
    from ingot.planner.request.clusters import find_cluster
    from ingot.planner.run.check import check_run

    require_simulate(args)
    names_folder = not args.run_file.is_dir()  # a run in a folder that is given needs no other
    if args.run_file.is_dir():
        args.run_file /= "run.toml"
    folder = args.run_file.parent
    cluster = find_cluster(args.cluster, folder)
    # A dry run needs neither data nor disk space, and nothing is known about those of another cluster.
    elsewhere = args.simulate or (args.cluster is not None and not _is_here(cluster, folder))
    config = _sound(args)
    facts: dict = _answer(config, cluster, terminal) if config else {}
    findings = check_run(args.run_file, cluster, cores=usable_cores(), overrides=tuple(args.overrides))
    findings += [*(_name_problems(args, config) if names_folder else ()), *_init_problems(args, config)]
    findings = [found.as_note() if elsewhere and found.missing_here else found for found in findings]
    for finding in findings:
        _show_finding(finding, terminal)
    facts["notes"] = _notes(config, cluster) if config else {}
    _show_notes(facts["notes"].items(), terminal)
    if args.timeline is not None:
        facts["timeline"] = _timeline(config, cluster, args.timeline) if config else []
        for line in facts["timeline"]:
            terminal.say(line)
    failed = ""
    if args.simulate:
        problem, simulated = _simulate(args, config, cluster.device, terminal) if config else (None, None)
        if problem is not None:
            findings.append(problem)
            _show_finding(problem, terminal)
        elif simulated is not None:
            facts["simulated"] = dry_run_facts(simulated)
            show_dry_run(simulated, terminal)
            failed = "E-CHECK-FAILED" if simulated.problems else "E-DRYRUN-PATIENCE" if simulated.missing else ""
        else:
            terminal.say("Not simulated: correct the run file first.")
    counts = {kind: sum(f.severity == kind for f in findings) for kind in ("error", "warning", "note")}
    failed = "E-CHECK-FAILED" if counts["error"] else failed
    facts |= {"errors": counts["error"], "findings": [asdict(f) for f in findings]}
    if failed:
        facts |= {"error": failed, "kind": ConfigError.kind, "exit_code": ConfigError.exit_code}
    terminal.result(facts)
    summary = ", ".join(f"{n} {kind}{'s' if n != 1 else ''}" for kind, n in counts.items() if n)
    terminal.say(f"{summary}. Nothing was started." if findings else f"{args.run_file}: no problem found")
    if failed:
        return ConfigError.exit_code
    if counts["note"]:
        return EXIT_OK
    terminal.next(" ".join(["ingot train", str(args.run_file), *(f"--set {quote(o)}" for o in args.overrides)]))
    return EXIT_OK


def _is_here(cluster: "Cluster", folder: Path) -> bool:
    """Return True if the cluster has the number and kind of devices of this machine."""
    from ingot.errors import IngotError
    from ingot.planner.request.clusters import find_cluster

    try:
        here = find_cluster(None, folder)
    except IngotError:  # an unreadable machine.json
        return False
    return all(getattr(cluster, f) == getattr(here, f) for f in ("device", "nodes", "devices_per_node", "device_name"))


def _sound(args: argparse.Namespace) -> "RunConfig | None":
    """Return the run if its file is valid and its layout legal; None if it has problems, which `check_run` reports."""
    from ingot.errors import ConfigError
    from ingot.theory.layout import require_layout
    from ingot.theory.rules import load_run

    try:
        config = load_run(args.run_file, tuple(args.overrides))
        require_layout(config)
    except ConfigError:
        return None
    return config


def _answer(config: "RunConfig", cluster: "Cluster", terminal: Terminal) -> dict:
    """Print whether and how well the run works on the cluster, as predicted, and return it for JSON."""
    from ingot.planner.run.feasibility import feasibility
    from ingot.planner.show.feasibility import feasibility_lines

    found = feasibility(config, cluster)
    terminal.say(f"{terminal.style(config.name, 'bold')} on {cluster.name}, as predicted:")
    for line in feasibility_lines(found):
        terminal.say(line)
    terminal.say()
    return {"predicted": found.facts()}


def _show_finding(finding: "Finding", terminal: Terminal) -> None:
    mark = terminal.style(f"{finding.severity:<7}", "red" if finding.severity == "error" else "yellow")
    terminal.say(f"{mark}  {finding.where}: {finding.message}" if finding.where else f"{mark}  {finding.message}")
    if finding.fix:
        terminal.say(f"{'':<9}fix: {finding.fix}")
    if finding.code:
        terminal.say(f"{'':<9}more: ingot explain {finding.code}")


def _name_problems(args: argparse.Namespace, config: "RunConfig | None") -> "list[Finding]":
    """Return a finding if `ingot train` cannot make a run folder of the run's name. An existing run has its folder."""
    from ingot.planner.run.check import Finding
    from ingot.schema.run_folder import FOLDER_NAME_RULE, RunFolder, is_folder_name

    if config is None or is_folder_name(config.name) or RunFolder(args.run_file.parent).events.exists():
        return []
    message = f"name = {config.name!r} cannot be the name of a folder: {FOLDER_NAME_RULE}"
    fix = "change name, or choose the folder with ingot train --out DIR"
    return [Finding("error", _place(args, "name"), message, fix)]


def _place(args: argparse.Namespace, key: str) -> str:
    """Return where a setting is given: the option, or the line of the run file."""
    from ingot.toml import key_lines

    if any(override.partition("=")[0].strip() == key for override in args.overrides):
        return f"--set {key}"
    return f"{args.run_file}:{key_lines(args.run_file.read_text()).get(key, '')}"


def _init_problems(args: argparse.Namespace, config: "RunConfig | None") -> "list[Finding]":
    """Return a finding if the run cannot start from the model in `init`; [] if it can, or if the run file has problems,
    which are reported already."""
    from ingot.errors import ConfigError
    from ingot.hub.config_file import require_fit
    from ingot.planner.run.check import Finding

    if config is None or not config.init:
        return []
    folder = args.run_file.parent / config.init
    try:
        require_fit(folder, config.model)
    except ConfigError as error:
        return [Finding("error", _place(args, "init"), error.found, error.fix, missing_here=not folder.is_dir())]
    return []


def _notes(config: "RunConfig", cluster: "Cluster") -> dict[str, str]:
    """Return the notes on experts and context parallelism, by name."""
    from ingot.planner.run.advice import notes

    return dict(notes(config, cluster))


def _show_notes(notes: Iterable[tuple[str, str]], terminal: Terminal) -> None:
    for name, text in notes:
        first, *more = textwrap.wrap(text, 108, break_long_words=False)
        terminal.say(f"{name:<9} {first}")
        for line in more:
            terminal.say(f"{'':<9} {line}")


def _timeline(config: "RunConfig", cluster: "Cluster", schedule: str) -> list[str]:
    """Return the lines of the pipeline's drawing. Raises ConfigError if the run has no pipeline."""
    import shutil

    from ingot.planner.show.explain import timeline_lines

    width = max(shutil.get_terminal_size((120, 24)).columns, 80)
    return timeline_lines(config, cluster, schedule, width)


def _simulate(
    args: argparse.Namespace, config: "RunConfig", device: str, terminal: Terminal
) -> tuple["Finding | None", "DryRun | None"]:
    """Return (None, dry run), or (the finding why it failed, None)."""
    from ingot.errors import IngotError, MissingPartError
    from ingot.planner.run.check import Finding

    try:
        return None, dry_run(args, config, device, terminal)
    except MissingPartError:
        raise
    except IngotError as error:
        return Finding("error", "--simulate", error.found, error.fix), None
