"""The funnel: how many documents each stage saw and dropped, by rule, and what exactly ran."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.data.build.recipe import DataRecipe, recipe_of
from ingot.data.build.stages import STAGES, document_stages
from ingot.schema.corpus import FunnelStage

SWITCHED_OFF = "switched off"


def what_ran(recipe: DataRecipe, *, index: Path | None, purged: str) -> dict[str, str]:
    """Stage name -> what exactly runs under `recipe`. index, purged: as document_stages takes them."""
    dedup, substrings = recipe.dedup, recipe.substrings
    ran = {
        "read": "WARC, WET, text, JSONL, Parquet, tar and folders",
        "url": "canonical URL, the first page stays",
        "duplicates": "texts that are equal, the first stays" if dedup.enabled and dedup.exact else SWITCHED_OFF,
        "near_duplicates": dedup.ran if dedup.enabled else SWITCHED_OFF,
        "substrings": substrings.ran if substrings.enabled else SWITCHED_OFF,
    }
    ran |= _of_stages(recipe, index, purged)
    for source in recipe.source:
        for name, text in _of_stages(recipe_of(recipe, source), index, purged).items():
            if text != ran[name].partition("; of ")[0]:
                ran[name] += f"; of {source}: {text}"
    return ran


def _of_stages(recipe: DataRecipe, index: Path | None, purged: str) -> dict[str, str]:
    stages = document_stages(recipe, index=index, purged=purged)
    every = stages.before_url | {"purged": stages.purged} | stages.behind_url
    return {name: stage.ran if stage else SWITCHED_OFF for name, stage in every.items()}


def funnel(
    records: int, drops: Sequence[Mapping[str, Mapping[str, int]]], ran: dict[str, str], seconds: Mapping[str, float]
) -> tuple[FunnelStage, ...]:
    """The funnel of `records` records. drops: of each input, stage -> rule -> documents. seconds: CPU, by stage."""
    dropped: dict[str, Counter[str]] = {name: Counter() for name in STAGES}
    for one in drops:
        for stage, rules in one.items():
            dropped[stage].update(rules)
    rows = []
    for name in STAGES:
        lost = dropped[name].total()
        rows.append(
            FunnelStage(
                name=name,
                ran=ran[name],
                documents_in=records,
                documents_out=records - lost,
                dropped=dict(sorted(dropped[name].items(), key=lambda rule: (-rule[1], rule[0]))),
                seconds=round(seconds.get(name, 0.0), 3),
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
