"""`ingot plan score`: compare the planner's predictions with published runs, by family of runs."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ingot.cli.arguments import path
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.planner.published.score import PlannerScore, RowScore

EXAMPLES = (
    "ingot plan score                              the runs on which the planner was calibrated",
    "ingot plan score --leave-one-out              each family predicted by a fit to the other families",
    "ingot plan score runs.json --json",
    "ingot plan score runs.json --rows",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=path, metavar="FILE",
        help='published runs as JSON: {"rows": [{"id", "family", "model", "cluster", "plan", "measured"}]}'
        " (default: the published runs of the package)")  # fmt: skip
    parser.add_argument("--leave-one-out", action="store_true",
        help="fit the time model for each family to the other families only: the error on unseen runs")  # fmt: skip
    parser.add_argument("--rows", action="store_true", help="show every run")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.planner.published.run import published_runs, read_rows, shipped_rows
    from ingot.planner.published.score import score

    rows = read_rows(args.file) if args.file else shipped_rows()
    if args.leave_one_out:
        from ingot.planner.published.fit import Fit, timed

        terminal.say("fitting the time model without each family in turn; this takes minutes")
        known = Fit(tuple(timed(published_runs(rows)))).left_out()
        found = score(rows, known.get)
    else:
        found = score(rows)
    if args.rows:
        _show_rows(found.rows, terminal)
    _show_families(found, terminal)
    terminal.result(found.facts() | {"leave_one_out": args.leave_one_out})
    return EXIT_OK


def _show_families(found: "PlannerScore", terminal: Terminal) -> None:
    header = ("family", "rows", "step time", "median", "memory", "rank", "oom called", "oom false")
    table = [
        (name, f["n"], _percent(f["step_time_mape"]), _percent(f["step_time_median_error"], "+"),
         _percent(f["memory_mape"]), _plain(f["rank_correlation"]), f["oom_called"], f["oom_false"])
        for name, f in found.families.items()
    ]  # fmt: skip
    mean = [found.mean(figure) for figure in ("step_time_mape", "step_time_median_error", "memory_mape")]
    table.append(("mean over families", "", _percent(mean[0]), _percent(mean[1], "+"), _percent(mean[2]), "", "", ""))
    terminal.table(table, header, right=range(1, len(header)))
    skipped = [row for row in found.rows if row.skipped]
    for row in skipped:
        terminal.say(f"skipped   {row.id}: {row.skipped}")
    terminal.say("step time, memory: mean absolute error; median: median signed error of step times; rank: Spearman's")
    terminal.say("correlation of model FLOP/s per device; oom called: runs that ran out of memory, as predicted;")
    terminal.say("oom false: runs that fitted, but were predicted to run out of memory")


def _show_rows(rows: "Sequence[RowScore]", terminal: Terminal) -> None:
    table = [
        (row.id, _plain(row.measured.get("step_s")), _plain(row.predicted.get("step_s")),
         _percent(None if row.step_error is None else 100 * row.step_error, "+"),
         _plain(row.measured.get("mem_gb")), _plain(row.predicted.get("mem_gb")),
         _percent(None if row.memory_error is None else 100 * row.memory_error, "+"))
        for row in rows if not row.skipped
    ]  # fmt: skip
    header = ("row", "step s", "predicted", "error", "memory GB", "predicted", "error")
    terminal.table(table, header, right=range(1, len(header)))
    terminal.say()


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1f}%"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
