"""Ingot's own filters, created from a recipe: the first entries of the registry of filters (plugins/filters.py).

Each function returns the stage, or None if the recipe switches it off.
"""

from pathlib import Path

from ingot.data.build.recipe import DataRecipe
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
from ingot.data.pii import Pii


def make_blocklist(recipe: DataRecipe) -> Blocklist | None:
    return Blocklist(recipe.blocklist) if recipe.blocklist.enabled else None


def make_extract(recipe: DataRecipe) -> Extract:
    return Extract(recipe.extract, recipe.extractor.get(recipe.extract.method))


def make_language(recipe: DataRecipe) -> Language | None:
    rules = recipe.language
    return Language(rules.keep, rules.threshold, rules.thresholds) if rules.enabled else None


def make_gopher(recipe: DataRecipe) -> Gopher | None:
    return quality_stages(recipe.quality)["gopher"]


def make_c4(recipe: DataRecipe) -> C4 | None:
    return quality_stages(recipe.quality)["c4"]


def make_fineweb(recipe: DataRecipe) -> FineWeb | None:
    return quality_stages(recipe.quality)["fineweb"]


def make_junk(recipe: DataRecipe) -> Junk | None:
    return Junk(recipe.junk) if recipe.junk.enabled else None


def make_classifier(recipe: DataRecipe) -> Classify | None:
    return Classify(recipe.classifier) if recipe.classifier.enabled else None


def make_toxicity(recipe: DataRecipe) -> Toxicity | None:
    return Toxicity(recipe.toxicity) if recipe.toxicity.enabled else None


def make_pii(recipe: DataRecipe) -> Pii | None:
    return Pii(recipe.pii, recipe.pii_kind) if recipe.pii.enabled else None


def make_contaminated(recipe: DataRecipe, index: Path | None) -> Decontaminate | None:
    """index: the folder of the index of evaluation sets, None if the recipe names none."""
    return Decontaminate(recipe.decontamination, index) if index else None
