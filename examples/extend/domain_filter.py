"""A filter that keeps or drops documents by the domain of their URL. Subdomains count as their domain."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from ingot.plugins.filters import FILTERS, Filter
from ingot.schema.corpus import Document, Drop


@dataclass(frozen=True, kw_only=True)
class DomainRules:
    """keep: registered domains to keep, all if empty. drop: registered domains to drop. Both like "example.org"."""

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    def problems(self):
        """Yield (field, problem) for wrong values; they are reported with their line in the recipe."""
        for name in ("keep", "drop"):
            for domain in getattr(self, name):
                if "/" in domain or domain != domain.lower():
                    yield name, f"{domain!r} is not a domain; write it like example.org"


class DomainFilter:
    name = "domain"

    def __init__(self, rules: DomainRules):
        self.keep, self.drop = frozenset(rules.keep), frozenset(rules.drop)
        self.ran = f"keeps {len(rules.keep) or 'all'} domains, drops {len(rules.drop)}"  # a column of the funnel

    def __call__(self, document: Document) -> Drop | None:
        host = urlsplit(document.url).hostname or ""
        parts = host.split(".")
        domains = {".".join(parts[n:]) for n in range(len(parts))}  # news.example.org, example.org, org
        if domains & self.drop:
            return Drop(self.name, "domain.dropped", host)
        if self.keep and not domains & self.keep:
            return Drop(self.name, "domain.other", host)
        document.notes["domain"] = host  # notes are in the lineage of the document
        return None


FILTERS.register(
    Filter(
        name="domain",
        make=DomainFilter,
        settings=DomainRules,
        rules=("domain.dropped", "domain.other"),
        after="url",  # before language identification, which takes longer
    )
)
