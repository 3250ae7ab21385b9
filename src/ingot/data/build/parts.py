"""The files of a corpus that come from one input: kept documents, dropped ones, and the lineage of all."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import xxhash

from ingot.config import from_dict, to_dict
from ingot.data.build.corpus import json_line, jsonl_writer
from ingot.data.build.curate import dropped_row
from ingot.data.build.fates import Fates, drop_of
from ingot.data.dedup.substrings import RepeatedSpans, SubstringRules, cut
from ingot.data.lineage.table import write_lineage
from ingot.data.sources.url import canonical_url
from ingot.data.tasks.task import Context
from ingot.schema.corpus import CorpusPart
from ingot.schema.document import Drop
from ingot.storage import sha256_file


def write_parts(context: Context) -> dict:
    """Task. arguments: source, number (of the input), fates (how many folders), substrings (rules). inputs: curated
    file, the folders with the fates, and what found repeated passages (passages.Spans), if they are cut.

    Returns kept and dropped (schema CorpusPart, or None where there is none), lineage (LineagePart), and drops: stage
    -> rule -> documents.
    """
    source, number = context.task.arguments["source"], context.task.arguments["number"]
    curated, *rest = context.folders
    count = context.task.arguments["fates"]
    decided, passages = rest[:count], rest[count:]
    cutter = _Cutter(number, passages, context.task.arguments["substrings"]) if passages else None
    fates = iter(Fates(*decided).of(number))
    kept = context.out / f"{source}-{number:05d}.jsonl.gz"
    dropped = context.out / f"dropped-{number:05d}.jsonl.gz"
    sizes = {path: Counter(documents=0, text_bytes=0) for path in (kept, dropped)}
    drops: dict[str, Counter[str]] = {}

    def records() -> Iterator[dict]:
        """Every record, for the lineage; on the way its line goes into the file where it belongs."""
        with (curated / "rows.jsonl").open("rb") as lines, jsonl_writer(kept) as keep, jsonl_writer(dropped) as drop:
            fate = next(fates, None)
            for at, line in enumerate(lines):
                context.at(at)
                row = json.loads(line)
                if fate is not None and fate["row"] == at:
                    row = dropped_row(row, drop_of(fate, canonical_url(row["url"])))
                    line, fate = json_line(row), next(fates, None)
                elif cutter is not None and not row.get("stage"):
                    row = cutter(row)
                    line = json_line(row)
                if row.get("stage"):
                    drop(line)
                    size = len(row["text"].encode("utf-8", "surrogatepass"))
                    sizes[dropped].update(documents=1, text_bytes=size)
                    drops.setdefault(row["stage"], Counter())[row["rule"]] += 1
                    yield row
                else:
                    keep(line)
                    yield row | {"part": kept.name, "row": sizes[kept]["documents"]}
                    sizes[kept].update(documents=1, text_bytes=row["after_bytes"])
        if cutter is not None:
            cutter.finish()

    lineage = write_lineage(context.out / f"lineage-{number:05d}.parquet", records())
    return {
        "kept": _part(kept, source, sizes[kept]),
        "dropped": _part(dropped, source, sizes[dropped]),
        "lineage": to_dict(lineage),
        "drops": drops,
    }


class _Cutter:
    """Takes repeated passages out of the rows that stay, in order."""

    def __init__(self, number: int, folders: list[Path], rules: dict):
        self._rules = from_dict(SubstringRules, rules)
        self._spans = RepeatedSpans(number, folders[0], folders[1:], self._rules)
        self.finish = self._spans.finish

    def __call__(self, row: dict) -> dict:
        spans = self._spans.of(row["text"])
        if not spans:
            return row
        text = cut(row["text"], spans).strip()
        if len(text.split()) < self._rules.words:
            value = f"{len(text.split())} words left of {len(row['text'].split())}"
            return dropped_row(row, Drop("substrings", "substrings.too_short", value))
        after = text.encode("utf-8", "surrogatepass")
        notes = row["notes"] | {"substrings_cut": len(spans)}
        hashed = {"after": xxhash.xxh3_128_hexdigest(after), "after_bytes": len(after)}
        return row | {"text": text, "notes": notes} | hashed


def _part(path: Path, source: str, sizes: Counter[str]) -> dict | None:
    if not sizes["documents"]:
        path.unlink()
        return None
    return to_dict(CorpusPart(name=path.name, source=source, sha256=sha256_file(path), **sizes))
