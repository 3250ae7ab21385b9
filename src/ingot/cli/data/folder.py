"""`ingot data inspect`, `card`, `verify` and `index`: actions on a finished folder of `data build --out`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ingot.cli.arguments import count, place
from ingot.cli.terminal import Terminal
from ingot.schema.corpus import FunnelStage
from ingot.units import counted
from ingot.value_names import printable

_EXCERPT_CHARACTERS = 300


def configure_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=place, metavar="DIR", help="output folder of `ingot data build`, or corpus folder"
    )
    parser.add_argument(
        "--dropped-by",
        default="",
        metavar="RULE",
        help="show documents that this rule or stage dropped (default: kept documents)",
    )
    parser.add_argument(
        "-n", "--count", type=count("count", 0, 10**9), default=5, metavar="N", help="examples to show (default: 5)"
    )
    parser.add_argument("--url", default="", metavar="TEXT", help="only pages whose URL contains TEXT (default: all)")
    parser.add_argument("--domain", default="", metavar="HOST", help="only this site and its subdomains (default: all)")
    parser.add_argument(
        "--language", default="", metavar="CODE", help="only documents identified as this language (default: all)"
    )
    parser.add_argument("--edited", action="store_true", help="only kept documents whose text was changed")


def run_inspect(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict
    from ingot.data.build.recipe import value_of
    from ingot.data.lineage.inspect import inspect
    from ingot.data.lineage.purge.history import REMOVED

    what = f"dropped by {args.dropped_by}" if args.dropped_by else "kept"
    filters = {"url": args.url, "domain": args.domain, "language": args.language, "edited": args.edited}
    found = inspect(Path(args.folder), dropped_by=args.dropped_by, count=args.count, **filters)
    if any(filters.values()) and not found.total:
        given = ", ".join(f"{name} {value}" for name, value in filters.items() if value)
        terminal.say(f"no page {what} matches {given}")
    elif not args.dropped_by:
        show_funnel(found.funnel, terminal)
        terminal.say()
        terminal.table([(f"{n:,}", rule) for rule, n in found.rules], ("dropped", "rule"), right=(0,))
        terminal.say()
    if args.dropped_by == REMOVED:
        terminal.say("these documents were removed by `ingot data purge`, so there is no text to show")
    for warning in found.warnings:
        terminal.say(f"warning: {warning}")
    for name, counts in (("domains", found.domains), ("languages", found.languages)):
        if counts:
            terminal.say(f"{name}: " + ", ".join(f"{one} {n:,}" for one, n in counts))
    for limit in found.limits:
        side = "at least" if limit.below else "at most"
        terminal.say(
            f"a limit of {side} {limit.limit:g} would keep {limit.kept:,} of these {limit.dropped:,} documents"
        )
    if found.examples:
        terminal.say(f"{len(found.examples)} of {found.total:,} documents {what}:")
    for number, row in enumerate(found.examples, 1):
        excerpt = " ".join(row["text"][:_EXCERPT_CHARACTERS].split())
        reason = "  ".join(filter(None, (row.get("rule"), row.get("value"), f"in {row['file']}", _edits(row))))
        terminal.say("\n" + printable("\n   ".join(filter(None, (f"#{number} {row['url']}", reason, excerpt)))))
    terminal.result(
        {
            "funnel": [to_dict(stage) for stage in found.funnel],
            "rules": dict(found.rules),
            "total": found.total,
            "setting": found.setting,
            "examples": list(found.examples),
            "warnings": list(found.warnings),
            "domains": dict(found.domains),
            "languages": dict(found.languages),
            "limits": [to_dict(limit) for limit in found.limits],
        }
    )
    if found.setting:
        value = value_of(found.setting)
        setting = f"{found.setting}={value}" if value else f"{found.setting}.enabled=false"
        if found.setting == "quarantine":  # a list is what is used or not
            setting = "quarantine.files=[]"
        note = "choose the value; use another --out" if value else "use another --out"
        terminal.next(f"ingot data build ... --set '{setting}'   ({note})")
    elif not args.dropped_by and (rules := [rule for rule, _ in found.rules if rule != REMOVED]):
        terminal.next(f"ingot data inspect {args.folder} --dropped-by {rules[0]}")


def _edits(row: dict) -> str:
    """Return a description of how the text of a kept document was changed, "" if there is no lineage."""
    if row.get("rule") or not row.get("before_bytes"):
        return ""
    notes = ", ".join(f"{name} {value}" for name, value in (row.get("notes") or {}).items())
    change = f"{row['before_bytes']:,} bytes"
    if row["after_bytes"] != row["before_bytes"]:
        change += f" -> {row['after_bytes']:,}"
    return f"{change} ({notes})" if notes else change


def configure_card(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=place, metavar="DIR", help="output folder of `ingot data build`")
    parser.add_argument(
        "--out", type=place, metavar="FILE", default="card.html", help="HTML file to write (default: card.html)"
    )
    parser.add_argument(
        "--samples",
        type=count("samples", 0, 10**6),
        default=10,
        metavar="N",
        help="sample texts per source and per rule (default: 10)",
    )


def run_card(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.report.card import card_facts, write_card

    out = Path(args.out)
    facts = write_card(Path(args.folder), out, max(args.samples, 0))
    terminal.say(f"{facts.kept:,} of {facts.records:,} records were kept, from {facts.domain_count:,} hosts; see {out}")
    terminal.result({"card": str(out)} | card_facts(facts))


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=place, metavar="DIR", help="output folder of `ingot data build`, corpus folder or token folder"
    )


def run_verify(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.data.build.prepare import verify

    checked = verify(Path(args.folder), progress=terminal.progress)
    terminal.table(
        [(one.folder, one.kind, one.checked) for one in checked], ("folder", "kind", "checked, every hash is correct")
    )
    terminal.result({"verified": [vars(one) for one in checked]})


def configure_index(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=place, metavar="DIR", help="output folder of `ingot data build`, or corpus folder"
    )
    parser.add_argument(
        "--out",
        type=place,
        metavar="INDEX",
        help="folder of the index; an existing index is added to (default: DIR/index)",
    )


def run_index(args: argparse.Namespace, terminal: Terminal) -> None:
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
    terminal.say(f"{counted(documents, 'document')} of {corpus} added; {out} now has {total:,}")
    terminal.result({"index": str(out), "added": documents, "documents": total})
    terminal.next(f"ingot data build MORE... --against {out} --out NEW")


def show_funnel(funnel: Sequence[FunnelStage], terminal: Terminal) -> None:
    """Print the number of records, and a table of the documents after each stage."""
    from ingot.data.build.stages import funnel_table

    terminal.say(f"{funnel[0].documents_in:,} records")
    header, rows = funnel_table(funnel)
    terminal.table(rows, header, right=(1, 2))
