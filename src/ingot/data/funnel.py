"""The funnel: how many documents each stage saw and dropped, by rule, and what exactly ran."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ingot.data.curate import KEPT, STAGES, Classifier, Curated, document_stages
from ingot.data.extract.html import Extract
from ingot.data.recipe import DataRecipe
from ingot.schema.corpus import FunnelStage
from ingot.schema.document import Drop

SWITCHED_OFF = "switched off"


def what_ran(recipe: DataRecipe, classifier: Classifier | None = None) -> dict[str, str]:
    """Stage name -> what exactly runs under `recipe`."""
    ran = {
        "read": "WARC responses and WET conversions",
        "extract": Extract().ran,
        "url": "canonical URL, the first page stays",
        "near_duplicates": recipe.dedup.ran if recipe.dedup.enabled else SWITCHED_OFF,
    }
    for name, stage in document_stages(recipe, classifier).items():
        ran[name] = stage.ran if stage else SWITCHED_OFF
    return ran


def funnel(
    files: Sequence[tuple[Curated, dict[int, Drop]]], ran: dict[str, str], more_seconds: dict[str, float]
) -> tuple[FunnelStage, ...]:
    """The funnel of curated files, where the drops in the dict of each (by line) replace what the worker found.

    more_seconds: CPU seconds by stage spent outside the workers.
    """
    dropped: dict[str, Counter[str]] = {name: Counter() for name in STAGES}
    records = 0
    for curated, overrides in files:
        records += len(curated.index)
        own = np.ones(len(curated.index), bool)
        own[list(overrides)] = False
        own &= curated.index["stage"] != KEPT
        pairs, counts = np.unique(curated.index[["stage", "rule"]][own], return_counts=True)
        for (stage, rule), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            dropped[STAGES[stage]][curated.rules[rule]] += count
        for drop in overrides.values():
            dropped[drop.stage][drop.rule] += 1
    rows = []
    for name in STAGES:
        lost = sum(dropped[name].values())
        seconds = sum(curated.seconds[name] for curated, _ in files) + more_seconds.get(name, 0.0)
        rows.append(
            FunnelStage(
                name=name,
                ran=ran[name],
                documents_in=records,
                documents_out=records - lost,
                dropped=dict(dropped[name].most_common()),
                seconds=round(seconds, 3),
            )
        )
        records -= lost
    return tuple(rows)


def most_dropped(stages: Sequence[FunnelStage]) -> list[tuple[str, int]]:
    """(rule, documents) of all stages, the rule that dropped most first."""
    rules = [(rule, count) for stage in stages for rule, count in stage.dropped.items()]
    return sorted(rules, key=lambda pair: (-pair[1], pair[0]))


def funnel_table(stages: Sequence[FunnelStage]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The funnel for people: header and rows (stage, left, dropped, the rules that dropped most, what ran)."""
    rows = []
    for stage in stages:
        lost = stage.documents_in - stage.documents_out
        worst = sorted(stage.dropped.items(), key=lambda rule: -rule[1])[:3]
        by = ", ".join(f"{rule.partition('.')[2]} {count:,}" for rule, count in worst)
        rows.append((stage.name, f"{stage.documents_out:,}", f"-{lost:,}" if lost else "", by, stage.ran))
    return ("stage", "left", "dropped", "by", "what ran"), rows
