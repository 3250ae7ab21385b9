"""Filters: stages of a data build that look at one document, change it, and may drop it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ingot.errors import ConfigError
from ingot.plugins.registry import Part, Reference, Registry
from ingot.schema.corpus import Document, Drop
from ingot.value_names import close


class DocumentStage(Protocol):
    """A stage that is called once per document, in crawl order, and returns a Drop if the document is dropped.

    name: the name of its row in the funnel, and `Drop.stage` of every document that the stage drops.
    ran: a description of the model and settings, for the funnel ("lid.176.ftz, keeps en, threshold 0.65").

    A stage may change the document in place. Its result depends on nothing but the document and the settings. A stage
    of a plug-in may raise: the document is dropped by the rule NAME.plugin. Ingot's own stages never raise.
    """

    @property
    def name(self) -> str: ...

    @property
    def ran(self) -> str: ...

    def __call__(self, document: Document) -> Drop | None: ...


@dataclass(frozen=True, kw_only=True)
class Filter(Part):
    """A stage per document, switched on by its table [filter.NAME] in the recipe; `enabled = false` switches it off.

    make(settings): returns the stage, a DocumentStage whose name is `name`. It is called once per input. settings: an
      instance of `settings`, None without settings. Ingot's own filters get the whole recipe instead, and return None
      if they are switched off.
    rules: the names of the rules in its drops, each NAME.something.
    after: the stage or filter that it follows. By default it runs after the last quality stage and before PII.
    files(settings): returns the paths of the files that the stage reads; their hashes are part of the corpus identity.
    """

    make: Reference
    rules: tuple[str, ...] = ()
    after: str = "toxicity"
    files: Reference | None = None


# The names of all stages, in order (data/build/stages.py). Stages after `contaminated` compare whole corpora.
STAGE_NAMES = (
    "read", "blocklist", "extract", "purged", "url", "language", "gopher", "c4", "fineweb", "junk", "classifier",
    "toxicity", "pii", "contaminated", "duplicates", "near_duplicates", "substrings",
)  # fmt: skip
_PER_DOCUMENT = STAGE_NAMES[: STAGE_NAMES.index("contaminated") + 1]
_OWN = ("blocklist", "extract", "language", "gopher", "c4", "fineweb", "junk", "classifier", "toxicity", "pii")


class FilterRegistry(Registry[Filter]):
    """The registry of filters, which checks their places and the names of their rules."""

    def register(self, part: Filter) -> Filter:
        if part.name in STAGE_NAMES and part.name not in self:
            raise _refused(part, f"filter {part.name!r} has the name of a stage of ingot", "give it another name")
        places = [*_PER_DOCUMENT, *(name for name in self.names() if name not in (*_PER_DOCUMENT, part.name))]
        if part.after not in places:
            near = close(part.after, places)
            fix = f"write after={near[0]!r}" if near else "correct `after`"
            raise _refused(part, f"filter {part.name!r} follows {part.after!r}, which is not a place", fix)
        if wrong := [rule for rule in part.rules if not rule.startswith(f"{part.name}.")]:
            raise _refused(part, f"filter {part.name!r} has the rule {wrong[0]!r}", f"write {part.name}.RULE")
        return super().register(part)

    def broken(self, part: Filter) -> Iterator[str]:
        if isinstance(part.make, type) and not any("__call__" in vars(one) for one in part.make.__mro__):
            yield f"make = {part.make.__qualname__} has no method __call__(document)"


def _refused(part: Filter, found: str, fix: str) -> ConfigError:
    return ConfigError(
        "E-FILTER-PLACE",
        found,
        rule=f"a filter has a name of its own, rules that begin with it, and follows one of {', '.join(_PER_DOCUMENT)} "
        "or a filter that is registered before it",
        fix=fix,
        name=part.name,
        after=part.after,
        rules=list(part.rules),
    )


FILTERS = FilterRegistry(
    "filter",
    "[filter.NAME]",
    [Filter(name=name, make=f"ingot.data.build.own_filters:make_{name}") for name in _OWN],
)
