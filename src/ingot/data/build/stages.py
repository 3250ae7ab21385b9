"""The stages of a data build in their order, and the funnel that counts the documents that each of them drops.

`STAGES` is the only list of them, and `stages_of` adds the filters of plug-ins: the rows of the funnel, the stage names
in dropped documents, and the stages that run all follow from its entries. A `PerDocument` entry looks at one document
at a time (process_input.py); a `PerCorpus` entry reads inputs or compares documents (duplicates.py, corpus_files.py).
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.data.build.custom_filter import checked_stage
from ingot.data.build.recipe import DataRecipe, recipe_of
from ingot.data.filters.quarantine import QuarantineStage
from ingot.data.lineage.purge.history import Purged, PurgedList
from ingot.data.parts import in_order, is_on
from ingot.errors import ConfigError
from ingot.plugins.filters import FILTERS, DocumentStage, Filter
from ingot.plugins.registry import resolve
from ingot.schema.corpus import Drop, FunnelStage

SWITCHED_OFF = "switched off"


@dataclass(frozen=True)
class StageSettings:
    """The settings from which stages are created.

    evaluation_sets: the folder of the decontamination index, None if the recipe names no evaluation sets.
    purged: the data folder with the list of purged documents (lineage/purge/history.py), None if there is no list.
    """

    recipe: DataRecipe
    evaluation_sets: Path | None = None
    purged: Path | None = None

    def of_source(self, source: str) -> "StageSettings":
        """Return the settings for documents of `source`."""
        return StageSettings(recipe_of(self.recipe, source), self.evaluation_sets, self.purged)


@dataclass(frozen=True)
class PerDocument:
    """A stage that looks at one document. make: creates the stage, or returns None if it is switched off."""

    name: str
    make: Callable[[StageSettings], DocumentStage | None]

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


def _own(name: str) -> PerDocument:
    """Return the stage of a filter of ingot."""
    return PerDocument(name, lambda settings: resolve(FILTERS[name].make)(settings.recipe))


def _exact(settings: StageSettings) -> str:
    rules = settings.recipe.dedup
    return "texts that are equal, the first stays" if rules.enabled and rules.exact else SWITCHED_OFF


READ = PerCorpus("read", lambda settings: "WARC, WET, text, JSONL, Parquet, tar and folders")
URL = PerCorpus("url", lambda settings: "canonical URL, the first page stays")
DUPLICATES = PerCorpus("duplicates", _exact)
NEAR_DUPLICATES = PerCorpus("near_duplicates", lambda settings: _if_enabled(settings.recipe.dedup))
SUBSTRINGS = PerCorpus("substrings", lambda settings: _if_enabled(settings.recipe.substrings))
# Every record is looked up in the purge list once its text is known, even if an earlier stage dropped the record.
PURGED = PerDocument(Purged.name, lambda s: Purged(PurgedList.load(s.purged)) if s.purged else None)
CONTAMINATED = PerDocument(
    "contaminated",
    lambda s: resolve("ingot.data.build.own_filters:make_contaminated")(s.recipe, s.evaluation_sets),
)
QUARANTINE = PerDocument(QuarantineStage.name, lambda s: QuarantineStage(s.recipe.quarantine))
# A document that is dropped before URL does not count as the first page with its URL.
STAGES: tuple[PerCorpus | PerDocument, ...] = (
    READ,
    _own("blocklist"),
    _own("extract"),
    PURGED,
    URL,
    _own("language"),
    _own("gopher"),
    _own("c4"),
    _own("fineweb"),
    _own("junk"),
    _own("classifier"),
    _own("toxicity"),
    _own("pii"),
    CONTAMINATED,
    DUPLICATES,
    NEAR_DUPLICATES,
    SUBSTRINGS,
)


def stages_of(recipe: DataRecipe) -> tuple[PerCorpus | PerDocument, ...]:
    """Return STAGES with QUARANTINE if the recipe has lists, and with the filters of plug-ins that the recipe switches
    on, for all sources or for some.

    Filters with the same place run in the order of their modules in [plugins] modules, those of one module in the order
    in which it registers them. Raises ConfigError for a filter that is
    not registered: a process that did not import its plug-in must not build a corpus without it.
    """
    tables = [recipe.filter, *(recipe_of(recipe, source).filter for source in recipe.source)]
    named = {name for table in tables for name in table}
    for name in sorted({name for table in tables for name in table if is_on(table[name])}):
        if name not in FILTERS:
            raise ConfigError(
                "E-DATA-PLUGIN-MODULE",
                FILTERS.unknown(name),
                rule="a filter that a recipe switches on is registered by a plug-in of [plugins] modules",
                fix="correct the name, or add its plug-in to [plugins] modules",
                kind="filter",
                name=name,
            )
    rows: list[PerCorpus | PerDocument] = list(STAGES)
    if recipe.quarantine.files:  # it reads texts as they were extracted
        rows.insert(rows.index(PURGED) + 1, QUARANTINE)
    last: dict[str, str] = {}  # stage -> the last filter so far that follows it
    for part in in_order(named, recipe.plugins.modules):
        after, names = part.after, [row.name for row in rows]
        while after not in names:  # a filter that is not switched on
            after = FILTERS[after].after
        if after in ("extract", PURGED.name):  # purged and listed documents are found by the text as extracted
            after = QUARANTINE.name if QUARANTINE in rows else PURGED.name
        row = PerDocument(part.name, functools.partial(_of_plugin, part))
        rows.insert(names.index(last.get(after, after)) + 1, row)
        last[after] = part.name
    return tuple(rows)


def _of_plugin(part: Filter, settings: StageSettings) -> DocumentStage | None:
    table = settings.recipe.filter.get(part.name)
    return checked_stage(part, table) if is_on(table) else None


def _if_enabled(rules) -> str:
    return rules.ran if rules.enabled else SWITCHED_OFF


@dataclass(frozen=True)
class DocumentStages:
    """The stages that are switched on, in order.

    before_purged: those until the text is extracted. purged: the stage of the purge list, None if there is no list.
    before_url, after_url: the later ones, before and after URLs are compared.
    """

    before_purged: tuple[DocumentStage, ...]
    purged: DocumentStage | None
    before_url: tuple[DocumentStage, ...]
    after_url: tuple[DocumentStage, ...]


def document_stages(settings: StageSettings) -> DocumentStages:
    """Return the stages that look at one document at a time."""
    every = stages_of(settings.recipe)
    first, middle = every.index(PURGED), every.index(URL)

    def made(rows: Sequence[PerCorpus | PerDocument]) -> tuple[DocumentStage, ...]:
        stages = [row.make(settings) for row in rows if isinstance(row, PerDocument)]
        return tuple(stage for stage in stages if stage is not None)

    purged = PURGED.make(settings)
    return DocumentStages(made(every[:first]), purged, made(every[first + 1 : middle]), made(every[middle:]))


def what_ran(settings: StageSettings) -> dict[str, str]:
    """Return stage name -> description of the model and settings, including the differences between sources."""
    every = stages_of(settings.recipe)
    ran = {stage.name: stage.ran(settings) for stage in every}
    for source in settings.recipe.source:
        mine = settings.of_source(source)
        for stage in every:
            if isinstance(stage, PerDocument) and (text := stage.ran(mine)) != ran[stage.name].partition("; of ")[0]:
                ran[stage.name] += f"; of {source}: {text}"
    return ran


def funnel(
    records: int, drops: Sequence[Mapping[str, Mapping[str, int]]], ran: dict[str, str], seconds: Mapping[str, float]
) -> tuple[FunnelStage, ...]:
    """Return the funnel for `records` records.

    drops: for each input, stage -> rule -> dropped documents. ran: see `what_ran`. seconds: stage -> CPU seconds.
    """
    dropped: dict[str, Counter[str]] = {name: Counter() for name in ran}
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
