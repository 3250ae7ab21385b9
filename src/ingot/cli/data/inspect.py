"""`ingot data inspect`: real examples of what was kept or dropped, what was edited, and what other limits would do."""

import argparse
from pathlib import Path

from ingot.cli.data.plain import plain
from ingot.cli.terminal import Terminal

HELP = "what was kept or dropped, and why, with examples"
_EXCERPT = 300


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of `data build --out`, or a corpus folder")
    parser.add_argument("--dropped-by", default="", metavar="RULE", help="a rule or stage (default: kept documents)")
    parser.add_argument("-n", "--count", type=int, default=5, help="examples to show (default: 5)")
    parser.add_argument("--url", default="", metavar="TEXT", help="only pages whose URL contains it (default: all)")
    parser.add_argument("--domain", default="", metavar="HOST", help="only this site and its subdomains (default: all)")
    parser.add_argument("--language", default="", metavar="CODE", help="only what was found to be in it (default: all)")
    parser.add_argument("--edited", action="store_true", help="only kept documents whose text was changed")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict
    from ingot.data.build.recipe import value_of
    from ingot.data.build.stages import funnel_table
    from ingot.data.lineage.inspect import inspect
    from ingot.data.lineage.purge.history import REMOVED

    what = f"dropped by {args.dropped_by}" if args.dropped_by else "kept"
    filters = {"url": args.url, "domain": args.domain, "language": args.language, "edited": args.edited}
    found = inspect(Path(args.folder), dropped_by=args.dropped_by, count=args.count, **filters)
    if any(filters.values()) and not found.total:
        given = ", ".join(f"{name} {value}" for name, value in filters.items() if value)
        terminal.say(f"no page {what} fits {given}")
    elif not args.dropped_by:
        terminal.say(f"{found.funnel[0].documents_in:,} records")
        header, rows = funnel_table(found.funnel)
        terminal.table(rows, header, right=(1, 2))
        terminal.say()
        terminal.table([(f"{n:,}", rule) for rule, n in found.rules], ("dropped", "rule"), right=(0,))
        terminal.say()
    if args.dropped_by == REMOVED:
        terminal.say("these were taken out of the finished folder (data purge): nothing of them is left to show")
    for warning in found.warnings:
        terminal.say(f"warning: {warning}")
    for name, counts in (("domains", found.domains), ("languages", found.languages)):
        if counts:
            terminal.say(f"{name}: " + ", ".join(f"{one} {n:,}" for one, n in counts))
    for limit in found.limits:
        side = "at least" if limit.below else "at most"
        terminal.say(f"with {side} {limit.limit:g} it would let {limit.kept:,} of these {limit.dropped:,} pass")
    if found.examples:
        terminal.say(f"{len(found.examples)} of {found.total:,} documents {what}:")
    for number, row in enumerate(found.examples, 1):
        excerpt = " ".join(row["text"][:_EXCERPT].split())
        reason = "  ".join(filter(None, (row.get("rule"), row.get("value"), f"in {row['file']}", _edits(row))))
        terminal.say("\n" + plain("\n   ".join(filter(None, (f"#{number} {row['url']}", reason, excerpt)))))
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
        note = "put your value for the preset's; to another --out" if value else "to another --out"
        terminal.next(f"ingot data build ... --set '{setting}'   ({note})")
    elif not args.dropped_by and (rules := [rule for rule, _ in found.rules if rule != REMOVED]):
        terminal.next(f"ingot data inspect {args.folder} --dropped-by {rules[0]}")


def _edits(row: dict) -> str:
    """What happened to the text of a kept document, "" without lineage or edit."""
    if row.get("rule") or not row.get("before_bytes"):
        return ""
    notes = ", ".join(f"{name} {value}" for name, value in (row.get("notes") or {}).items())
    change = f"{row['before_bytes']:,} bytes"
    if row["after_bytes"] != row["before_bytes"]:
        change += f" -> {row['after_bytes']:,}"
    return f"{change} ({notes})" if notes else change
