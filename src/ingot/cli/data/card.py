"""`ingot data card`: the facts and samples of a folder as one HTML file."""

import argparse
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "the data card of a folder: funnel, sources, languages, sites, samples; one HTML file"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of `data build --out`")
    parser.add_argument("--out", metavar="FILE", default="card.html", help="HTML file to write (default: card.html)")
    parser.add_argument("--samples", type=int, default=3, help="texts per source and per rule (default: 3)")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.report.card import card_facts, write_card

    out = Path(args.out)
    facts = write_card(Path(args.folder), out, max(args.samples, 0))
    terminal.say(f"{facts.kept:,} of {facts.records:,} records are kept, from {facts.domain_count:,} hosts; see {out}")
    terminal.result({"card": str(out)} | card_facts(facts))
