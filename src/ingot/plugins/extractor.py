"""Extractors: methods that find the main text of an HTML page."""

from dataclasses import dataclass

from ingot.plugins.registry import Part, Reference, Registry


@dataclass(frozen=True, kw_only=True)
class Extractor(Part):
    """A method of extraction, chosen by `extract.method`.

    extract(html, settings): returns the main text of a page, "" if it has none: a line per paragraph, list item or row
      of a table, a blank line between blocks. html: the page, decoded from its bytes. The result is cleaned afterwards
      (line ends, invisible characters, blank lines), and a page beyond the limits of [extract] never gets here.
      settings: an instance of `settings`, from [extractor.NAME] of the recipe; None without settings. Ingot's own
      methods get the section [extract].
    package: the installed distribution that does the work, for the funnel and for a check before the build; "": none.
    describes: a few words for the funnel.
    """

    extract: Reference
    package: str = ""
    describes: str = "main content"


EXTRACTORS = Registry(
    "extractor",
    "extract.method",
    (
        Extractor(name="fast", extract="ingot.data.extract.html:extract_fast", package="resiliparse"),
        Extractor(name="accurate", extract="ingot.data.extract.html:extract_accurate", package="ingot"),
        Extractor(
            name="trafilatura",
            extract="ingot.data.extract.html:extract_trafilatura",
            package="trafilatura",
            describes="fast",
        ),
    ),
)
