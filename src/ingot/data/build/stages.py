"""The stages of curating, in their order, made of a recipe."""

from dataclasses import dataclass
from pathlib import Path

from ingot.data.build.recipe import DataRecipe
from ingot.data.build.stage import Stage
from ingot.data.classify.stage import Classify
from ingot.data.decontaminate import Decontaminate
from ingot.data.extract.html import Extract
from ingot.data.filters.blocklist import Blocklist
from ingot.data.filters.junk import Junk
from ingot.data.filters.language import Language
from ingot.data.filters.quality import quality_stages
from ingot.data.filters.toxicity import Toxicity
from ingot.data.lineage.purge.listed import Purged, PurgedList
from ingot.data.pii import Pii

# The rows of the funnel, in order. Indices into this tuple stand in curate.INDEX_DTYPE["stage"].
STAGES = (
    "read",
    "blocklist",
    "extract",
    "purged",
    "url",
    "language",
    "gopher",
    "c4",
    "fineweb",
    "junk",
    "classifier",
    "toxicity",
    "pii",
    "contaminated",
    "duplicates",
    "near_duplicates",
    "substrings",
)
URL = STAGES.index("url")
KEPT = len(STAGES)


@dataclass(frozen=True)
class DocumentStages:
    """Name -> stage, None for one that is switched off. What is dropped `before_url` does not take its URL.

    purged: asked about every record once its text is known, also about those that were dropped before.
    """

    before_url: dict[str, Stage | None]
    purged: Stage | None
    behind_url: dict[str, Stage | None]


def document_stages(recipe: DataRecipe, *, index: Path | None, purged: str) -> DocumentStages:
    """index: folder of the decontamination index, if the recipe names evaluation sets. purged: folder whose
    list says what may not come back (purge/listed.py), or ""."""
    before: dict[str, Stage | None] = {
        "blocklist": Blocklist(recipe.blocklist) if recipe.blocklist.enabled else None,
        "extract": Extract(recipe.extract),
    }
    spoken = recipe.language
    behind: dict[str, Stage | None] = {
        "language": Language(spoken.keep, spoken.threshold, spoken.thresholds) if spoken.enabled else None,
        **quality_stages(recipe.quality),
        "junk": Junk(recipe.junk) if recipe.junk.enabled else None,
        "classifier": Classify(recipe.classifier) if recipe.classifier.enabled else None,
        "toxicity": Toxicity(recipe.toxicity) if recipe.toxicity.enabled else None,
        "pii": Pii(recipe.pii) if recipe.pii.enabled else None,
        "contaminated": Decontaminate(recipe.decontamination, index) if index else None,
    }
    return DocumentStages(before, Purged(PurgedList.load(Path(purged))) if purged else None, behind)
