"""The inspection of a corpus: rules with their counts, examples, the setting of a rule, and the effect of other limits.

Counts and filters use the lineage, so only the parts with the examples are read. A folder without lineage, from an
older version, is read completely.
"""

import difflib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.data.build.corpus import cut_files, load_corpus, read_documents, read_dropped, read_jsonl
from ingot.data.build.recipe import setting_of
from ingot.data.build.stages import most_dropped
from ingot.data.lineage.records import OF_DOMAIN, host_of, lineage_connection, lineage_files, part_of, require_lineage
from ingot.errors import UsageError
from ingot.schema.corpus import FunnelStage

_TOP = 10
_SHARES = (0.25, 0.5, 0.75, 0.9)
# Most rules record the measured value and the limit ("12 < 50", "0.153 > 0.1"). Language and near-duplicates record
# only the measured value ("en 0.58", "0.912 with ID"), so _SIDE says whether their limit is a minimum.
_MEASURE = r"try_cast(regexp_extract(value, '^(?:[A-Za-z_-]+ )?(-?[0-9]+(?:\.[0-9]+)?)', 1) as double)"
_SIDE = (
    "case when rule = 'language.unsure' then '<' when rule = 'near_duplicates.similar' then '>' "
    "else regexp_extract(value, '^[^<>]*([<>])', 1) end"
)


@dataclass(frozen=True)
class RuleLimit:
    """The effect of another limit for a rule: `kept` of the `dropped` documents would pass it. below: True if the limit
    is a minimum.

    Later rules have not examined these documents, and may still drop them.
    """

    limit: float
    below: bool
    kept: int
    dropped: int


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection.

    funnel: the funnel of the whole corpus. rules: (rule, dropped documents) of the whole corpus, largest first.
    examples: rows of dropped documents (id, url, source, file, stage, rule, value, text), or of kept documents (..,
    text); with lineage also before_bytes, after_bytes and notes, which show the edits.
    total: the number of documents that the examples were chosen from. setting: the recipe key of the requested rule, or
    "". warnings: crawl files that are truncated. domains, languages: (name, number of these documents), largest first.
    limits: the effect of other limits, if the requested rule records a measured value.
    """

    funnel: tuple[FunnelStage, ...]
    rules: tuple[tuple[str, int], ...]
    examples: tuple[dict, ...]
    total: int
    setting: str
    warnings: tuple[str, ...]
    domains: tuple[tuple[str, int], ...] = ()
    languages: tuple[tuple[str, int], ...] = ()
    limits: tuple[RuleLimit, ...] = ()


def inspect(
    corpus: Path,
    *,
    dropped_by: str = "",
    count: int = 10,
    url: str = "",
    domain: str = "",
    language: str = "",
    edited: bool = False,
) -> Inspection:
    """Inspect a corpus folder. The examples are spread evenly over the corpus, and are the same in every call.

    dropped_by: a rule ("gopher.symbol_ratio") or a stage ("gopher"); "" selects kept documents. count: the number of
    examples. url: only documents whose URL contains this text. domain: only documents of this host and its subdomains.
    language: only documents with this identified language. edited: only documents whose text changed after extraction.
    Raises UsageError for a rule that dropped nothing, DataError for a folder that is not a corpus, or that has no
    lineage although a filter needs it.
    """
    corpus = corpus_folder(corpus)
    manifest = load_corpus(corpus)
    rules = tuple(most_dropped(manifest.funnel))
    if dropped_by:
        _require_known(dropped_by, list(rules), manifest.funnel)
    setting = setting_of(dropped_by) if dropped_by else ""
    facts = (manifest.funnel, rules)
    if lineage_files(corpus) or domain or language or edited:
        selection = _Selection(corpus, dropped_by, url, domain, language, edited)
        return Inspection(
            *facts,
            tuple(selection.examples(count)),
            selection.total,
            setting,
            cut_files(corpus),
            selection.top("domain"),
            selection.top("language"),
            tuple(selection.limits()) if dropped_by in dict(rules) else (),  # a stage has several measures
        )
    if dropped_by:
        rows = (row for row in read_dropped(corpus) if dropped_by in (row["rule"], row["stage"]))
    else:
        rows = (row for _, row in read_documents(corpus))
    chosen, total = _spread((row for row in rows if url in row["url"]), count)
    return Inspection(*facts, tuple(chosen), total, setting, cut_files(corpus))


class _Selection:
    """The documents that match the filters of `inspect`, found in the lineage."""

    def __init__(self, corpus: Path, dropped_by: str, url: str, domain: str, language: str, edited: bool):
        self.corpus, self._files = corpus, require_lineage(corpus)
        conditions, self._parameters = ["rule = ''"], []
        if dropped_by:
            conditions, self._parameters = ["? in (rule, stage) and rule <> ''"], [dropped_by]
        if url:
            conditions.append("contains(url, ?)")
            self._parameters.append(url)
        if domain:
            conditions.append(OF_DOMAIN)
            self._parameters += [host_of(domain), f".{host_of(domain)}"]
        if language:
            conditions.append("language = ?")
            self._parameters.append(language)
        if edited:
            conditions.append("before <> after and before <> ''")
        self._where = " and ".join(conditions)
        self.total: int = self._query(f"select count(*) from lineage where {self._where}")[0][0]

    def _query(self, query: str, parameters: Collection[Any] = ()) -> list[tuple]:
        with lineage_connection(self._files) as connection:
            return connection.execute(query, [*self._parameters, *parameters]).fetchall()

    def top(self, column: str) -> tuple[tuple[str, int], ...]:
        query = f"select {column}, count(*) as n from lineage where {self._where} and {column} <> '' "
        return tuple(self._query(query + f"group by 1 order by n desc, 1 limit {_TOP}"))

    def examples(self, count: int) -> list[dict]:
        """Return up to `count` evenly spaced documents, each with its text or excerpt."""
        step = max(self.total // max(count, 1), 1)
        place = "row_number() over (order by filename, file_row_number) - 1 as place"
        rows = self._query(
            f"select id, filename, part, before_bytes, after_bytes, notes "
            f"from (select *, {place} from lineage where {self._where}) "
            f"where place % {step} = 0 order by place limit {max(count, 0)}"
        )
        names = ("id", "filename", "part", "before_bytes", "after_bytes", "notes")
        found = [dict(zip(names, row, strict=True)) for row in rows]
        texts: dict[str, dict] = {}
        for part in dict.fromkeys(map(part_of, found)):
            texts |= _rows_of(self.corpus / part, {row["id"] for row in found if part_of(row) == part})
        edits = ("before_bytes", "after_bytes")
        return [
            texts[row["id"]] | {name: row[name] for name in edits} | {"notes": json.loads(row["notes"])}
            for row in found
        ]

    def limits(self) -> list[RuleLimit]:
        """Return the limits at which about a quarter, half, three quarters and nine tenths of the documents pass."""
        measured = f"select {_MEASURE} as measure, {_SIDE} as side from lineage where {self._where}"
        found = []
        for below, side, passes in ((True, "<", ">="), (False, ">", "<=")):
            # With a lower minimum the largest values pass first, with a higher maximum the smallest.
            quantiles = [1 - share if below else share for share in _SHARES]
            measures = f"select measure from ({measured}) where side = '{side}' and measure is not null"
            limits = self._query(f"select unnest(quantile_disc(measure, {quantiles})) from ({measures})")
            for limit in dict.fromkeys(limit for (limit,) in limits if limit is not None):
                query = f"select count(*) filter (where measure {passes} {limit!r}), count(*) from ({measures})"
                found.append(RuleLimit(limit, below, *self._query(query)[0]))
        return found


def _rows_of(part: Path, ids: set[str]) -> dict[str, dict]:
    found = {}
    for row in read_jsonl(part):
        if row["id"] in ids:
            found[row["id"]] = row
            if len(found) == len(ids):
                break
    return found


def corpus_folder(path: Path) -> Path:
    """Return the corpus folder in `path`, an output folder of `data build`; a corpus folder is returned unchanged."""
    return path / "corpus" if (path / "corpus" / "corpus.json").exists() else path


def _require_known(name: str, rules: list[tuple[str, int]], funnel: tuple[FunnelStage, ...]) -> None:
    known = [rule for rule, _ in rules] + [stage.name for stage in funnel if stage.dropped]
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    raise UsageError(
        "E-RULE-UNKNOWN",
        f"no document was dropped by {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
        rule="these rules dropped documents: " + (", ".join(rule for rule, _ in rules) or "none"),
        fix="ingot data inspect DIR lists the rules with their counts",
        rule_or_stage=name,
        close=close[0] if close else "",
    )


def _spread(rows: Iterable[dict], count: int) -> tuple[list[dict], int]:
    """Return up to `count` evenly spread `rows`, and the number of all rows, in one pass.

    Whenever too many rows are stored, every second stored row is removed, and from then on half as many are added.
    """
    chosen, every, total = [], 1, 0
    for row in rows:
        if total % every == 0:
            chosen.append(row)
            if len(chosen) > max(2 * count, 1):
                chosen, every = chosen[::2], every * 2
        total += 1
    step = max(len(chosen) // max(count, 1), 1)
    return chosen[::step][:count], total
