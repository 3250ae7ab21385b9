"""`ingot data build`, `inspect`, `verify` and `trace`."""

import argparse
import os
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "build, inspect, verify and trace a corpus and its token shards"
EXAMPLES = (
    "ingot data build crawl/*.warc.gz --out data",
    "ingot data build crawl/*.warc.gz --out data --set quality.gopher.symbol_ratio=0.15",
    "ingot data build --source news news/*.warc.gz --source law law/*.warc.gz --out data",
    "ingot data inspect data --dropped-by gopher.word_count",
    "ingot data verify data",
    "ingot data trace --run run --step 100",
)


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _configure_build(verbs.add_parser("build", help="crawl files -> corpus, tokenizer, token shards"))
    inspect = verbs.add_parser("inspect", help="what was kept or dropped, and why, with examples")
    inspect.add_argument("folder", metavar="DIR", help="folder of `data build --out`, or a corpus folder")
    inspect.add_argument("--dropped-by", default="", metavar="RULE", help="a rule or stage (default: kept documents)")
    inspect.add_argument("-n", "--count", type=int, default=5, help="examples to show (default: 5)")
    inspect.add_argument("--url", default="", metavar="TEXT", help="only pages whose URL contains it (default: all)")
    verify = verbs.add_parser("verify", help="check every hash of a corpus, of token shards, or of both")
    verify.add_argument("folder", metavar="DIR", help="folder of `data build --out`, a corpus or a token folder")
    trace = verbs.add_parser("trace", help="from a training step to the documents it used")
    trace.add_argument("--run", required=True, metavar="DIR", help="folder of the run")
    trace.add_argument("--step", required=True, type=int, help="optimizer step, from 1")


def _configure_build(build: argparse.ArgumentParser) -> None:
    build.add_argument(
        "files", nargs="*", metavar="FILE", help="WARC or WET files, plain or gzip; their source is 'web'"
    )
    build.add_argument("--out", required=True, metavar="DIR", help="folder for corpus/ and tokens/")
    build.add_argument("--recipe", metavar="FILE", help="data recipe as TOML (default: the preset 'web')")
    build.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one value of the recipe; repeatable"
    )
    build.add_argument(
        "--source",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "FILE"),
        help="files of a source of its own, for data.weights and evaluation by source; repeatable (default: none)",
    )
    build.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json to use (default: train a byte-level BPE)")
    build.add_argument("--eot", default="", metavar="TOKEN", help="its end-of-text token, if it has an unusual name")
    build.add_argument("--vocab-size", type=int, default=32_768, help="tokens of a trained BPE (default: 32768)")
    build.add_argument("--seed", type=int, default=1234, help="of the shuffle of documents (default: 1234)")
    build.add_argument("--workers", type=int, help="processes (default: one per core)")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    {"build": _build, "inspect": _inspect, "verify": _verify, "trace": _trace}[args.action](args, terminal)
    return 0


def _build(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict
    from ingot.data.build import Input
    from ingot.data.prepare import prepare
    from ingot.data.recipe import load_recipe
    from ingot.errors import UsageError

    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers {args.workers}", rule="at least 1")
    recipe = load_recipe(Path(args.recipe) if args.recipe else None, args.set)
    sources = [("web", args.files), *((name, files) for name, *files in args.source)]
    if without := [name for name, files in sources[1:] if not files]:
        raise UsageError(f"--source {without[0]} names no files", fix=f"--source {without[0]} FILE...")
    prepared = prepare(
        [Input(Path(file), name) for name, files in sources for file in files],
        Path(args.out),
        recipe,
        vocab_size=args.vocab_size,
        tokenizer=Path(args.tokenizer) if args.tokenizer else None,
        eot=args.eot,
        workers=args.workers or os.cpu_count() or 1,
        seed=args.seed,
        progress=terminal.progress,
    )
    if not prepared.fresh:
        terminal.say(f"{args.out} is finished and was made from these files and this recipe; nothing to do")
    _print_funnel(prepared.corpus.funnel, terminal)
    train, heldout = prepared.train, prepared.heldout
    terminal.say(
        f"\ntokens: {train.tokens:,} to train on, {heldout.tokens:,} held out "
        f"({train.dtype}, vocabulary {train.vocab_size:,}, encoded with {prepared.engine})"
    )
    _print_warnings(prepared.warnings, terminal)
    if prepared.notice:
        terminal.say(f"notice: {prepared.notice}")
    terminal.say(f"fingerprint: {train.fingerprint()}")
    terminal.result(
        {
            "fresh": prepared.fresh,
            "corpus": to_dict(prepared.corpus),
            "train_tokens": train.tokens,
            "heldout_tokens": heldout.tokens,
            "vocab_size": train.vocab_size,
            "tokenizer": str(prepared.tokenizer),
            "fingerprint": train.fingerprint(),
            "warnings": list(prepared.warnings),
        }
    )
    terminal.next(
        f"ingot data inspect {args.out}", f"ingot plan --model tiny --tokens {args.out}/tokens/train --out run.toml"
    )


def _print_warnings(warnings: tuple[str, ...], terminal: Terminal) -> None:
    for warning in warnings:
        terminal.say(f"warning: {warning}")


def _print_funnel(funnel, terminal: Terminal) -> None:
    from ingot.data.funnel import funnel_table

    terminal.say(f"{funnel[0].documents_in:,} records")
    header, rows = funnel_table(funnel)
    terminal.table(rows, header, right=(1, 2))


def _inspect(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict
    from ingot.data.inspect import inspect
    from ingot.data.recipe import preset_of

    what = f"dropped by {args.dropped_by}" if args.dropped_by else "kept"
    found = inspect(Path(args.folder), dropped_by=args.dropped_by, count=args.count, url=args.url)
    if args.url and not found.total:
        terminal.say(f"no page {what} has {args.url!r} in its URL")
    elif not args.dropped_by:
        _print_funnel(found.funnel, terminal)
        terminal.say()
        terminal.table([(f"{n:,}", rule) for rule, n in found.rules], ("dropped", "rule"), right=(0,))
        terminal.say()
    _print_warnings(found.warnings, terminal)
    if found.examples:
        terminal.say(f"{len(found.examples)} of {found.total:,} documents {what}:")
    for number, row in enumerate(found.examples, 1):
        excerpt = " ".join(row["text"][:300].split())
        reason = "  ".join(filter(None, (row.get("rule"), row.get("value"), f"in {row['file']}")))
        terminal.say("\n" + "\n   ".join(filter(None, (f"#{number} {row['url']}", reason, excerpt))))
    terminal.result(
        {
            "funnel": [to_dict(stage) for stage in found.funnel],
            "rules": dict(found.rules),
            "total": found.total,
            "setting": found.setting,
            "examples": list(found.examples),
            "warnings": list(found.warnings),
        }
    )
    if found.setting:
        value = preset_of(found.setting)
        setting = f"{found.setting}={value}" if value else f"{found.setting}.enabled=false"
        note = "put your value for the preset's; to another --out" if value else "to another --out"
        terminal.next(f"ingot data build ... --set '{setting}'   ({note})")
    elif found.rules and not args.dropped_by:
        terminal.next(f"ingot data inspect {args.folder} --dropped-by {found.rules[0][0]}")


def _verify(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.data.prepare import verify

    checked = verify(Path(args.folder), progress=terminal.progress)
    terminal.table([(one.folder, one.kind, one.checked) for one in checked], ("folder", "what", "every hash is right"))
    terminal.result({"verified": [vars(one) for one in checked]})


def _trace(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.report.trace import trace_step

    documents = trace_step(Path(args.run), args.step)
    rows = [(d.sample, d.tokens_in_sample, d.source, d.document_id[:12], d.url) for d in documents]
    terminal.table(rows, ("sample", "tokens", "source", "document", "url"), right=(0, 1))
    if documents and not documents[0].in_ledger:
        terminal.say(f"no checkpoint covers step {args.step} yet: this is what it will be trained on")
    terminal.result({"step": args.step, "documents": [vars(d) for d in documents]})
