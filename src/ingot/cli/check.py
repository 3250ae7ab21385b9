"""`ingot check RUN_FILE`: every problem at once, before anything starts."""

import argparse
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "every problem of a run file at once, with file and line; starts nothing"
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
        help="dry run: trace what every rank of the job would do, without its devices: memory, traffic, collectives",
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
    from ingot.planner.check import check_run
    from ingot.recipes.clusters import find_cluster

    cluster = find_cluster(args.cluster, args.run_file.parent)
    cores = usable_cores()
    findings = check_run(args.run_file, cluster, cores=cores, overrides=tuple(args.overrides))
    errors = sum(f.severity == "error" for f in findings)
    for finding in findings:
        mark = terminal.style(f"{finding.severity:<7}", "red" if finding.severity == "error" else "yellow")
        terminal.say(f"{mark}  {finding.where}: {finding.message}" if finding.where else f"{mark}  {finding.message}")
        if finding.fix:
            terminal.say(f"{'':<9}fix: {finding.fix}")
    facts = {"errors": errors, "findings": [asdict(f) for f in findings]}
    if errors:
        facts |= {"error": ConfigError.code, "exit_code": ConfigError.exit_code}
    if args.timeline is not None:
        facts["timeline"] = _timeline(args, cluster)
        for line in facts["timeline"]:
            terminal.say(line)
    simulated = _simulate(args, cluster.device, terminal) if args.simulate else None
    if simulated is not None:
        from ingot.cli.simulated import facts as facts_of
        from ingot.cli.simulated import show

        facts["simulated"] = facts_of(simulated)
        show(simulated, terminal)
    terminal.result(facts)
    counts = ((errors, "error"), (len(findings) - errors, "warning"))
    summary = ", ".join(f"{n} {what}{'s' if n != 1 else ''}" for n, what in counts if n)
    terminal.say(f"{summary}. Nothing was started." if findings else f"{args.run_file}: no problem found")
    if errors or (simulated is not None and simulated.problems):
        return ConfigError.exit_code
    terminal.next(f"ingot train {args.run_file}")
    return EXIT_OK


def _timeline(args: argparse.Namespace, cluster) -> list[str]:
    import shutil

    from ingot.config import load
    from ingot.planner.timeline import timeline_lines
    from ingot.schema.run import RunConfig

    width = max(shutil.get_terminal_size((120, 24)).columns, 80)
    return timeline_lines(load(RunConfig, args.run_file, tuple(args.overrides)), cluster, args.timeline, width)


def _simulate(args: argparse.Namespace, device: str, terminal: Terminal):
    """The dry run; it needs a run file that holds together, but neither data nor devices."""
    from ingot.config import load
    from ingot.errors import require
    from ingot.schema.run import RunConfig
    from ingot.train.dry_run import simulate

    require("torch", "train")
    config = load(RunConfig, args.run_file, tuple(args.overrides))
    wanted = config.train.device
    return simulate(
        config,
        device=device if wanted == "auto" else wanted,
        progress=lambda done, ranks: terminal.progress(done / ranks, f"traced {done} of {ranks} ranks"),
    )
