"""`ingot quickstart`: run all stages, from a crawl to a report, on this machine."""

import argparse
import os
from pathlib import Path

from ingot.cli.arguments import count, place
from ingot.cli.terminal import Terminal

EXAMPLES = ("ingot quickstart", "ingot quickstart --warc CC-MAIN-*.warc.gz --dir my-crawl")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--warc",
        nargs="+",
        action="extend",
        default=[],
        type=place,
        metavar="FILE",
        help="your own WARC or WET files (default: a crawl of the documentation on this machine)",
    )
    parser.add_argument("--dir", type=place, default="quickstart", help="folder for all output (default: ./quickstart)")
    parser.add_argument(
        "--workers",
        type=count("workers", 0, 10_000),
        default=0,
        metavar="N",
        help="processes of the data stages (default: one per core)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.quickstart.run import QuickstartRun

    folder = Path(args.dir)
    quickstart = QuickstartRun(
        folder,
        warcs=[Path(file) for file in args.warc],
        workers=args.workers or os.cpu_count() or 1,
        output=terminal,
        quiet=args.json or args.quiet,
    )
    facts = quickstart.execute()
    terminal.result(facts)
    terminal.say(f"\nReport: {facts['report']}")
    terminal.next(
        f"ingot sample {folder / 'run'} --prompt 'The function returns'",
        "ingot init my-run",
        f"ingot watch {folder / 'run'} --web",
    )
    return 0
