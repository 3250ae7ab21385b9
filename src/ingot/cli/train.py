"""`ingot train`: start a run or continue it, restart it after lost ranks, and stop it cleanly on Ctrl-C."""

import argparse

from ingot.cli.arguments import MOST_STEPS, count, place
from ingot.cli.options import add_overrides
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot train run.toml",
    "ingot train runs/demo",
    "ingot train run.toml --set train.steps=200 --out runs/short",
    "ingot train runs/demo --set optim.lr=1e-3 --accept-change optim.lr",
    "ingot train run.toml --fresh --archive",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        type=place,
        default="run.toml",
        metavar="RUN",
        help="run file, or run folder (default: run.toml)",
    )
    parser.add_argument("--out", type=place, metavar="DIR", help="run folder (default: runs/NAME next to the run file)")
    add_overrides(parser)
    parser.add_argument(
        "--accept-change",
        action="append",
        default=[],
        metavar="KEY",
        help="confirm that the run may continue with a new value of KEY; repeatable",
    )
    parser.add_argument(
        "--until-step",
        type=count("until-step", 1, MOST_STEPS),
        metavar="N",
        help="save and stop after step N with exit code 10 (default: the last step of the run)",
    )
    parser.add_argument("--fresh", action="store_true", help="start at step 0; fails if the run folder has a run")
    parser.add_argument("--archive", action="store_true", help="with --fresh: first rename an existing run folder")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.api.running import train

    outcome = train(
        args.run,
        args.out or None,
        overrides=args.overrides,
        accept=args.accept_change,
        fresh=args.fresh,
        archive=args.archive,
        until_step=args.until_step,
        quiet=terminal.json_mode or terminal.quiet,
        say=terminal.say,
    )
    terminal.result(outcome.facts())
    if outcome.finished:
        terminal.next(f"ingot report {outcome.run}", f"ingot sample {outcome.run} --prompt 'Once'")
    else:
        lost = outcome.step - outcome.saved_step
        again = f"; {lost} step{'s' if lost > 1 else ''} will be trained again" if lost > 0 else ""
        terminal.say(f"stopped at step {outcome.step}; step {outcome.saved_step} is saved and verified{again}")
        terminal.next(f"ingot train {outcome.run}      (continues)")
    return outcome.exit_code
