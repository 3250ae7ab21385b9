"""`ingot data verify`."""

import argparse
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "check every hash of a corpus, of token shards, or of both"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of `data build --out`, a corpus or a token folder")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.data.build.prepare import verify

    checked = verify(Path(args.folder), progress=terminal.progress)
    terminal.table([(one.folder, one.kind, one.checked) for one in checked], ("folder", "what", "every hash is right"))
    terminal.result({"verified": [vars(one) for one in checked]})
