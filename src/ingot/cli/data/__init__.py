"""`ingot data ACTION`. The module of an action has configure_ACTION(parser) and run_ACTION(args, terminal)."""

import argparse
import importlib

from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot data build crawl/*.warc.gz --out data",
    "ingot data build crawl/*.warc.gz --out data --set quality.gopher.symbol_ratio=0.15",
    "ingot data build --source news news/*.warc.gz --source books books.parquet text=body --out data",
    "ingot data build cc:CC-MAIN-2025-05#0-9 --out data --preset fineweb --workers 16",
    "ingot data recipe --preset fineweb",
    "ingot data inspect data --dropped-by gopher.word_count",
    "ingot data card data --out card.html",
    "ingot data verify data",
    "ingot data index data",
    "ingot data mix data --preset classic --tokens 1B",
    "ingot data mix data --weights web=0.7 code=0.3 --tokens 1B --max-epochs 4 books=2 --write run.toml",
    "ingot data mix data --doremi --steps 200 --out doremi.json --write run.toml",
    "ingot data mix data --ablate natural classic mine.toml --steps 200 --out ablation",
    "ingot data mix data --dsir good.jsonl --keep 100k --out chosen --tokenizer data/tokens/tokenizer.json",
    "ingot data classifier train --positive good.jsonl --negative data/corpus --licence 'CC BY-SA 4.0' --out model.bin",
    "ingot data classifier train labeled.txt --licence 'own texts' --out model.bin",
    "ingot data classifier score model.bin data/corpus -n 20",
    "ingot data classifier show model.bin",
    "ingot data trace --run runs/demo --step 100",
    "ingot data trace --data data --url https://example.org/page",
    "ingot data purge data --domain example.org --runs runs/*",
    "ingot data purge data --quarantine quarantine.jsonl",
)
# Action -> (module, help text), in the order of use.
ACTIONS = {
    "build": ("build", "build a corpus, a tokenizer and token shards from crawl files and other sources"),
    "recipe": ("build", "print a complete data recipe as TOML: every key with its value"),
    "inspect": ("folder", "show what was kept or dropped and why, with examples"),
    "card": ("folder", "write the data card: one HTML page with the funnel, sources, languages, sites and samples"),
    "verify": ("folder", "check every hash of a corpus, of token shards, or of both"),
    "index": ("folder", "write an index, so that a later build drops near-duplicates of these documents"),
    "mix": ("mix", "set how much of each source a run uses: by hand, preset, DSIR, DoReMi or ablation"),
    "classifier": ("classifier", "train a text classifier in fastText's format, score texts with it, show its card"),
    "trace": ("trace", "list the documents of a training step, or the history of a document"),
    "purge": ("purge", "remove a page, a site or a document from a finished folder, and prove the removal"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, (_, text) in ACTIONS.items():
        _function("configure", action)(verbs.add_parser(action, help=text, description=text))


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    _function("run", args.action)(args, terminal)
    return 0


def _function(kind: str, action: str):
    return getattr(importlib.import_module(f"ingot.cli.data.{ACTIONS[action][0]}"), f"{kind}_{action}")
