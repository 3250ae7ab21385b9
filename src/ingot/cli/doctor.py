"""`ingot doctor`: check whether this machine can train, measure its speed (--bench) or several machines (--nodes), or
import plug-ins (--plugins)."""

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cli.arguments import count, path
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    import signal

    from ingot.plugins.listing import ListedPlugin

EXAMPLES = (
    "ingot doctor",
    "ingot doctor --bench --out machine.json",
    "ingot doctor --json",
    "ingot doctor --plugins run.toml",
    "ingot doctor /shared/runs --nodes 4",
    "ingot doctor --plugins",
)

# If a fit deviates from its own timings by more than this, other programs disturbed the measurement.
_ROUGH = 0.15
_PROBE_SECONDS = 2.0  # of each measurement of a machine
_STYLE = {"ok": "green", "warn": "yellow", "fail": "red"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=path, default=Path(), help="folder for runs; its disk is checked (default: .)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--plugins",
        type=path,
        nargs="?",
        const=False,
        metavar="FILE",
        help="only import the plug-ins that a run file or recipe names, and list what they register; "
        "without FILE: list the short names of installed plug-ins, and import nothing",
    )
    what.add_argument(
        "--bench",
        action="store_true",
        help="time a training step for `ingot plan`: about 15 s, on a busy machine a minute or more",
    )
    what.add_argument(
        "--nodes",
        type=count("nodes", 1, 100_000),
        metavar="N",
        help="measure computation, memory, disk, clock and links of N machines against each other: give the same "
        "command on each, with a folder that all see",
    )
    parser.add_argument(
        "--ranks",
        type=count("ranks", 0, 10_000),
        default=0,
        metavar="N",
        help="training processes (default: one per GPU, or 2 on the CPU)",
    )
    parser.add_argument(
        "--out",
        type=path,
        default=Path("machine.json"),
        metavar="FILE",
        help="file for the result of --bench (default: machine.json)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    if args.nodes is not None:
        return _run_fleet(args, terminal)
    if args.plugins is None:
        return _run_checks(args, terminal)
    return _run_plugins(args.plugins or None, terminal)


def _run_fleet(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.config import to_dict
    from ingot.errors import EXIT_OK, UsageError, require
    from ingot.trainer.fleet.judge import UNITS, rate_text
    from ingot.trainer.fleet.probe import probe_command
    from ingot.trainer.interrupts import handlers
    from ingot.trainer.launch.doctor import check_fleet

    require("torch", "train")
    if not args.folder.is_dir():
        raise UsageError(
            "E-DOCTOR-FOLDER",
            f"{args.folder} is not a folder",
            rule="machines find each other in a folder that all of them see",
            fix="name one that exists on all of them, such as the folder of the runs",
            folder=str(args.folder),
        )
    command = probe_command(args.folder, _PROBE_SECONDS)
    with handlers(_interrupt):
        result = check_fleet(args.folder, args.nodes, command, _PROBE_SECONDS, terminal.say)
    unfit = {one.node for one in result.unfit}
    rows = [("", "machine", *UNITS, "clock")]
    for one in result.fleet:
        rates = one.rates | {"link": result.link(one.node)}
        shown = [rate_text(name, rates[name]) for name in UNITS]
        if args.nodes == 1:
            shown[list(UNITS).index("link")] = "none"
        status = terminal.style("bad", "red") if one.node in unfit else terminal.style("ok", "green")
        rows.append((status, one.node, *shown, f"{one.clock:+.2f} s"))
    terminal.table(rows)
    for one in result.unfit:
        terminal.say(f"{one.node}: {one.check}: {one.words}")
    terminal.result(to_dict(result))
    result.require_sound()
    return EXIT_OK


def _interrupt(number: "signal.Signals") -> None:
    """End the check at a signal, Ctrl-C or another one, by the way on which its files and processes are removed."""
    raise KeyboardInterrupt(f"the check of machines was ended by {number.name}")


def _run_plugins(file: Path | None, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.errors import EXIT_OK
    from ingot.plugins.listing import list_plugins, offered_plugins

    named = list_plugins(file) if file else []
    for plugin in named:
        _say_plugin(plugin, terminal)
    if file and not named:
        terminal.say(f"{file} names no plug-ins")
    offered = offered_plugins()
    if offered:
        terminal.say("installed plug-ins, by the short names for [plugins] modules:")
        terminal.table([(f"  {one.name}", one.module, f"{one.distribution} {one.version}".strip()) for one in offered])
    elif not file:
        terminal.say("no installed distribution offers plug-ins")
    terminal.result({"plugins": [asdict(one) for one in named], "installed": [asdict(one) for one in offered]})
    return EXIT_OK


def _say_plugin(plugin: "ListedPlugin", terminal: Terminal) -> None:
    terminal.say(terminal.style(plugin.name, "bold"))
    if plugin.module != plugin.name:
        terminal.say(f"  module   {plugin.module}")
    terminal.say(f"  file     {plugin.file}\n  code     {plugin.code}")
    if plugin.version:
        terminal.say(f"  version  {plugin.version}")
    for part in plugin.parts:
        chosen = "switched on" if part.key.startswith("[") else "chosen"
        terminal.say(f"  {part.kind} {part.name!r}, {chosen} by {part.key}")
        rows = [(f"    {s.name}", "required" if s.default is None else s.default, s.type) for s in part.settings]
        terminal.table(rows)
    if not plugin.parts:
        terminal.say("  registers nothing")
    terminal.say()


def _run_checks(args: argparse.Namespace, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.errors import EXIT_OK, ResourceError
    from ingot.machine.doctor import examine
    from ingot.machine.facts import read_machine, this_cluster
    from ingot.planner.request.clusters import with_published_rates

    machine = read_machine()
    checks = examine(machine, args.folder)
    rows = [(terminal.style(f"{c.status:<4}", _STYLE[c.status]), c.name, c.found) for c in checks]
    width = max(len(c.name) for c in checks)
    for (status, name, found), check in zip(rows, checks, strict=True):
        first, *more = textwrap.wrap(found, 80 - 8 - width, break_long_words=False) or [""]
        terminal.say("\n".join([f"{status}  {name:<{width}}  {first}", *(f"{'':<{8 + width}}{line}" for line in more)]))
        if check.fix:
            terminal.say(f"{'':<6}{'':<{width}}  fix: {check.fix}")
    failed = [c.name for c in checks if c.status == "fail"]
    facts: dict = {"machine": asdict(machine), "checks": [asdict(c) for c in checks]}
    if args.bench and not failed:
        facts["cluster"] = _bench(args, terminal, with_published_rates(this_cluster(machine, args.ranks)))
    terminal.result(facts)
    if failed:
        raise ResourceError(
            "E-MACHINE-UNFIT",
            f"this machine cannot train; failed checks: {', '.join(failed)}",
            rule="no check may fail; warnings are allowed",
            fix="follow the fix lines above, then run `ingot doctor` again",
            failed=failed,
        )
    terminal.next(*next_commands(any(c.name == "torch" and c.status == "ok" for c in checks), args))
    return EXIT_OK


def next_commands(torch: bool, args: argparse.Namespace) -> tuple[str, ...]:
    """Return the commands that can run next. torch: whether this machine has it."""
    if torch:
        return (f"ingot plan --cluster {args.out}" if args.bench else "ingot doctor --bench", "ingot quickstart")
    return (
        "pip install 'ingot[train]'   (torch, to train; without it:)",
        "ingot data build CRAWL.warc.gz --out data",
        "ingot plan --model llama3-8b --tokens 1.5T --cluster 8xh100",
        "ingot check run.toml --cluster 8xh100",
    )


def _bench(args: argparse.Namespace, terminal: Terminal, uncalibrated) -> dict:
    import time

    from ingot.errors import require
    from ingot.machine.facts import write_cluster
    from ingot.rehearse.calibrate.calibrate import calibrate
    from ingot.units import format_bytes, format_flops, format_seconds

    require("torch", "train")
    terminal.say(f"timing the trainer's step on {uncalibrated.devices} x {uncalibrated.device} ...")
    began = time.monotonic()
    cluster = calibrate(uncalibrated)
    write_cluster(args.out, cluster)
    for dtype, rate in cluster.peak_flops.items():
        terminal.say(f"  matrix products   {format_flops(rate * cluster.matmul_efficiency)}/s per rank in {dtype}")
    terminal.say(f"  memory traffic    {format_bytes(cluster.memory_bandwidth)}/s per rank")
    terminal.say(f"  one operation     {cluster.op_seconds * 1e6:.1f} µs")
    if cluster.measured and cluster.link_seconds:
        link = f"{format_bytes(cluster.link_bandwidth)}/s, {format_seconds(cluster.link_seconds)} latency"
        terminal.say(f"  collectives       {link}")
    terminal.say(f"  an idle process   {format_bytes(cluster.runtime_bytes)}")
    if cluster.resolution:
        terminal.say(f"  fit of timings    within {cluster.resolution:.0%} on average")
    if cluster.resolution > _ROUGH:
        terminal.say("  the timings vary too much: measure again when the machine is idle")
    terminal.say(f"wrote {args.out} after {format_seconds(time.monotonic() - began)}")
    from ingot.config import to_dict

    return to_dict(cluster)
