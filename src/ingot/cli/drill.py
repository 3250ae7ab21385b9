"""`ingot drill`: break copies of a run on purpose, and show that they recover bit for bit."""

import argparse
import sys
from typing import TYPE_CHECKING

from ingot.cli.arguments import LARGEST_SEED, MOST_STEPS, add_run_to_copy, count, path
from ingot.cli.options import add_overrides
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.drill.copied import DrillCopy
    from ingot.drill.faults import DrillFault

EXAMPLES = (
    "ingot drill runs/demo --smoke",
    "ingot drill run.toml --rows RS01+,RS10",
    "ingot drill --list",
    "ingot drill run.toml --soak 1h --every 20s --seed 7",
)
_HEADER = ("row", "fault", "seen s", "back s", "redone", "bits", "ledger", "")


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_to_copy(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--list", action="store_true", help="show the rows; start nothing")
    which.add_argument(
        "--rows", metavar="IDS", help="these rows alone, as RS01,RS10; RS01+: with its variants (default: all)"
    )
    which.add_argument("--smoke", action="store_true", help="five faults that cover most of recovery")
    which.add_argument("--soak", metavar="DURATION", help="random faults for so long: 10min, 1h")
    parser.add_argument("--every", metavar="SECONDS", help="with --soak: the mean time between faults (default: 20s)")
    parser.add_argument(
        "--steps",
        type=count("steps", 1, MOST_STEPS),
        default=0,
        metavar="N",
        help="train the first N steps of the run (default: as many as take some seconds)",
    )
    parser.add_argument(
        "--seed",
        type=count("seed", 0, LARGEST_SEED),
        default=0,
        metavar="N",
        help="seed of the random faults, ranks, times and places (default: 0)",
    )
    parser.add_argument("--out", type=path, metavar="DIR", help="folder of the copies (default: RUN-drill)")
    add_overrides(parser)


class _ToStandardError:
    """Shows what happens as lines on standard error, while standard output is kept for the result."""

    def say(self, text: str = "") -> None:
        print(text, file=sys.stderr, flush=True)

    def progress(self, fraction: float, text: str = "") -> None: ...


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.drill.copied import lock_of, open_copy
    from ingot.drill.rows import chosen_faults
    from ingot.drill.soak import soak_times
    from ingot.trainer.resilience.lock import RunLock

    if args.list:
        return _list(terminal)
    rows = [row.strip() for row in args.rows.split(",")] if args.rows is not None else []
    faults = chosen_faults(rows, smoke=args.smoke)
    times = soak_times(args.soak, args.every)
    copy, changes = open_copy(args.run, args.out, args.overrides, many_faults=times is not None)
    try:
        with RunLock(lock_of(copy.root)):
            return _play(args, terminal, copy, changes, faults, times)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"no process of the drill is left; its copies are in {copy.root}") from None


def _list(terminal: Terminal) -> int:
    """Show all rows of the board: those that a drill plays, and the others with the reason."""
    from ingot.drill.faults import FAULTS
    from ingot.drill.rows import NOT_PLAYED

    terminal.table([(one.id, one.injects, "smoke" if one.smoke else "") for one in FAULTS], ("row", "fault", ""))
    terminal.say(
        "\n--rows RS03 plays that row alone, --rows RS03+ its variants too (RS03 all), --smoke the marked ones\n\n"
        "Other rows of the board of reliability run in the tests of ingot (docs/reliability.md):\n"
    )
    terminal.table([(one.id, one.injects, one.why) for one in NOT_PLAYED], ("row", "fault", "not here, because"))
    played = [{"id": one.id, "injects": one.injects, "smoke": one.smoke} for one in FAULTS]
    others = [{"id": one.id, "injects": one.injects, "why": one.why, "command": one.way_out} for one in NOT_PLAYED]
    terminal.result({"rows": played, "not_played": others})
    return 0


def _play(
    args: argparse.Namespace,
    terminal: Terminal,
    copy: "DrillCopy",
    changes: list[str],
    faults: "list[DrillFault]",
    times: tuple[float, float] | None,
) -> int:
    from ingot.drill import drill as drills
    from ingot.drill.soak import soak, soak_lines

    output = _ToStandardError() if terminal.json_mode and not terminal.quiet else terminal
    output.say(f"drill      copies of {args.run}, in {copy.root}; the run itself is only read")
    output.say(f"changed    {', '.join([*changes, 'the interval of checkpoints'])}")
    if times is not None:
        result = soak(copy, faults, output, seconds=times[0], every=times[1], steps=args.steps, seed=args.seed)
        terminal.say()
        terminal.say("\n".join(soak_lines(result)))
    else:
        result = drills.drill(copy, faults, output, steps=args.steps, seed=args.seed)
        terminal.say()
        terminal.table(drills.result_rows(result), _HEADER, right=(2, 3, 4))
        terminal.say()
        terminal.say(_summary(result))
    terminal.result(result)
    return result["exit_code"]


def _summary(result: dict) -> str:
    from ingot.units import format_seconds

    played, red = len(result["rows"]), result["red"]
    took, faults = format_seconds(result["seconds"]), f"{played} fault{'s' * (played != 1)}"
    if not red:
        directed = " or of the directed one" * any(row["directed"] for row in result["rows"])
        return f"{faults} in {took}: every copy ended with the bits of the undisturbed run{directed}"
    return f"{faults} in {took}, {len(red)} red: {', '.join(red)}; the copies are kept in {result['folder']}"
