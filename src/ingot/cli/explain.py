"""`ingot explain TOPIC`: the formulas behind a plan, with their numbers, or why a run is slow."""

import argparse
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "why a run is slow, from its event log; or the formulas behind a plan, with their numbers"
EXAMPLES = (
    "ingot explain slow runs/demo",
    "ingot explain mem run.toml",
    "ingot explain comms --model llama3-8b --tokens 1.5T --cluster 128x8xh100",
)
TOPICS = {
    "mem": "memory of a rank, by kind, pipeline rank and moment",
    "time": "where a step's time goes",
    "comms": "who sends how much over which links, and what a step waits for",
    "bubble": "what pipeline ranks wait for, and what other schedules would",
    "lr": "the learning rate and its schedule",
    "batch": "the global batch, and how it is divided",
    "size": "tokens and parameters: compute-optimal, over-trained, cheapest to serve",
    "failures": "failures, checkpoints, goodput, spares, reading and money of the whole run",
}


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="topic", required=True, metavar="TOPIC")
    text = "why a run is slow: measured against planned, causes by milliseconds per step, remedies"
    slow = verbs.add_parser("slow", help=text, description=text)
    slow.add_argument("run", type=Path, help="the run folder (made by ingot train); the run may still go on")
    slow.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="compare with this machine (default: the one that the run was planned for)",
    )
    for topic, text in TOPICS.items():
        _configure_topic(verbs.add_parser(topic, help=text, description=text))


def _configure_topic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN.toml", help="a run file; or describe a run instead:")
    parser.add_argument("--model", default="", metavar="PRESET|FILE", help="a model preset, or a TOML file with [arch]")
    parser.add_argument("--params", metavar="COUNT", help="instead of --model: a size, like 70b")
    parser.add_argument("--tokens", metavar="DIR|COUNT", help="a folder of tokens, or a count like 1.5T")
    parser.add_argument("--budget", metavar="AMOUNT", help="instead of --tokens: 6e23flop, $2M or 24h")
    parser.add_argument("--seq", type=int, default=0, metavar="T", help="sequence length in tokens")
    parser.add_argument("--batch", default=0, metavar="N", help="global batch")
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="8xh100, 128x8xh100, or a machine.json (default: ./machine.json, or this)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="with RUN.toml"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK

    if args.topic == "slow":
        _explain_slow(args, terminal)
    else:
        _explain_plan(args, terminal)
    return EXIT_OK


def _explain_plan(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.errors import UsageError
    from ingot.planner.request.planning import plan

    if bool(args.run) == bool(args.model or args.params or args.budget):
        raise UsageError(
            f"ingot explain {args.topic}: nothing to explain" if not args.run else f"{args.run} and another model",
            rule="a run file, or a model with its tokens",
            fix=f"ingot explain {args.topic} run.toml, or --model llama3-8b --tokens 1.5T --cluster 8xh100",
        )
    if args.overrides and not args.run:
        raise UsageError("--set without a run file", rule="it changes the values of a run file")
    planning = plan(
        args.model,
        params=args.params,
        run=args.run,
        overrides=args.overrides,
        cluster=args.cluster,
        tokens=args.tokens,
        budget=args.budget,
        seq=args.seq,
        batch=args.batch,
    )
    lines = planning.explain(args.topic)
    for line in lines:
        terminal.say(line)
    terminal.result({"topic": args.topic, "lines": lines})


def _explain_slow(args: argparse.Namespace, terminal: Terminal) -> None:
    import shlex
    from dataclasses import asdict

    from ingot.planner.request.clusters import find_cluster
    from ingot.report.diagnose.slow import explain_slow
    from ingot.schema.run_folder import RunFolder

    named = find_cluster(args.cluster) if args.cluster else None
    open_plan = not (named or RunFolder(args.run).plan.exists())
    found = explain_slow(args.run, named, unplanned=find_cluster(None, args.run) if open_plan else None)
    _show_step(found, terminal)
    _show_causes(found, terminal)
    for sentence in found.unknown:
        terminal.say(f"unknown   {sentence}")
    terminal.result(asdict(found) | {"planned_step_seconds": found.planned_step_seconds})
    overrides = next((r.overrides for c in found.causes for r in c.remedies if r.settings), [])
    change = "".join(f" --set {shlex.quote(override)}" for override in overrides)
    if found.running:
        terminal.next(f"ingot explain slow {args.run}")
    elif found.last_step < found.steps:
        terminal.next(f"ingot train {args.run}{change}")
    else:  # a finished run does not go on with other settings
        terminal.next(f"ingot report {args.run}")


def _show_step(found, terminal: Terminal) -> None:
    from ingot.units import format_seconds

    measured, planned = found.measured, found.planned_step_seconds
    state = "is running" if found.running else "is not running"
    terminal.say(f"{terminal.style(found.name, 'bold')}   {state}, step {found.last_step:,} of {found.steps:,}")
    line = f"step      {format_seconds(measured.step_seconds)} measured, mean of {measured.steps:,} steps"
    if planned:
        line += f"; {format_seconds(planned)} planned for {found.cluster}: {measured.step_seconds / planned:.2f} times"
    terminal.say(line)
    if planned:
        parts = sorted(found.planned_seconds.items(), key=lambda item: -item[1])
        terminal.say("planned   " + ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value))
    stops = measured.clock_seconds - measured.step_seconds
    first = f"; the first lines of attempts took {format_seconds(measured.first_seconds)} longer"
    terminal.say(
        f"clock     {format_seconds(measured.clock_seconds)} per step, of which {format_seconds(stops)} between steps"
        + (first if measured.first_seconds else "")
    )


def _show_causes(found, terminal: Terminal) -> None:
    from ingot.units import format_seconds

    if not found.causes:
        terminal.say("causes    none that takes 1% of a step")
        return
    terminal.say("causes    by time per step; they overlap, so they need not add up")
    for number, cause in enumerate(found.causes, 1):
        name, share = terminal.style(f"{cause.name:<20}", "bold"), cause.seconds / found.measured.clock_seconds
        told = f"{format_seconds(cause.seconds):>8} {share:>5.0%}  {cause.source}: {cause.evidence}"
        terminal.say(f"{number:>3}. {name} {told}")
        for remedy in cause.remedies:
            gain = "gain unknown" if remedy.seconds is None else f"saves {format_seconds(remedy.seconds)}"
            terminal.say(f"     -> {remedy.text}   {gain} ({remedy.reason})")
