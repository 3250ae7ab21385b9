"""The stages of a data build in their order, and the funnel that counts the documents that each of them drops.

`STAGES` is the only list of them: the rows of the funnel, the stage names in dropped documents, and the stages that run
all follow from its entries. A `PerDocument` entry looks at one document at a time (process_input.py); a `PerCorpus`
entry reads inputs or compares documents (duplicates.py, corpus_files.py).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from ingot.data.build.recipe import DataRecipe, recipe_of
from ingot.data.classify.stage import Classify
from ingot.data.decontaminate import Decontaminate
from ingot.data.extract.html import Extract
from ingot.data.filters.blocklist import Blocklist
from ingot.data.filters.c4 import C4
from ingot.data.filters.gopher import Gopher
from ingot.data.filters.junk import Junk
from ingot.data.filters.language import Language
from ingot.data.filters.quality import FineWeb, quality_stages
from ingot.data.filters.toxicity import Toxicity
from ingot.data.lineage.purge.history import Purged, PurgedList
from ingot.data.pii import Pii
from ingot.schema.corpus import Document, Drop, FunnelStage

SWITCHED_OFF = "switched off"


class DocumentStage(Protocol):
    """A stage that is called once per document, in crawl order, and returns a Drop if the document is dropped.

    name: the name of its row in the funnel, and `Drop.stage` of every document that the stage drops.
    ran: a description of the model and settings, for the funnel ("lid.176.ftz, keeps en, threshold 0.65").

    A stage may change the document in place. It must not raise on any document: a document that the stage cannot handle
    gets a Drop with a separate rule.
    """

    @property
    def name(self) -> str: ...

    @property
    def ran(self) -> str: ...

    def __call__(self, document: Document) -> Drop | None: ...


@dataclass(frozen=True)
class StageSettings:
    """The settings from which stages are created.

    evaluation_sets: the folder of the decontamination index, None if the recipe names no evaluation sets.
    purged: the data folder with the list of purged documents (lineage/purge/history.py), None if there is no list.
    """

    recipe: DataRecipe
    evaluation_sets: Path | None = None
    purged: Path | None = None

    @cached_property
    def quality(self) -> Mapping[str, DocumentStage | None]:
        return quality_stages(self.recipe.quality)

    def of_source(self, source: str) -> "StageSettings":
        """Return the settings for documents of `source`."""
        return StageSettings(recipe_of(self.recipe, source), self.evaluation_sets, self.purged)


@dataclass(frozen=True)
class PerDocument:
    """A stage that looks at one document. kind: its class. make: creates the stage, or returns None if switched off."""

    kind: type
    make: Callable[[StageSettings], DocumentStage | None]

    @property
    def name(self) -> str:
        return self.kind.name

    def ran(self, settings: StageSettings) -> str:
        stage = self.make(settings)
        return stage.ran if stage else SWITCHED_OFF


@dataclass(frozen=True)
class PerCorpus:
    """A stage that reads inputs or compares documents. ran: returns a description of the stage with these settings."""

    name: str
    ran: Callable[[StageSettings], str]

    def drop(self, rule: str, value: str) -> Drop:
        """Return a Drop by this stage. rule: the name of the rule without its prefix, the name of the stage."""
        return Drop(self.name, f"{self.name}.{rule}", value)


def _language(settings: StageSettings) -> Language | None:
    rules = settings.recipe.language
    return Language(rules.keep, rules.threshold, rules.thresholds) if rules.enabled else None


def _exact(settings: StageSettings) -> str:
    rules = settings.recipe.dedup
    return "texts that are equal, the first stays" if rules.enabled and rules.exact else SWITCHED_OFF


READ = PerCorpus("read", lambda settings: "WARC, WET, text, JSONL, Parquet, tar and folders")
URL = PerCorpus("url", lambda settings: "canonical URL, the first page stays")
DUPLICATES = PerCorpus("duplicates", _exact)
NEAR_DUPLICATES = PerCorpus("near_duplicates", lambda settings: _if_enabled(settings.recipe.dedup))
SUBSTRINGS = PerCorpus("substrings", lambda settings: _if_enabled(settings.recipe.substrings))
# Every record is looked up in the purge list once its text is known, even if an earlier stage dropped the record.
PURGED = PerDocument(Purged, lambda s: Purged(PurgedList.load(s.purged)) if s.purged else None)
# A document that is dropped before URL does not count as the first page with its URL.
STAGES: tuple[PerCorpus | PerDocument, ...] = (
    READ,
    PerDocument(Blocklist, lambda s: Blocklist(s.recipe.blocklist) if s.recipe.blocklist.enabled else None),
    PerDocument(Extract, lambda s: Extract(s.recipe.extract)),
    PURGED,
    URL,
    PerDocument(Language, _language),
    PerDocument(Gopher, lambda s: s.quality[Gopher.name]),
    PerDocument(C4, lambda s: s.quality[C4.name]),
    PerDocument(FineWeb, lambda s: s.quality[FineWeb.name]),
    PerDocument(Junk, lambda s: Junk(s.recipe.junk) if s.recipe.junk.enabled else None),
    PerDocument(Classify, lambda s: Classify(s.recipe.classifier) if s.recipe.classifier.enabled else None),
    PerDocument(Toxicity, lambda s: Toxicity(s.recipe.toxicity) if s.recipe.toxicity.enabled else None),
    PerDocument(Pii, lambda s: Pii(s.recipe.pii) if s.recipe.pii.enabled else None),
    PerDocument(
        Decontaminate,
        lambda s: Decontaminate(s.recipe.decontamination, s.evaluation_sets) if s.evaluation_sets else None,
    ),
    DUPLICATES,
    NEAR_DUPLICATES,
    SUBSTRINGS,
)


def _if_enabled(rules) -> str:
    return rules.ran if rules.enabled else SWITCHED_OFF


@dataclass(frozen=True)
class DocumentStages:
    """The stages that are switched on. before_url, after_url: those before and after URLs are compared, in order.

    purged: the stage of the purge list, None if there is no list.
    """

    before_url: tuple[DocumentStage, ...]
    purged: DocumentStage | None
    after_url: tuple[DocumentStage, ...]


def document_stages(settings: StageSettings) -> DocumentStages:
    """Return the stages that look at one document at a time."""
    middle = STAGES.index(URL)

    def made(rows: Sequence[PerCorpus | PerDocument]) -> tuple[DocumentStage, ...]:
        stages = [row.make(settings) for row in rows if isinstance(row, PerDocument) and row is not PURGED]
        return tuple(stage for stage in stages if stage is not None)

    return DocumentStages(made(STAGES[:middle]), PURGED.make(settings), made(STAGES[middle:]))


def what_ran(settings: StageSettings) -> dict[str, str]:
    """Return stage name -> description of the model and settings, including the differences between sources."""
    ran = {stage.name: stage.ran(settings) for stage in STAGES}
    for source in settings.recipe.source:
        mine = settings.of_source(source)
        for stage in STAGES:
            if isinstance(stage, PerDocument) and (text := stage.ran(mine)) != ran[stage.name].partition("; of ")[0]:
                ran[stage.name] += f"; of {source}: {text}"
    return ran


def funnel(
    records: int, drops: Sequence[Mapping[str, Mapping[str, int]]], ran: dict[str, str], seconds: Mapping[str, float]
) -> tuple[FunnelStage, ...]:
    """Return the funnel for `records` records.

    drops: for each input, stage -> rule -> dropped documents. ran: see `what_ran`. seconds: stage -> CPU seconds.
    """
    dropped: dict[str, Counter[str]] = {stage.name: Counter() for stage in STAGES}
    for one in drops:
        for stage, rules in one.items():
            dropped[stage].update(rules)
    rows = []
    for name, by_rule in dropped.items():
        lost = by_rule.total()
        rows.append(
            FunnelStage(
                name=name,
                ran=ran[name],
                documents_in=records,
                documents_out=records - lost,
                dropped=dict(sorted(by_rule.items(), key=lambda rule: (-rule[1], rule[0]))),
                seconds=round(seconds.get(name, 0.0), 3),
            )
        )
        records -= lost
    return tuple(rows)


def most_dropped(stages: Sequence[FunnelStage]) -> list[tuple[str, int]]:
    """Return (rule, number of dropped documents) of all stages, the largest number first."""
    rules = [(rule, count) for stage in stages for rule, count in stage.dropped.items()]
    return sorted(rules, key=lambda pair: (-pair[1], pair[0]))


def funnel_table(stages: Sequence[FunnelStage]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the funnel as text: header and rows (stage, left, dropped, the rules that dropped most, what ran)."""
    rows = []
    for stage in stages:
        lost = stage.documents_in - stage.documents_out
        worst = sorted(stage.dropped.items(), key=lambda rule: -rule[1])[:3]
        by = ", ".join(f"{rule.partition('.')[2]} {count:,}" for rule, count in worst)
        rows.append((stage.name, f"{stage.documents_out:,}", f"-{lost:,}" if lost else "", by, stage.ran))
    return ("stage", "left", "dropped", "by", "what ran"), rows
