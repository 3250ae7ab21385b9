"""`ingot data trace`: from a step to its documents, from a document or a page to its whole life."""

import argparse
from pathlib import Path

from ingot.cli.data.plain import plain
from ingot.cli.terminal import Terminal
from ingot.errors import DataMissing, UsageError

HELP = "from a training step to its documents, or from a document to where it came from and where it went"
_SHOWN_USES = 10


def configure(parser: argparse.ArgumentParser) -> None:
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--step", type=int, help="optimizer step of --run, from 1")
    wanted.add_argument("--doc", metavar="ID", help="a document id, or its first 6 or more digits")
    wanted.add_argument("--url", metavar="URL", help="a page in any spelling, and the pages below it")
    parser.add_argument("--run", metavar="DIR", help="folder of a run: which of its steps used the document")
    parser.add_argument("--data", metavar="DIR", help="folder of `data build --out` (default: that of --run)")
    parser.add_argument("-n", "--count", type=int, default=20, help="documents to show (default: 20)")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    if args.step is not None:
        _step(args, terminal)
    else:
        _documents(args, terminal)


def _step(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.report.lineage.trace import trace_step

    if not args.run:
        raise UsageError("--step without --run", rule="a step is of a run", fix="--run DIR --step N")
    documents = trace_step(Path(args.run), args.step)
    rows = [(d.sample, d.tokens_in_sample, d.source, d.document_id[:12], plain(d.url)) for d in documents]
    terminal.table(rows, ("sample", "tokens", "source", "document", "url"), right=(0, 1))
    if documents and not documents[0].in_ledger:
        terminal.say(f"no checkpoint covers step {args.step} yet: this is what it will be trained on")
    terminal.result({"step": args.step, "documents": [vars(d) for d in documents]})


def _documents(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.report.lineage.exposure import data_of
    from ingot.report.lineage.trace import purges_of, trace_documents

    if not (args.data or args.run):
        raise UsageError("neither --data nor --run", rule="a document is looked up in a folder of `data build --out`")
    training = Path(args.run) if args.run else None
    data = Path(args.data) if args.data else data_of(Path(args.run))
    wanted = {"doc": args.doc or "", "url": args.url or ""}
    lives = trace_documents(data, **wanted, run=training, limit=args.count)
    purges = purges_of(data, **wanted)
    for life in lives:
        _print_life(life, terminal)
    for record in purges:
        reason = f" ({record['reason']})" if record["reason"] else ""
        terminal.say(f"purged on {record['time']} by {record['who'] or 'unknown'}{reason}")
    if len(lives) == args.count:
        terminal.say(f"the first {args.count}; more with -n")
    terminal.result({"documents": [_facts(life) for life in lives], "purges": purges})
    if not lives and not purges:
        raise DataMissing(
            f"{data} has no record of {args.doc or args.url}",
            rule="lineage names every record of the crawl, kept or dropped",
            fix="look for the site: --url http://HOST/, or give another --data",
        )


def _print_life(life, terminal: Terminal) -> None:
    row = life.row
    terminal.say(f"\n{row['id']}  {plain(row['url'])}")
    facts = [
        ("record", f"{row['record_id']} in {row['file']} (source {row['source']})"),
        ("extracted", f"{row['before_bytes']:,} bytes, XXH3 {row['before']}" if row["before"] else "nothing"),
        ("decisions", f"language {row['language'] or 'not asked'}; notes {row['notes']}"),
    ]
    if row["rule"]:
        facts.append(("dropped", f"by {row['rule']}: {row['value']}".rstrip(": ")))
    else:
        facts.append(
            ("kept", f"{row['after_bytes']:,} bytes, XXH3 {row['after']}, {row['part']} line {row['row'] + 1}")
        )
    if life.place:
        place = life.place
        facts.append(("tokens", f"{place.tokens:,} from {place.start:,} in {place.split}/{place.shard}"))
    if life.seen:
        facts.append((f"run {life.seen.name}", _seen(life)))
    width = max(len(name) for name, _ in facts)
    terminal.say("\n".join(f"  {name:<{width}}  {plain(text)}" for name, text in facts))


def _seen(life) -> str:
    past = [use for use in life.uses if not use.to_come]
    coming = [use for use in life.uses if use.to_come]
    told = f"{life.seen.samples:,} samples of {life.seen.trained_steps:,} steps"
    if past:
        told += ": " + ", ".join(f"step {use.step} sample {use.sample}" for use in past[:_SHOWN_USES])
        told += ", .." if len(past) > _SHOWN_USES else ""
    if life.seen.checkpoints:
        told += f"; in the checkpoints of steps {', '.join(map(str, life.seen.checkpoints))}"
    if life.seen.unknown_steps:
        told += f"; unknown for steps 1 to {life.seen.unknown_steps}, trained on other tokens"
    if coming:
        told += f"; next at step {coming[0].step}"
    return told


def _facts(life) -> dict:
    return {
        "record": life.row,
        "place": vars(life.place) if life.place else None,
        "uses": [vars(use) for use in life.uses],
        "run": vars(life.seen) if life.seen else None,
    }
