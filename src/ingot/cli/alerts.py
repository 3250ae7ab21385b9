"""`ingot alerts RUN`: the alerts of a run, as they were sent, or as its log gives them with other limits."""

import argparse
from typing import TYPE_CHECKING

from ingot.cli.arguments import path
from ingot.cli.options import add_overrides
from ingot.cli.terminal import Terminal
from ingot.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingot.schema.alert_record import ShownAlert

_SHOWN = 40

EXAMPLES = (
    "ingot alerts runs/demo",
    "ingot alerts runs/demo --replay",
    "ingot alerts runs/demo --replay --set alerts.mfu_least=0.4 --set alerts.budget_usd=5000",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path, metavar="RUN", help="run folder; the run may still be training")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="compute from the log which alerts there would have been, and send none; done without it, too, for a run "
        "whose run file names no channel",
    )
    add_overrides(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.errors import EXIT_OK, UsageError
    from ingot.observe.alerts.replay import replay
    from ingot.report.facts import no_run_folder
    from ingot.schema.alert_record import read_records, summarized
    from ingot.schema.run_folder import RunFolder
    from ingot.trainer.resilience.lock import is_locked
    from ingot.value_names import printable

    folder = RunFolder(args.run)
    if not folder.config.is_file():
        raise no_run_folder(args.run)
    replays = args.replay or not folder.alerts.exists()
    if args.overrides and not args.replay:
        raise UsageError(
            "E-ALERTS-SET",
            "--set has no effect on alerts that were sent",
            rule="other limits need the log of the run: --replay reads it",
            fix=f"add --replay: ingot alerts {args.run} --replay --set {args.overrides[0]}",
        )
    running = is_locked(folder.lock)
    if replays:
        replayed = replay(folder, args.overrides, running=running)
        found, unreadable = summarized(replayed.records), replayed.unreadable
    else:
        found, unreadable = summarized(read_records(folder.alerts)), 0
    found.sort(key=lambda one: (one.last.began, one.last.step))  # they fired when their signs were enough
    open_now = [one for one in found if one.over is None]
    what = "would have fired, by its log" if replays else "fired"
    terminal.say(
        f"{terminal.style(printable(str(folder.root)), 'bold')}   {len(found)} alert{'s' * (len(found) != 1)} {what}, "
        f"{len(open_now)} open   {'is running' if running else 'is not running'}   times in UTC"
    )
    if unreadable:
        terminal.say(f"log    left out {counted(unreadable, 'event')} without what their kind has")
    for one in found[-_SHOWN:]:
        _say(one, terminal)
    if len(found) > _SHOWN:
        terminal.say(f"the last {_SHOWN} of {len(found):,}; all: --json")
    alerts = [asdict(one.last) | {"over": one.over, "count": one.count} for one in found]
    terminal.result({"run": str(folder.root), "replayed": replays, "unreadable_events": unreadable, "alerts": alerts})
    terminal.next(*_next(open_now, found, args.run))
    return EXIT_OK


def _say(one: "ShownAlert", terminal: Terminal) -> None:
    """Print an alert: when, what and how often, and its evidence below."""
    import textwrap
    import time

    from ingot.units import format_seconds
    from ingot.value_names import printable

    last = one.last
    about = f" ({last.subject})" if last.subject else ""
    times = f", {one.count:,} times" if one.count > 1 else ""
    lasted = "open" if one.over is None else f"over after {format_seconds(max(one.over - last.began, 0))}"
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(last.began))
    what = terminal.style(printable(f"{last.severity:<8}  {last.kind}{about}"), "red" if one.over is None else "bold")
    terminal.say(f"{clock}  {what}{times}, {lasted}, step {last.step:,}")
    terminal.say(textwrap.fill(printable(last.evidence), 96, initial_indent="    ", subsequent_indent="    "))


def _next(open_now: "list[ShownAlert]", found: "list[ShownAlert]", run: "Path") -> "Iterator[str]":
    """Yield the commands of the newest alerts, of the open ones first; each once."""
    seen = set()
    for one in (*reversed(open_now), *reversed(found)):
        if one.last.next not in seen and len(seen) < 3:
            seen.add(one.last.next)
            yield one.last.next
    if not seen:
        yield f"ingot status {run}"
