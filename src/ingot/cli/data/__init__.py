"""`ingot data ACTION`: each action is a module of this package with HELP, configure(parser) and run(args, terminal)."""

import argparse
import importlib

from ingot.cli.terminal import Terminal

HELP = "from crawl files to token shards, and everything about them afterwards"
EXAMPLES = (
    "ingot data build crawl/*.warc.gz --out data",
    "ingot data build crawl/*.warc.gz --out data --set quality.gopher.symbol_ratio=0.15",
    "ingot data build --source news news/*.warc.gz --source books books.parquet text=body --out data",
    "ingot data build cc:CC-MAIN-2025-05#0-9 --out data --preset fineweb --workers 16",
    "ingot data inspect data --dropped-by gopher.word_count",
    "ingot data trace --run run --step 100",
    "ingot data purge data --domain example.org --runs runs/*",
)
# In the order of use. The text stands here so that `ingot data --help` imports one module only.
ACTIONS = {
    "build": "crawl files and other sources -> corpus, tokenizer, token shards",
    "recipe": "print a whole recipe as TOML: every key, with its value",
    "inspect": "what was kept or dropped, and why, with examples",
    "card": "the data card: one HTML page about a corpus",
    "verify": "check every hash of a corpus, of token shards, or of both",
    "index": "keep what a later build needs to find near-duplicates of this one",
    "mix": "weights of sources: tokens and epochs of each, DSIR, DoReMi, ablations",
    "classifier": "train, score and show a text classifier in fastText's format",
    "trace": "from a training step to its documents, and from a document to its steps",
    "purge": "take documents out of a corpus and its shards, and prove that they are gone",
}


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in ACTIONS.items():
        _module(action).configure(verbs.add_parser(action, help=text, description=text))


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    _module(args.action).run(args, terminal)
    return 0


def _module(action: str):
    return importlib.import_module(f"ingot.cli.data.{action}")
