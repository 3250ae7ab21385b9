"""Looking at what a build dropped: rules with counts, examples of one rule, and the setting that decides it."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from ingot.data.corpus import cut_files, load_corpus, read_documents, read_dropped
from ingot.data.funnel import most_dropped
from ingot.data.recipe import setting_of
from ingot.errors import UsageError
from ingot.schema.corpus import FunnelStage


@dataclass(frozen=True)
class Inspection:
    """funnel, rules: (rule, documents) of the whole corpus, the rule that dropped most first.

    examples: rows of dropped documents (id, url, source, file, stage, rule, value, text), or of kept ones (.., text).
    total: how many documents the examples were taken from. setting: recipe key that decides the rule asked for, or "".
    warnings: crawl files that are cut.
    """

    funnel: tuple[FunnelStage, ...]
    rules: tuple[tuple[str, int], ...]
    examples: tuple[dict, ...]
    total: int
    setting: str
    warnings: tuple[str, ...]


def inspect(corpus: Path, *, dropped_by: str = "", count: int = 10, url: str = "") -> Inspection:
    """Look into a corpus folder. Examples are spread evenly over it, and the same every time.

    dropped_by: a rule ("gopher.symbol_ratio") or a stage ("gopher"); without one the examples are kept documents.
    url: only documents whose URL contains it. Raises UsageError for a rule that dropped nothing, DataError for a
    folder that is no corpus.
    """
    corpus = corpus_folder(corpus)
    manifest = load_corpus(corpus)
    rules = most_dropped(manifest.funnel)
    if dropped_by:
        _require_known(dropped_by, rules, manifest.funnel)
        rows = (row for row in read_dropped(corpus) if dropped_by in (row["rule"], row["stage"]))
    else:
        rows = (row for _, row in read_documents(corpus))
    chosen, total = _spread((row for row in rows if url in row["url"]), count)
    setting = setting_of(dropped_by) if dropped_by else ""
    return Inspection(manifest.funnel, tuple(rules), tuple(chosen), total, setting, cut_files(corpus))


def corpus_folder(path: Path) -> Path:
    """`path`, or `path`/corpus where that is the corpus: what `data build --out` was given works too."""
    return path / "corpus" if (path / "corpus" / "corpus.json").exists() else path


def _require_known(name: str, rules: list[tuple[str, int]], funnel: tuple[FunnelStage, ...]) -> None:
    known = [rule for rule, _ in rules] + [stage.name for stage in funnel if stage.dropped]
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    raise UsageError(
        f"no document was dropped by {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
        rule="these rules dropped documents: " + (", ".join(rule for rule, _ in rules) or "none"),
        fix="ingot data inspect DIR lists them with their counts",
    )


def _spread(rows, count: int) -> tuple[list[dict], int]:
    """About `count` of `rows`, evenly spread, in one pass: whenever there are too many, every second one goes."""
    chosen, every, total = [], 1, 0
    for row in rows:
        if total % every == 0:
            chosen.append(row)
            if len(chosen) > max(2 * count, 1):
                chosen, every = chosen[::2], every * 2
        total += 1
    step = max(len(chosen) // max(count, 1), 1)
    return chosen[::step][:count], total
