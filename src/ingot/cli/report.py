"""`ingot report`: write the report of a run as one HTML file and one Markdown file."""

import argparse

from ingot.cli.arguments import path
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot report runs/demo",
    "ingot report runs/demo --out reports/demo --corpus data/corpus",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path, metavar="RUN", help="run folder; the run may still be training")
    parser.add_argument("--out", type=path, metavar="DIR", help="folder for report.html and report.md (default: RUN)")
    parser.add_argument(
        "--corpus",
        type=path,
        metavar="DIR",
        help="corpus folder for the data funnel (default: the corpus of the run's tokens, if it exists)",
    )
    parser.add_argument(
        "--twin",
        type=path,
        metavar="FILE",
        help="twin.json, a comparison with the same run without faults (default: RUN/twin.json, if it exists)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.report.write import write_report

    report = write_report(args.run, out=args.out, corpus=args.corpus, twin=args.twin)
    terminal.table(report.headline)
    terminal.say(f"wrote {report.html} and {report.markdown}")
    headline = [{"label": label, "value": value, "note": note} for label, value, note in report.headline]
    terminal.result({"html": str(report.html), "markdown": str(report.markdown), "headline": headline})
    return 0
