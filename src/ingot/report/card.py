"""The data card: a `ReportPage` about a corpus and its tokens, as one self-contained HTML file.

Texts of a crawl may be hostile: they are shortened, control and direction characters are replaced, and the renderer
escapes them and forbids scripts and loading (report/render/markup.py).
"""

import re
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from ingot import __version__
from ingot.config import to_dict
from ingot.data.build.stages import SWITCHED_OFF
from ingot.data.lineage.card import KEPT_CHARACTERS, CardFacts, SampleText, gather_card
from ingot.errors import UsageError
from ingot.report.facts import RunData
from ingot.report.render.markup import render_html
from ingot.report.render.page import (
    Block,
    Folded,
    HeadlineFigure,
    LabeledValues,
    ReportPage,
    Sample,
    Section,
    TableBlock,
    Text,
)
from ingot.report.sections import funnel_section
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic
from ingot.units import counted, format_bytes, format_count, plural

# Control characters except tab and line feed, and characters that change the text direction.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_VALUE_CHARACTERS, _URL_CHARACTERS = 160, 200
_FREQUENT = 3  # most frequent values that show without opening a table


def write_card(data: Path, out: Path, samples: int = 10) -> CardFacts:
    """Write the card of `data`, a folder of `data build --out`, to the file `out`; return the facts on the card.

    samples: sample texts per source and per rule. Raises UsageError if `out` is inside the folder `data`: a card
    contains texts, and a purge of the folder does not remove them.
    """
    if data.resolve() in out.resolve().parents:
        raise UsageError(
            "E-CARD-IN-DATA",
            f"the card {out} would be inside the data folder {data}",
            rule="a card contains texts of the crawl, and a purge of the data folder does not remove them from it",
            fix="write the card to another folder: --out card.html",
            out=str(out),
            data=str(data),
        )
    facts = gather_card(data, samples)
    write_atomic(out, render_html(card(facts, f"ingot data card {data} --out {out}")).encode("utf-8", "replace"))
    return facts


def card_facts(facts: CardFacts) -> dict[str, Any]:
    """Return the facts as JSON values, with hashes instead of whole manifests."""
    values = {k: v for k, v in asdict(facts).items() if k not in ("corpus", "tokens")}
    return values | {
        "funnel": [to_dict(stage) for stage in facts.corpus.funnel],
        "recipe_sha256": facts.corpus.config_sha256,
        "fingerprints": {split: manifest.fingerprint() for split, manifest in facts.tokens.items()},
    }


def card(facts: CardFacts, command: str) -> ReportPage:
    """Return the page of a data card. command: the command that makes the card."""
    sections = (
        funnel_section(RunData(folder=RunFolder(Path()), corpus=facts.corpus, tokens=facts.tokens.get("train"))),
        _sources(facts),
        _documents(facts),
        _edits(facts),
        _clusters(facts),
        _kept(facts),
        _dropped(facts),
        _purges(facts),
        _provenance(facts),
    )
    return ReportPage(
        title=f"Data card: {facts.name}",
        subtitle=f"{counted(len(facts.corpus.inputs), 'crawl file')}, {counted(facts.records, 'record')}",
        headline=_headline(facts),
        command=command,
        sections=[section for section in sections if section],
        footer=f"Written by ingot {__version__} from manifests and lineage. Texts of a crawl: do not trust them.",
    )


def clean(text: str, limit: int) -> str:
    """Return the first `limit` characters of crawled text, with U+FFFD instead of control and direction characters,
    and with " …" if the text was longer."""
    cut = text[:limit]
    return _UNSAFE.sub("\ufffd", cut) + (" …" if len(text) > limit else "")


def _headline(facts: CardFacts) -> list[HeadlineFigure]:
    share = facts.kept / facts.records if facts.records else 0.0
    text_bytes = sum(source.text_bytes for source in facts.sources)
    sources = f"{len(facts.sources)} source" + "s" * (len(facts.sources) != 1)
    figures = [
        HeadlineFigure("Documents", format_count(facts.kept), f"{share:.1%} of {counted(facts.records, 'record')}"),
        HeadlineFigure("Text", format_bytes(text_bytes), f"{facts.domain_count:,} hosts, {sources}"),
    ]
    if facts.tokens:
        held = facts.tokens["heldout"].tokens if "heldout" in facts.tokens else 0
        train = facts.tokens["train"].tokens if "train" in facts.tokens else 0
        figures.append(HeadlineFigure("Training tokens", format_count(train), f"{format_count(held)} held out"))
    if facts.purges:
        gone = sum(len(record["documents"]) for record in facts.purges)
        figures.append(HeadlineFigure("Purged", f"{gone:,}", f"records in {len(facts.purges)} purges"))
    return figures


def _sources(facts: CardFacts) -> Section:
    rows = [
        (
            s.name,
            f"{s.records:,}",
            f"{s.documents:,}",
            format_bytes(s.text_bytes),
            *(f"{n:,}" for n in s.tokens.values()),
        )
        for s in facts.sources
    ]
    header = ("Source", "Records", "Kept", "Text", *(f"Tokens, {split}" for split in facts.tokens))
    blocks: list[Block] = [TableBlock(header, rows, right=tuple(range(1, len(header))))]
    if facts.warnings:
        blocks.append(TableBlock(("Warning",), [(warning,) for warning in facts.warnings]))
    return Section("sources", "Sources", blocks)


def _lengths(facts: CardFacts) -> tuple[tuple[str, int], ...]:
    return tuple((f"{format_bytes(low)} to {format_bytes(2 * low)}", count) for low, count in facts.lengths)


def _documents(facts: CardFacts) -> Section | None:
    """Return the section on the kept documents: their most frequent lengths, languages, hosts and encodings, and folded
    tables of all of them."""
    counts = {
        "Lengths": ("UTF-8 bytes of the text", _lengths(facts)),
        "Languages": ("as identified", facts.languages),
        "Hosts": (f"those with the most documents, of {facts.domain_count:,}", facts.domains),
        "Encodings": ("as they were crawled", facts.encodings),
    }
    most: list[tuple[str, str]] = []
    tables: list[Block] = []
    for title, (what, pairs) in counts.items():
        if not pairs:
            continue
        rows = [(clean(name, _URL_CHARACTERS), f"{n:,}", f"{n / max(facts.kept, 1):.1%}") for name, n in pairs]
        frequent = sorted(zip(pairs, rows, strict=True), key=lambda pair: -pair[0][1])[:_FREQUENT]
        more = ", .." if len(rows) > _FREQUENT else ""
        most.append((title, ", ".join(f"{name} {share}" for _, (name, _, share) in frequent) + more))
        caption = f"{title}: {what}"
        tables.append(TableBlock((title, "Documents", "Share"), rows, right=(1, 2), caption=caption, folded=True))
    return Section("documents", "Kept documents", [LabeledValues(most), *tables]) if most else None


def _edits(facts: CardFacts) -> Section | None:
    if not facts.edits:
        return None
    rows = [(name, f"{documents:,}", f"{total:,.0f}") for name, documents, total in facts.edits]
    text = "What stages counted in documents that were kept: lines cut, placeholders set, and the like."
    return Section("edits", "Edits", [Text(text), TableBlock(("Note", "Documents", "Sum"), rows, right=(1, 2))])


def _clusters(facts: CardFacts) -> Section | None:
    if not facts.clusters:
        return None
    rows = [(f"{size:,}", f"{count:,}", f"{(size - 1) * count:,}") for size, count in facts.clusters]
    text = "Clusters of near-duplicates by their number of documents. One of each cluster was kept."
    header = ("Documents", "Clusters", "Dropped")
    return Section(
        "duplicates", "Near-duplicates", [Text(text), TableBlock(header, rows, right=(0, 1, 2), folded=len(rows) > 12)]
    )


def _kept(facts: CardFacts) -> Section | None:
    kept = [sample for sample in facts.samples if not sample.rule]
    blocks: list[Block] = [Text("Beginnings of documents, drawn by hash.")]
    for source, samples in groupby(kept, key=lambda sample: sample.source):
        blocks.append(_folded(source, [_sample(sample, source) for sample in samples]))
    return Section("kept", "Kept", blocks) if kept else None


def _dropped(facts: CardFacts) -> Section | None:
    dropped = [sample for sample in facts.samples if sample.rule]
    by_rule: list[Block] = []
    for rule, samples in groupby(dropped, key=lambda sample: sample.rule):
        excerpts: list[Block] = [
            _sample(one, f"{rule} {clean(one.value, _VALUE_CHARACTERS)}".strip()) for one in samples
        ]
        by_rule.append(_folded(rule, excerpts))
    if not dropped:
        return None
    text = Text("Excerpts of dropped documents for every rule, drawn by hash.")
    return Section("dropped", "Dropped", [text, Folded(f"{len(by_rule)} {plural(len(by_rule), 'rule')}", by_rule)])


def _folded(name: str, samples: list[Block]) -> Folded:
    return Folded(f"{name}: {len(samples)} {plural(len(samples), 'sample')}", samples)


def _sample(sample: SampleText, label: str) -> Sample:
    return Sample(f"{label} · {clean(sample.url, _URL_CHARACTERS)}\n", clean(sample.text, KEPT_CHARACTERS))


def _purges(facts: CardFacts) -> Section | None:
    if not facts.purges:
        return None
    rows = [
        (
            str(record["time"]),
            str(record["by"]),
            f"{len(record['documents']):,}",
            f"{record['tokens']:,}",
            f"{len(record['runs'])}",
            clean(str(record["reason"]), _VALUE_CHARACTERS),
        )
        for record in facts.purges
    ]
    text = "Documents that were taken out after the build. They stay out of later builds of this folder."
    header = ("When", "By", "Records", "Tokens", "Runs", "Reason")
    return Section("purges", "Purges", [Text(text), TableBlock(header, rows, right=(2, 3, 4))])


def _provenance(facts: CardFacts) -> Section:
    off = [stage.name for stage in facts.corpus.funnel if stage.ran == SWITCHED_OFF]
    pairs = [("Switched off", ", ".join(off) or "nothing")]
    rows = [("corpus", facts.corpus_sha256), ("recipe", facts.corpus.config_sha256)]
    for split, manifest in facts.tokens.items():
        rows.append((f"token stream, {split}", manifest.fingerprint()))
    if manifest := next(iter(facts.tokens.values()), None):
        rows.append(("tokenizer", manifest.tokenizer_sha256))
        pairs.append(("Tokens", f"{manifest.dtype}, vocabulary {manifest.vocab_size:,}, end of text {manifest.eot_id}"))
    code = facts.corpus.recipe.get("plugins", {}).get("code", {})
    rows += [(f"plug-in {clean(name, 80)}", clean(str(one), 80)) for name, one in code.items()]
    inputs = [(clean(name, _URL_CHARACTERS), str(sha256)) for name, sha256 in sorted(facts.corpus.inputs.items())]
    return Section(
        "provenance",
        "Provenance",
        [
            LabeledValues(pairs),
            TableBlock(("What", "SHA-256"), rows),
            TableBlock(("Input", "SHA-256"), inputs, caption=counted(len(inputs), "input"), folded=len(inputs) > 4),
        ],
    )
