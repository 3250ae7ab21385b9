"""`ingot data trace`: the documents of a training step, or the history of a document or a page."""

import argparse
from pathlib import Path

from ingot.cli.arguments import MOST_STEPS, count, place
from ingot.cli.terminal import Terminal
from ingot.errors import DataMissing, UsageError
from ingot.value_names import printable

_SHOWN_USES = 10


def configure_trace(parser: argparse.ArgumentParser) -> None:
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "--step", type=count("step", 1, MOST_STEPS), metavar="N", help="optimizer step of --run, counted from 1"
    )
    wanted.add_argument("--doc", metavar="ID", help="document id, or at least its first 6 digits")
    wanted.add_argument(
        "--url", metavar="URL", help="the page with this URL, in any equivalent form, and pages below it"
    )
    wanted.add_argument(
        "--quarantine", type=place, metavar="LIST", help="the documents of this quarantine list (ingot explain spike)"
    )
    parser.add_argument(
        "--run", type=place, metavar="DIR", help="run folder; without --step: list its steps with the page"
    )
    parser.add_argument(
        "--data",
        type=place,
        metavar="DIR",
        help="output folder of `ingot data build` (default: the folder of the run's tokens)",
    )
    parser.add_argument(
        "-n", "--count", type=count("count", 1, 10**9), default=20, metavar="N", help="documents to show (default: 20)"
    )


def run_trace(args: argparse.Namespace, terminal: Terminal) -> None:
    if args.step is not None:
        _step(args, terminal)
    else:
        _documents(args, terminal)


def _step(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.report.lineage.trace import trace_step

    if not args.run:
        raise UsageError(
            "E-TRACE-NO-RUN",
            "--step is given without --run",
            rule="--step needs the run folder to which the step belongs",
            fix="add --run: ingot data trace --run RUN --step N",
        )
    documents = trace_step(Path(args.run), args.step)
    rows = [(d.sample, d.tokens_in_sample, d.source, d.document_id[:12], printable(d.url)) for d in documents]
    terminal.table(rows, ("sample", "tokens", "source", "document", "url"), right=(0, 1))
    if replaced := sorted({d.sample for d in documents if d.replaced}):
        terminal.say(f"in the place of windows in quarantine: the samples {', '.join(map(str, replaced))}")
    if documents and not documents[0].trained:
        terminal.say(f"step {args.step} changed no weights: its update was skipped, or its data passed")
    if documents and not documents[0].in_ledger:
        terminal.say(f"no checkpoint covers step {args.step} yet: these are the documents that it will use")
    terminal.result({"step": args.step, "documents": [vars(d) for d in documents]})


def _documents(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.report.lineage.exposure import data_of
    from ingot.report.lineage.trace import purges_of, trace_documents
    from ingot.schema.quarantine import documents_of

    if not (args.data or args.run):
        raise UsageError(
            "E-TRACE-NO-DATA",
            "neither --data nor --run is given",
            rule="a document is looked up in a folder of `ingot data build --out`",
            fix="add --data: ingot data trace --data DIR --doc ID",
        )
    training = Path(args.run) if args.run else None
    data = Path(args.data) if args.data else data_of(Path(args.run))
    listed = documents_of(Path(args.quarantine)) if args.quarantine else frozenset[str]()
    doc, url = args.doc or "", args.url or ""
    histories = trace_documents(data, doc=doc, url=url, listed=listed, run=training, limit=args.count)
    purges = purges_of(data, doc=doc, url=url, listed=listed)
    for history in histories:
        _print_history(history, terminal)
    for record in purges:
        reason = f" ({record['reason']})" if record["reason"] else ""
        terminal.say(f"purged on {record['time']} by {record['who'] or 'unknown'}{reason}")
    if len(histories) == args.count:
        terminal.say(f"only the first {args.count} are shown; -n shows more")
    terminal.result({"documents": [_facts(history) for history in histories], "purges": purges})
    if not histories and not purges:
        raise DataMissing(
            "E-RECORD-NOT-FOUND",
            f"{data} has no record of {args.doc or args.url or f'the documents of {args.quarantine}'}",
            rule="lineage has every record of the crawl, kept or dropped",
            fix="search for the site with --url http://HOST/, or name another folder with --data",
            wanted=args.doc or args.url or args.quarantine,
        )


def _print_history(history, terminal: Terminal) -> None:
    row = history.row
    terminal.say(f"\n{row['id']}  {printable(row['url'])}")
    facts = [
        ("record", f"{row['record_id']} in {row['file']} (source {row['source']})"),
        ("extracted", f"{row['before_bytes']:,} bytes, XXH3 {row['before']}" if row["before"] else "nothing"),
        ("decisions", f"language {row['language'] or 'not identified'}; notes {row['notes']}"),
    ]
    if row["rule"]:
        facts.append(("dropped", f"by {row['rule']}: {row['value']}".rstrip(": ")))
    else:
        facts.append(
            ("kept", f"{row['after_bytes']:,} bytes, XXH3 {row['after']}, {row['part']} line {row['row'] + 1}")
        )
    if history.place:
        place = history.place
        facts.append(("tokens", f"{place.tokens:,} from {place.start:,} in {place.split}/{place.shard}"))
    if history.seen:
        facts.append((f"run {history.seen.name}", _seen(history)))
    width = max(len(name) for name, _ in facts)
    terminal.say("\n".join(f"  {name:<{width}}  {printable(text)}" for name, text in facts))


def _seen(history) -> str:
    past = [use for use in history.uses if not use.to_come]
    coming = [use for use in history.uses if use.to_come]
    text = f"{history.seen.samples:,} samples of {history.seen.trained_steps:,} steps"
    if past:
        text += ": " + ", ".join(f"step {use.step} sample {use.sample}" for use in past[:_SHOWN_USES])
        text += ", .." if len(past) > _SHOWN_USES else ""
    if history.seen.checkpoints:
        text += f"; in the checkpoints of steps {', '.join(map(str, history.seen.checkpoints))}"
    if history.seen.unknown_steps:
        text += f"; unknown for steps 1 to {history.seen.unknown_steps}, trained on other tokens"
    if coming:
        text += f"; next at step {coming[0].step}"
    return text


def _facts(history) -> dict:
    return {
        "record": history.row,
        "place": vars(history.place) if history.place else None,
        "uses": [vars(use) for use in history.uses],
        "run": vars(history.seen) if history.seen else None,
    }
