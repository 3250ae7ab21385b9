"""`ingot compare RUN RUN ...`: compare runs at equal tokens, FLOPs, steps or time."""

import argparse
from typing import TYPE_CHECKING

from ingot.cli.arguments import path
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.report.compare.align import RunComparison

_SHOWN_SETTINGS = 12
_OTHERS = 2  # runs beside the first one in a table, which has 80 characters
_SPARKS = 40

EXAMPLES = (
    "ingot compare runs/base runs/larger-rate",
    "ingot compare runs/base runs/wide runs/deep --by flops --out compare.html",
    "ingot compare runs/base runs/new --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=path,
        nargs="+",
        metavar="RUN",
        help="run folders, which may still be training; the first is the one that the others are compared with",
    )
    parser.add_argument(
        "--by",
        choices=("tokens", "flops", "steps", "time"),
        default="tokens",
        help="what the runs have equally much of where they are compared (default: tokens); time: that of training, "
        "with restarts and saves, without pauses",
    )
    parser.add_argument("--out", type=path, metavar="FILE", help="also write a page with charts (HTML)")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    import shlex
    import textwrap

    from ingot.errors import EXIT_OK
    from ingot.report.compare.align import WINDOW, compare_runs
    from ingot.report.compare.differing import letter_of
    from ingot.report.compare.texts import label_of, metric_rows, quarter_rows, window_text, x_text
    from ingot.units import format_count
    from ingot.value_names import printable

    found = compare_runs(args.runs, args.by)
    if args.out:
        from ingot.report.compare.page import write_page

        write_page(found, args.out)
    rows = [
        (
            letter_of(number),
            printable(one.run.name),
            one.run.state,
            f"{one.run.step:,}/{one.run.config.train.steps:,}",
            format_count(float(one.tokens([one.run.step])[0])),
            printable(str(one.run.path)),
        )
        for number, one in enumerate(found.aligned)
    ]
    terminal.table(rows, ("", "run", "state", "step", "tokens", "folder"), right=(3, 4))
    for note in found.notes:
        terminal.say(textwrap.fill(printable(note), 80, initial_indent="note   ", subsequent_indent="       "))
    _say_settings(found, terminal)
    last = found.points[-1]
    for first_other in range(1, len(found.runs), _OTHERS):
        numbers = [0, *range(first_other, min(first_other + _OTHERS, len(found.runs)))]
        letters = tuple(letter_of(number) for number in numbers)
        rows = [tuple(map(printable, row)) for row in metric_rows(last, numbers)]
        terminal.say("")
        head = f"at {x_text(found.by, last.x)}"
        terminal.table(rows, (head, *letters), right=range(1, len(letters) + 1))
        header, rows = quarter_rows(found, numbers)
        terminal.say(f"\n{label_of(found.measure)} on the way")
        terminal.table(rows, header, right=range(len(header)))
    _say_curves(found, terminal)
    terminal.say(f"\n{textwrap.fill(window_text(WINDOW), 80)}")
    if args.out:
        terminal.say(f"wrote {args.out}")
    terminal.result(found.as_dict() | {"html": str(args.out) if args.out else None, "exit_code": EXIT_OK})
    folders = shlex.join(str(one) for one in args.runs)
    by = "" if args.by == "tokens" else f" --by {args.by}"
    terminal.next(*([] if args.out else [f"ingot compare {folders}{by} --out compare.html"]),
                  f"ingot report {shlex.quote(str(args.runs[-1]))}")  # fmt: skip
    return EXIT_OK


def _say_settings(found: "RunComparison", terminal: Terminal) -> None:
    """Print the settings that differ and change the numbers of a run; of the others, how many there are."""
    from ingot.report.compare.differing import MACHINE, letter_of, setting_text
    from ingot.schema.changes import ChangeClass
    from ingot.value_names import printable

    terminal.say("")
    important = [one for one in found.settings if one.kind not in (MACHINE, ChangeClass.SAME_BITS)]
    shown, more = important[:_SHOWN_SETTINGS], len(found.settings) - min(len(important), _SHOWN_SETTINGS)
    if shown:
        header = ("setting", *(letter_of(number) for number in range(len(found.runs))))
        terminal.table([(one.key, *(printable(setting_text(v)) for v in one.values)) for one in shown], header)
    else:
        terminal.say("no setting differs that changes the numbers of a run")
    if more:
        terminal.say(f"and {more} more, which --json and --out have")


def _say_curves(found: "RunComparison", terminal: Terminal) -> None:
    """Print the measure of each run over the range that all have, as lines of bars of one scale; without the first
    tenth, whose fall would hide all else."""
    import numpy as np

    from ingot.report.compare.align import mean_before
    from ingot.report.compare.differing import letter_of
    from ingot.report.compare.texts import label_of
    from ingot.report.status import sparkline

    places = np.linspace(found.first + (found.last - found.first) / 10, found.last, _SPARKS)
    curves = {}
    for number, one in enumerate(found.aligned):
        if found.measure in one.all:
            means = [mean_before(one.all[found.measure], x, found.window_at(x)).value for x in places.tolist()]
            curves[letter_of(number)] = [float("nan") if value is None else value for value in means]
    bars = sparkline(tuple(value for values in curves.values() for value in values), _SPARKS * len(curves))
    terminal.say("")
    for number, (letter, values) in enumerate(curves.items()):
        name = label_of(found.measure) if number == 0 else ""
        line = bars[number * _SPARKS : (number + 1) * _SPARKS]
        terminal.say(f"{name:<14}{letter}  {line}  {values[0]:.3f} -> {values[-1]:.3f}")
