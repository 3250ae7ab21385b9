"""`ingot explain TOPIC`: an error code, a slow run, or the formulas of a plan with their numbers."""

import argparse

from ingot.cli import explain_nan, explain_spike
from ingot.cli.arguments import count, path
from ingot.cli.options import add_budget, add_cluster, add_layout, add_overrides, pins_of
from ingot.cli.terminal import Terminal
from ingot.units import counted

EXAMPLES = (
    "ingot explain",
    "ingot explain E-RUN-FOLDER",
    "ingot explain E-",
    "ingot explain slow runs/demo",
    "ingot explain nan runs/demo",
    "ingot explain spike runs/demo",
    "ingot explain mem run.toml",
    "ingot explain comms --model llama3-8b --tokens 1.5T --cluster 128x8xh100",
    "ingot explain bubble --model llama3-8b --tokens 1.5T --cluster 8xh100 --pp 4 --schedule zb_h1",
)
_PLAN_TOPICS = {
    "mem": "memory of a rank, by kind, pipeline rank and phase",
    "time": "time of a step, by part",
    "comms": "bytes that ranks send over each kind of link, and the time that a step waits for them",
    "bubble": "idle time of pipeline ranks, under this schedule and others",
    "lr": "the learning rate and its schedule",
    "batch": "the global batch, and its division over ranks and micro-batches",
    "size": "tokens and parameters: compute-optimal, over-trained, cheapest to serve",
    "failures": "failures, checkpoints, goodput, spare nodes, data reading and cost of the whole run",
}
# The settings of the layout that a topic depends on most; `ingot plan --explain` takes all of them.
_DEGREES = ("tp", "pp", "cp", "ep", "dp_shard", "zero", "micro_batch", "recompute")
_LAYOUT_OF = {
    "mem": (*_DEGREES, "offload"),
    "time": _DEGREES,
    "comms": _DEGREES,
    "bubble": ("pp", "stages_per_rank", "micro_batch", "recompute", "schedule"),
}
TOPICS = {
    "slow": "why a run is slow: measured and planned step time, causes, each with its milliseconds per step, remedies",
    "nan": "why a run's loss or gradient was not finite: a replay from the checkpoint before finds the first operation",
    "spike": "which documents of the steps with a spike are unusual, compared with those of healthy steps",
    **_PLAN_TOPICS,
    "code": "an error code: meaning, usual causes and fix (also: ingot explain E-CODE); E- lists all codes",
    "topics": "list the topics (also: ingot explain)",
}


def normalize(arguments: list[str]) -> list[str]:
    """Return the arguments with the topic inserted: "E-CODE" becomes "code E-CODE"; without words, it is "topics"."""
    words = [word for word in arguments if not word.startswith("-")]
    if words and words[0].upper().startswith("E-"):
        return ["code", *arguments]
    return arguments if words or {"-h", "--help"} & {*arguments} else ["topics", *arguments]


def configure(parser: argparse.ArgumentParser) -> None:
    topics = parser.add_subparsers(dest="topic", required=True, metavar="TOPIC")
    parsers = {topic: topics.add_parser(topic, help=text, description=text) for topic, text in TOPICS.items()}
    parsers["code"].add_argument("code", metavar="E-CODE", help="an error code; just E- lists all codes")
    parsers["slow"].add_argument("run", type=path, metavar="RUN", help="run folder; the run may still be training")
    add_cluster(parsers["slow"], "compare with this cluster", "the cluster of the run's plan")
    explain_nan.configure(parsers["nan"])
    explain_spike.configure(parsers["spike"])
    for topic in _PLAN_TOPICS:
        _configure_plan_topic(parsers[topic])
    for topic, names in _LAYOUT_OF.items():
        add_layout(parsers[topic], names)


def _configure_plan_topic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", type=path, metavar="RUN.toml", help="run file; if not given, use --model or --params"
    )
    parser.add_argument("--model", default="", metavar="PRESET|FILE", help="model preset, or TOML file with [arch]")
    parser.add_argument("--params", metavar="COUNT", help="dense model given only by its size, like 70b")
    add_budget(parser)
    parser.add_argument("--seq", type=count("seq", 1, 10**9), default=0, metavar="T", help="sequence length in tokens")
    parser.add_argument("--batch", default=0, metavar="N", help="global batch in sequences, or in tokens like 4M")
    add_cluster(parser)
    add_overrides(parser, "with RUN.toml: ")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK

    if args.topic == "topics":
        _list_topics(terminal)
    elif args.topic == "code":
        _explain_code(args.code.upper(), terminal)
    elif args.topic == "slow":
        _explain_slow(args, terminal)
    elif args.topic == "nan":
        explain_nan.run(args, terminal)
    elif args.topic == "spike":
        explain_spike.run(args, terminal)
    else:
        _explain_plan(args, terminal)
    return EXIT_OK


def _list_topics(terminal: Terminal) -> None:
    terminal.table(list(TOPICS.items()), ("topic", "explains"))
    terminal.result({"topics": TOPICS})
    terminal.next(
        "ingot explain TOPIC --help", "ingot explain E-CODE   (the code of an error message)", "ingot explain E-"
    )


def _explain_code(code: str, terminal: Terminal) -> None:
    import difflib

    from ingot.errors import UsageError, catalogs, describe

    if code == "E-":
        _list_codes(terminal)
        return
    entry = describe(code)
    if entry is None:
        known = [one for codes in catalogs().values() for one in codes]
        words = set(code.split("-")) - {"E"}
        near = [one for one in known if words <= set(one.split("-")) or one.startswith(code)]
        near += [one for one in difflib.get_close_matches(code, known, n=5) if one not in near]
        raise UsageError(
            "E-CODE-UNKNOWN",
            f"there is no error code {code}" + (f"; similar codes: {', '.join(near)}" if near else ""),
            rule="a code is the first word of an error message, like E-RUN-FOLDER",
            fix=f"run `ingot explain {near[0]}`" if near else "list all codes: ingot explain E-",
            given=code,
            similar=near,
        )
    terminal.say(f"{terminal.style(code, 'bold')}  {entry['meaning']}")
    for cause in entry["causes"]:
        terminal.say(f"  cause: {cause}")
    terminal.say(f"  fix:   {entry['fix']}")
    terminal.result({"code": code} | entry)


def _list_codes(terminal: Terminal) -> None:
    from ingot.errors import catalogs

    packages = catalogs()
    for package, codes in packages.items():
        terminal.say(terminal.style(package, "bold"))
        terminal.table([("  " + code, entry["meaning"]) for code, entry in codes.items()])
    terminal.result({"packages": packages})
    terminal.next("ingot explain E-CODE")


def _explain_plan(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.cli.options import set_without_run
    from ingot.errors import UsageError
    from ingot.planner.request.planning import plan

    if bool(args.run) == bool(args.model or args.params or args.budget):
        both = f"{args.run} is given together with --model, --params or --budget"
        raise UsageError(
            "E-EXPLAIN-SUBJECT",
            both if args.run else "neither a run file nor --model, --params or --budget is given",
            rule="a plan is explained for a run file, or for a model with its tokens",
            fix=f"ingot explain {args.topic} run.toml, or --model llama3-8b --tokens 1.5T --cluster 8xh100",
            topic=args.topic,
        )
    if args.overrides and not args.run:
        raise set_without_run(f"ingot explain {args.topic} run.toml --set {args.overrides[0]}")
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
        pinned=pins_of(args),
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
    else:  # a finished run does not continue
        terminal.next(f"ingot report {args.run}")


def _show_step(found, terminal: Terminal) -> None:
    from ingot.units import format_seconds

    measured, planned = found.measured, found.planned_step_seconds
    state = "is running" if found.running else "is not running"
    terminal.say(f"{terminal.style(found.name, 'bold')}   {state}, step {found.last_step:,} of {found.steps:,}")
    line = f"step      {format_seconds(measured.step_seconds)} measured, mean of {counted(measured.steps, 'step')}"
    if planned:
        line += f"; {format_seconds(planned)} planned for {found.cluster}: {measured.step_seconds / planned:.2f} times"
    terminal.say(line)
    if planned:
        parts = sorted(found.planned_seconds.items(), key=lambda item: -item[1])
        terminal.say("planned   " + ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value))
    stops = measured.clock_seconds - measured.step_seconds
    first = f"; the first log lines of attempts took {format_seconds(measured.first_seconds)} longer in total"
    terminal.say(
        f"clock     {format_seconds(measured.clock_seconds)} per step, of which {format_seconds(stops)} between steps"
        + (first if measured.first_seconds else "")
    )


def _show_causes(found, terminal: Terminal) -> None:
    from ingot.units import format_seconds

    if found.classes:
        shown = (f"{one.name} ({one.share:.0%} of a step, from {one.least:.0%} on)" for one in found.classes)
        terminal.say(f"class     {', '.join(shown)}")
    if not found.causes:
        terminal.say("causes    none takes 1% of a step or more")
        return
    terminal.say("causes    by time per step; they overlap, so they need not add up")
    for number, cause in enumerate(found.causes, 1):
        name, share = terminal.style(f"{cause.name:<20}", "bold"), cause.seconds / found.measured.clock_seconds
        figures = f"{format_seconds(cause.seconds):>8} {share:>5.0%}  {cause.source}: {cause.evidence}"
        terminal.say(f"{number:>3}. {name} {figures}")
        for remedy in cause.remedies:
            gain = "gain unknown" if remedy.seconds is None else f"saves {format_seconds(remedy.seconds)}"
            terminal.say(f"     -> {remedy.text}   {gain} ({remedy.reason})")
