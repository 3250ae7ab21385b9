"""`ingot plan`: the best layouts of a run with their memory, time and cost, and the run file for `ingot train`."""

import argparse
import textwrap
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ingot.cli import plan_web, serving
from ingot.cli.arguments import count, path
from ingot.cli.options import add_choices, add_subject, planning_of
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.planner.request.answer import PlanResult

EXAMPLES = (
    "ingot plan --model tiny --tokens data --out run.toml",
    "ingot plan --model llama3-8b --tokens 1.5T --cluster 8xh100",
    "ingot plan --params 70b --tokens 1.5T --cluster 128x8xh100 --price 4 --explain recipe",
    "ingot plan --model moe-671b --budget '$10M' --cluster 256x8xh100 --tp 1",
    "ingot plan --init mixtral-hf --tokens data --out run.toml",
    "ingot plan --run run.toml --explain mem",
    "ingot plan --web",
    "ingot plan score --leave-one-out",
)
_RECIPE = "recipe"
_WIDTH = 108  # characters of a warning per line


def configure(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    add_choices(parser)
    output = parser.add_argument_group("output of the plan")
    output.add_argument(
        "--top", type=count("top", 1, 1000), default=5, metavar="N", help="layouts to show (default: 5)"
    )
    output.add_argument(
        "--explain",
        nargs="?",
        const=_RECIPE,
        metavar="TOPIC",
        help="recipe: each decision with its reason and runner-up (default); mem, time, comms, bubble, lr, batch, size,"
        " failures or all: the formulas with their numbers",
    )
    output.add_argument("--out", type=path, metavar="FILE", help="run file to write, with plan.json next to it")
    output.add_argument("--force", action="store_true", help="replace the file at --out (default: refuse)")
    plan_web.add_page(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK, ConfigError, UsageError

    if serving.is_asked(args, "plan", plan_web.PORT):
        return plan_web.serve(args, terminal)
    if args.force and not args.out:
        raise UsageError(
            "E-FORCE-NO-OUT",
            "--force is given without --out",
            rule="--force replaces the run file that --out names",
            fix="add --out run.toml, or remove --force",
        )
    planning = planning_of(args, top=args.top, relative_to=args.out.parent if args.out else Path())
    explained = _explained(planning, args.explain) if args.explain else []
    for line in str(planning).splitlines():
        terminal.say(line)
    for line in ["", *explained] if explained else []:
        terminal.say(line)
    for warning in planning.best.plan.warnings:
        first, *more = textwrap.wrap(warning, _WIDTH, break_long_words=False)
        terminal.say("\n          ".join([f"{terminal.style('warn', 'yellow')}      {first}", *more]))
    if args.out:
        beside = planning.write(args.out, force=args.force)
        terminal.say(f"wrote     {args.out}, {beside}")
    facts = planning.facts() | ({"explained": explained} if explained else {})
    if not planning.fits:
        terminal.result(
            facts | {"error": "E-PLAN-NO-LAYOUT", "kind": ConfigError.kind, "exit_code": ConfigError.exit_code}
        )
        terminal.next(*_ways_to_fit(args))
        return ConfigError.exit_code
    terminal.result(facts)
    file, last = args.out or args.run, "ingot plan ... --out run.toml"
    if planning.why_not_executed:
        last = "ingot plan --web   (to look at other layouts)"
    where = f" --cluster {quote(args.cluster)}" if args.cluster else ""
    terminal.next(*((f"ingot check {file}{where}", f"ingot train {file}") if file else (last,)))
    return EXIT_OK


def _explained(planning: "PlanResult", topic: str) -> list[str]:
    return planning.recipe() if topic == _RECIPE else planning.explain("mem" if topic == "memory" else topic)


def _ways_to_fit(args: argparse.Namespace) -> tuple[str, ...]:
    import shlex

    subject = ("run",) if args.run else ("model", "params", "init", "tokens", "budget")
    given = [f"--{name} {shlex.quote(str(value))}" for name in subject if (value := getattr(args, name))]
    what, shorter = " ".join(given), "--set train.seq_len=T" if args.run else "--seq T"
    return (
        f"ingot plan {what} --cluster NAME   (more or larger devices: 8xh100, 128x8xh100)",
        f"ingot plan {what} {shorter}   (shorter sequences need less memory; or a smaller model)",
    )
