"""`ingot data purge`: take documents out of a finished folder, list who saw them, prove that they are gone."""

import argparse
from pathlib import Path

from ingot.cli.data.plain import plain
from ingot.cli.terminal import Terminal

HELP = "take a page, a site or a document out of a finished folder, and prove that it is gone"
_SHOWN = 10


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of `data build --out`")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--url", metavar="URL", default="", help="a page, in any spelling of its URL")
    wanted.add_argument("--domain", metavar="HOST", default="", help="a site with its subdomains")
    wanted.add_argument("--doc", metavar="ID", default="", help="a document id")
    wanted.add_argument(
        "--pattern", metavar="REGEX", default="", help="texts (of dropped records: their excerpts) and URLs that match"
    )
    parser.add_argument("--copies", action="store_true", help="also what was dropped as a copy of what is purged")
    parser.add_argument("--reason", metavar="TEXT", default="", help="kept in DIR/purges.jsonl (default: none)")
    parser.add_argument(
        "--runs", nargs="+", metavar="RUN", default=[], help="runs elsewhere that train on DIR (those beside are found)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go and who saw it; change nothing")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.data.lineage.purge.purge import purge
    from ingot.data.lineage.purge.request import PurgeRequest
    from ingot.errors import DataMissing
    from ingot.report.lineage.exposure import exposure, runs_on

    data = Path(args.folder)
    runs = runs_on(data, [Path(one) for one in args.runs])
    request = PurgeRequest(url=args.url, domain=args.domain, doc=args.doc, pattern=args.pattern, copies=args.copies)
    outcome = purge(
        data,
        request,
        reason=args.reason,
        find_runs=lambda documents: [vars(exposure(one, documents)) for one in runs],
        dry_run=args.dry_run,
        progress=terminal.progress,
    )
    if outcome.finished:
        terminal.say(f"the purge of {outcome.finished['time']}, which was interrupted, is finished and proven")
    records = outcome.targets.records
    kept = sum(target.kept for target in records)
    if outcome.earlier:
        terminal.say(f"nothing is left to remove since the purge of {outcome.earlier['time']}")
    elif not records:
        raise DataMissing(
            f"nothing in {data} fits: no record changed",
            rule="a request to remove what is not there is more often misspelt than done",
            fix="look it up: ingot data trace --data DIR --url URL, or ingot data inspect DIR --domain HOST",
        )
    else:
        verb = "would go" if args.dry_run else "gone"
        tokens = sum(place.tokens for place in outcome.locations)
        terminal.say(f"{verb}: {kept:,} documents with {tokens:,} tokens, {len(records) - kept:,} dropped records")
        terminal.table(
            [(t.id[:12], t.rule or "kept", plain(t.url)) for t in records[:_SHOWN]], ("document", "was", "url")
        )
        _say_more(len(records), terminal)
        if heldout := sum(place.split == "heldout" for place in outcome.locations):
            terminal.say(f"{heldout:,} of them were held out: no run trained on them, evaluations used them")
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
        told = f"run {one['run']} ({one['trained_steps']:,} steps saved): "
        if one["samples"]:
            told += f"saw {one['documents']:,} of them in {one['samples']:,} samples, first at step {one['first_step']}"
        else:
            told += "saw none of them" if not one["unknown_steps"] else "saw none of them since"
        if one["unknown_steps"]:
            told += f" step {one['unknown_steps']}; up to there it trained on tokens that are not known any more"
        terminal.say(told)
        if one["checkpoints"]:
            terminal.say(f"  checkpoints that may know them: steps {', '.join(map(str, one['checkpoints']))}")
        if one["training_now"]:
            terminal.say("  it is training now, on tokens it has open: stop it, then continue with the command below")


def _print_copies(copies, terminal: Terminal) -> None:
    if not copies:
        return
    terminal.say(f"{len(copies):,} records were dropped as copies of these; another build could keep them (--copies):")
    terminal.table([(copy.id[:12], copy.rule, plain(copy.url)) for copy in copies[:_SHOWN]])
    _say_more(len(copies), terminal)


def _print_proof(outcome, data: Path, terminal: Terminal) -> None:
    from ingot.data.lineage.records import rows_of

    proof = outcome.proof
    if not proof:
        return
    terminal.say(
        f"scanned: {proof.rows:,} rows, {proof.shards:,} shards with {proof.tokens:,} tokens: none of it is left"
    )
    if proof.probes and not proof.shared:
        terminal.say(f"none of {proof.probes:,} stretches of 16 of its tokens stands in another document")
    if proof.shared:
        terminal.say(f"{len(proof.shared):,} documents that stay share text with it (stretches of 16 tokens):")
        shown = dict(list(proof.shared.items())[:_SHOWN])
        urls = {row["id"]: row["url"] for row in rows_of(data, shown)}
        terminal.table([(one[:12], f"{n} of {proof.probes}", plain(urls.get(one, ""))) for one, n in shown.items()])
        _say_more(len(proof.shared), terminal)
    if proof.vocabulary:
        terminal.say(f"{proof.vocabulary} tokens of the tokenizer match the pattern: it had learned from these texts")
