"""Single steps of a data build as functions: read pages, extract their text, recognize English, apply quality rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.data.extract.html import Extract, ExtractRules, PageRefused, decode_page, extract_text
from ingot.data.filters.language import identify
from ingot.data.filters.quality import PRESETS, quality_stages
from ingot.data.sources import warc
from ingot.errors import DataError, UsageError
from ingot.schema.corpus import Document, Drop


def read_warc(path: str | Path) -> Iterator[tuple[Document, Drop | None]]:
    """Yield (document, None) for each page of a WARC file, in its order, and (document, drop) for each record that is
    not a page or is damaged: no record is lost silently.

    path: a local file, plain, gzip or zstd. `document.raw` has the decoded body as bytes, `document.charset` the
    encoding by the HTTP header; `drop.rule` and `drop.value` are the reason, like "read.http_status" and "404". Memory
    is constant. Raises DataError for a file that cannot be read or is not a WARC file.

        pages = (page for page, drop in ingot.read_warc("crawl.warc.gz") if drop is None)
        texts = (ingot.extract(page.raw, charset=page.charset) for page in pages)
    """
    return warc.read_warc(Path(path), Path(path).name)


def read_wet(path: str | Path) -> Iterator[tuple[Document, Drop | None]]:
    """Yield (document, None) for each text of a WET file, in its order, and (document, drop) for each other record.

    `document.text` has the text, decoded and cleaned as in a data build; an empty text has the drop "extract.empty".
    The pages of a WARC file are extracted, with "accurate". Raises DataError as `read_warc` does.

        texts = [document.text for document, drop in ingot.read_wet("crawl.wet.gz") if drop is None]
    """
    stage = Extract()
    for document, drop in warc.read_warc(Path(path), Path(path).name):
        yield document, drop or stage(document)


def extract(html: str | bytes, *, method: str = "accurate", charset: str = "") -> str:
    """Return the main content of an HTML page as text, "" if there is none. A line is a paragraph, a list item or a row
    of a table; a blank line separates blocks.

    html: text, or bytes, whose encoding is found as browsers find it. charset: the encoding that an HTTP header gives,
    for bytes. method: "accurate", "fast" (resiliparse), "trafilatura", or one of a plug-in. Raises UsageError for any
    other method, DataError for a page beyond the limits of depth or size, MissingPartError if a package is missing. The
    method of a plug-in has the defaults of its settings; ConfigError if one has none, or if it returns no text.

        ingot.extract("<nav>Home</nav><p>Copper melts at 1,085 degrees Celsius.</p>")
    """
    rules = ExtractRules(method=method)
    if problems := list(rules.problems()):
        raise UsageError(
            "E-EXTRACT-METHOD",
            " ".join(problems[0]),
            rule="a method is one of ingot's own, or of a plug-in that was imported",
            fix='use extract(html, method="accurate")',
            method=method,
        )
    text = decode_page(html, charset)[0] if isinstance(html, bytes) else html
    try:
        return extract_text(text, rules)
    except PageRefused as refused:
        raise DataError(
            "E-PAGE-LIMIT",
            f"the page has {refused.value}",
            rule="a page has at most 1,000 nested elements and a million elements and texts",
            fix="leave the page out: a data build drops it",
            page_rule=refused.rule,
        ) from None


def is_english(text: str, threshold: float = 0.65) -> bool:
    """Return whether lid.176 recognizes `text` as English with a probability of at least `threshold`, by its first
    2,000 characters. Texts of a few words are often recognized wrongly.

    Raises MissingPartError if fasttext and its model are not installed.

        ingot.is_english("The cat sat on the mat and looked at the dog.")  # True
    """
    language, score = identify(text, max(0.95, threshold))
    return language == "en" and score >= threshold


@dataclass(frozen=True)
class QualityVerdict:
    """The result of quality rules; true if the text passed. rule: the first rule that it broke, like
    "gopher.word_count", else "". value: the measured value and the limit, like "12 < 50"."""

    rule: str = ""
    value: str = ""

    def __bool__(self) -> bool:
        return not self.rule


def passes_quality(text: str, preset: str = "web") -> QualityVerdict:
    """Return whether an English text passes the quality rules of a preset, and which rule it broke. Usable as a bool.

    preset: web (Gopher, C4 and FineWeb), fineweb, gopher, c4 or none, as in a data build. C4's rules remove single
    lines; the rules after them see the shortened text. Raises UsageError for another preset.

        verdict = ingot.passes_quality("Too short to keep.")
        bool(verdict), verdict.rule, verdict.value  # False, "gopher.word_count", "4 < 50"
    """
    if preset not in PRESETS:
        raise UsageError(
            "E-QUALITY-PRESET",
            f"preset = {preset!r}",
            rule=f"the presets are {', '.join(PRESETS)}",
            fix='use passes_quality(text, preset="web")',
            preset=preset,
        )
    document = Document(id="", url="", source="", file="", record_id="", text=text, language="en")
    stages = quality_stages(PRESETS[preset])
    for stage in (stages["gopher"], stages["c4"], stages["fineweb"]):
        if stage is not None and (drop := stage(document)) is not None:
            return QualityVerdict(drop.rule, drop.value)
    return QualityVerdict()
