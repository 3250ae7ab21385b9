"""`ingot data index`."""

import argparse
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "keep what a later build needs to find near-duplicates of this one"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of `data build --out`, or a corpus folder")
    parser.add_argument("--out", metavar="INDEX", help="new index, or one to add to (default: DIR/index)")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.data.build.corpus import load_corpus
    from ingot.data.build.duplicates import index_corpus
    from ingot.data.dedup.index import Index
    from ingot.data.dedup.minhash import DedupRules
    from ingot.data.lineage.inspect import corpus_folder

    corpus = corpus_folder(Path(args.folder))
    out = Path(args.out) if args.out else Path(args.folder) / "index"
    parts = len(load_corpus(corpus).parts)
    documents = index_corpus(corpus, out, lambda done, count: terminal.progress(done / parts, f"{count:,} documents"))
    total = Index(out, DedupRules(**load_corpus(corpus).recipe.get("dedup", {}))).documents
    terminal.say(f"{documents:,} documents of {corpus} added; {out} holds {total:,}")
    terminal.result({"index": str(out), "added": documents, "documents": total})
    terminal.next(f"ingot data build MORE... --against {out} --out NEW")
