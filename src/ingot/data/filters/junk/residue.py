"""What careless machines leave in text: bad translation, article spinning, lists of keywords, unfilled templates."""

import re
from collections import Counter

from ingot.data.filters.junk.near import near

# Word-by-word paraphrases of terms, as "counterfeit consciousness" for artificial intelligence: tortured phrases
# (Cabanac, Labbe and Magazinov 2021, arXiv:2107.06751). One near a needle lets the whole text be searched.
_TORTURED_NEEDLES = (b"counterfeit conscious", b"profound learning", b"bosom peril")
_TORTURED = re.compile(
    r"counterfeit (?:consciousness|intelligence|neural)|(?:discourse|facial|face|picture|image|voice|gesture) "
    r"acknowledgment|(?:flag|sign|signal)[ -]to[ -](?:commotion|clamou?r)|bosom (?:peril|malignan\w+|disease|growth)|"
    r"profound (?:learning|neural|brain)|(?:haze|mist) figuring|(?:irregular|arbitrary) (?:backwoods|woods|woodland)|"
    r"(?:colossal|enormous|gigantic) information|mean[ -](?:square|squared|outright) blunder|blunder rate|"
    r"(?:kidney|heart|cardiovascular|renal|liver) disappointment|fake (?:neural|brain) (?:organization|network)s?|"
    r"neural organization|(?:guileless|credulous) bayes|leftover (?:vitality|energy)"
)
# Phrases that machine translation puts on a page by itself.
_TRANSLATED = re.compile(
    r"contribute a better translation|rate this translation|"
    r"translated (?:automatically )?by (?:google|bing|microsoft|deepl)|"
    r"(?:page|article|text|content|post) (?:was|has been|is) (?:automatically|machine)[ -]translated|"
    r"(?:automatic|machine) translation (?:of|from) the original"
)
_SPINTAX = re.compile(r"\{\w[^{}|\n=;()<>]{0,40}(?:\|[^{}|\n=;()<>]{0,40}){1,20}\}")

_FIELDS = re.compile(
    r"\{\{[^{}\n]{1,60}\}\}|\{%[^{}\n]{1,60}%\}|<%=?[^<>\n]{1,60}%>|%%[A-Z_]{3,30}%%|\[\[[A-Za-z_ ]{2,30}\]\]|"
    r"\[(?:your|insert|enter|company|city|product|customer|client|business|keyword)[ _][A-Za-z_ ]{0,30}\]",
    re.IGNORECASE,
)
_FIELD_SIGNS = (b"{{", b"{%", b"<%", b"%%", b"[[", b"[your", b"[insert", b"[company")
_LOREM_WORDS = """
    lorem ipsum dolor amet consectetur consectetuer adipiscing adipisicing eiusmod incididunt aliqua aliquam
    exercitation ullamco veniam nostrud pellentesque vestibulum curabitur praesent nulla facilisi facilisis mauris
    tincidunt quisque sollicitudin maecenas phasellus vivamus tempor
"""
_LOREM = re.compile(rf"\b(?:{'|'.join(_LOREM_WORDS.split())})\b")

RESIDUE_SIGNS = (*_TORTURED_NEEDLES, b"translat", *_FIELD_SIGNS, b"ipsum")

_ENTRY = re.compile(r"[,|;\n\u2022\u00b7/]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_STOP_WORDS = "the and for with from that this you your our are was has have not but all can will one new more"
_STOP = frozenset(_STOP_WORDS.split(" "))
_ENTRIES = 30  # fewer are no list


def machine_translated(text: str, data: bytes, signs: list[bytes]) -> int:
    """How many different remains of machine translation and spinning there are; spinner's syntax counts from three."""
    found = 0
    if any(sign in _TORTURED_NEEDLES for sign in signs) and _TORTURED.search(
        near(data, _TORTURED_NEEDLES, 30, 40, most=20)
    ):
        found += len(set(_TORTURED.findall(text.lower())))
    if b"translat" in signs:
        found += len(set(_TRANSLATED.findall(near(data, (b"translat",), 40, 60))))
    if b"|" in data and b"{" in data:
        spun = sum(1 for _ in _SPINTAX.finditer(text))
        found += spun // 3 * 2
    return found


def keyword_stuffing(text: str, data: bytes, signs: list[bytes]) -> float:
    """Of a text that is mostly a list of short entries, the share of entries with its most frequent word."""
    half = len(data) // 2
    middle = data[half : half + 500]
    if (middle.count(b",") + middle.count(b"|")) * 40 < len(middle):
        return 0.0
    separators = data.count(b",") + data.count(b"|")
    if separators < _ENTRIES or separators * 30 < len(text):
        return 0.0
    entries = [set(_WORD.findall(entry)) - _STOP for entry in _ENTRY.split(text.lower())]
    entries = [entry for entry in entries if entry]
    short = [entry for entry in entries if len(entry) <= 5]
    if len(short) < _ENTRIES or len(short) * 10 < len(entries) * 8:
        return 0.0
    ((_, count),) = Counter(word for entry in short for word in entry).most_common(1)
    return count / len(short)


def placeholder(text: str, data: bytes, signs: list[bytes]) -> float:
    """Share of the characters in unfilled template fields and in lines of lorem ipsum."""
    covered = 0
    if any(sign in _FIELD_SIGNS for sign in signs):
        covered += sum(match.end() - match.start() for match in _FIELDS.finditer(text))
    if b"ipsum" in signs:
        lines = text.lower().split("\n")
        covered += sum(len(line) for line in lines if len(_LOREM.findall(line)) * 60 > len(line) > 0)
    return covered / max(len(text), 1)
