"""`ingot data purge`: remove documents from a finished folder, list the runs that used them, prove the removal."""

import argparse
from pathlib import Path

from ingot.cli.arguments import place
from ingot.cli.terminal import Terminal
from ingot.units import counted
from ingot.value_names import printable

_SHOWN = 10


def configure_purge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=place, metavar="DIR", help="output folder of `ingot data build`")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--url", metavar="URL", default="", help="the page with this URL, in any equivalent form")
    wanted.add_argument("--domain", metavar="HOST", default="", help="the pages of this site and its subdomains")
    wanted.add_argument("--doc", metavar="ID", default="", help="the document with this id")
    wanted.add_argument(
        "--pattern",
        metavar="REGEX",
        default="",
        help="documents whose text (if dropped: excerpt), URL or recorded value matches",
    )
    wanted.add_argument(
        "--quarantine", type=place, metavar="LIST", help="the documents of this quarantine list (ingot explain spike)"
    )
    parser.add_argument(
        "--copies", action="store_true", help="also purge records that were dropped as copies of purged documents"
    )
    parser.add_argument("--reason", metavar="TEXT", default="", help="reason to record in DIR/purges.jsonl")
    parser.add_argument(
        "--runs",
        nargs="+",
        metavar="RUN",
        default=[],
        help="run folders that train on DIR; runs in folders near DIR are found without this option",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the documents and the runs that used them; change nothing"
    )


def run_purge(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.data.lineage.purge.purge import purge
    from ingot.data.lineage.purge.request import PurgeRequest
    from ingot.errors import DataMissing
    from ingot.report.lineage.exposure import exposure, runs_on
    from ingot.schema.quarantine import documents_of

    data = Path(args.folder)
    runs = runs_on(data, [Path(one) for one in args.runs])
    request = PurgeRequest(
        url=args.url,
        domain=args.domain,
        doc=args.doc,
        pattern=args.pattern,
        quarantine=documents_of(Path(args.quarantine)) if args.quarantine else frozenset(),
        copies=args.copies,
    )
    outcome = purge(
        data,
        request,
        reason=args.reason,
        find_runs=lambda documents: [vars(exposure(one, documents)) for one in runs],
        dry_run=args.dry_run,
        progress=terminal.progress,
    )
    if outcome.finished:
        terminal.say(f"the interrupted purge of {outcome.finished['time']} is now finished and verified")
    records = outcome.targets.records
    kept = sum(target.kept for target in records)
    if outcome.earlier:
        terminal.say(f"nothing is left to remove since the purge of {outcome.earlier['time']}")
    elif not records:
        raise DataMissing(
            "E-PURGE-NOTHING",
            f"no record in {data} matches the request; nothing was changed",
            rule="a purge removes at least one record",
            fix=f"search: ingot data trace --data {data} --url URL, or ingot data inspect {data} --domain HOST",
            data=str(data),
        )
    else:
        verb = "would be removed" if args.dry_run else "removed"
        tokens = sum(place.tokens for place in outcome.locations)
        dropped = counted(len(records) - kept, "dropped record")
        terminal.say(f"{verb}: {counted(kept, 'document')} with {counted(tokens, 'token')}, {dropped}")
        terminal.table(
            [(t.id[:12], t.rule or "kept", printable(t.url)) for t in records[:_SHOWN]], ("document", "was", "url")
        )
        _say_more(len(records), terminal)
        if heldout := sum(place.split == "heldout" for place in outcome.locations):
            terminal.say(f"{heldout:,} of them were held out: no run was trained on them, but evaluations used them")
    _print_runs(outcome.runs, terminal)
    _print_copies(outcome.targets.copies, terminal)
    _print_proof(outcome, data, terminal)
    terminal.result(
        {
            "dry_run": args.dry_run,
            "documents": [vars(target) for target in records],
            "copies": [vars(copy) for copy in outcome.targets.copies],
            "runs": list(outcome.runs),
            "record": outcome.record,
            "proof": vars(outcome.proof) if outcome.proof else None,
            "finished": outcome.finished,
            "earlier": outcome.earlier,
        }
    )
    if outcome.record:
        commands = [f"ingot train {one['run']} --accept-change data.tokens" for one in outcome.runs]
        terminal.next(*(commands or [f"ingot data verify {data}"]))


def _say_more(total: int, terminal: Terminal) -> None:
    if total > _SHOWN:
        terminal.say(f"and {total - _SHOWN:,} more")


def _print_runs(runs, terminal: Terminal) -> None:
    for one in runs:
        text = f"run {one['run']} ({counted(one['trained_steps'], 'step')} saved): "
        if one["samples"]:
            text += f"used {one['documents']:,} of these documents in {counted(one['samples'], 'sample')}"
            text += f", first at step {one['first_step']}"
        else:
            text += "used none of these documents"
            text += f" after step {one['unknown_steps']}" if one["unknown_steps"] else ""
        if one["unknown_steps"]:
            text += f"; the tokens of steps up to {one['unknown_steps']} are no longer known"
        terminal.say(text)
        if one["checkpoints"]:
            terminal.say(f"  checkpoints that may contain them: steps {', '.join(map(str, one['checkpoints']))}")
        if one["training_now"]:
            terminal.say(
                "  this run is training now with the old tokens open: stop it, then continue it with the command below"
            )


def _print_copies(copies, terminal: Terminal) -> None:
    if not copies:
        return
    terminal.say(
        f"{len(copies):,} records were dropped as copies of these; a later build could keep them (see --copies):"
    )
    terminal.table([(copy.id[:12], copy.rule, printable(copy.url)) for copy in copies[:_SHOWN]])
    _say_more(len(copies), terminal)


def _print_proof(outcome, data: Path, terminal: Terminal) -> None:
    from ingot.data.lineage.records import rows_of

    proof = outcome.proof
    if not proof:
        return
    terminal.say(
        f"scanned {proof.rows:,} rows, {proof.shards:,} shards, {proof.tokens:,} tokens: no purged document is left"
    )
    if proof.probes and not proof.shared:
        terminal.say(f"none of {proof.probes:,} sampled sequences of 16 purged tokens is in a remaining document")
    if proof.shared:
        terminal.say(f"{len(proof.shared):,} remaining documents share text with the purge (sequences of 16 tokens):")
        shown = dict(list(proof.shared.items())[:_SHOWN])
        urls = {row["id"]: row["url"] for row in rows_of(data, shown)}
        terminal.table([(one[:12], f"{n} of {proof.probes}", printable(urls.get(one, ""))) for one, n in shown.items()])
        _say_more(len(proof.shared), terminal)
    if proof.vocabulary:
        terminal.say(f"{proof.vocabulary} tokens of the tokenizer match the pattern: it was trained on purged texts")
