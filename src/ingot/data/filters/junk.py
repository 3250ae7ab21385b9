"""Filter junk that quality rules keep: encoded data, broken encodings, text for machines or by machines.

Each rule is a measure with a threshold. The rules favor precision over recall:

    junk.encoded             base64, hex, escapes, minified code: share of the characters
    junk.mojibake            UTF-8 decoded as something else, replacement characters: share of the characters
    junk.mixed_script        words of Latin and Cyrillic or Greek letters: share of the words
    junk.injection           text that gives orders to language models: a score, see injection.py
    junk.machine_translated  phrases and remains that only bad translation or article spinning leaves: their number
    junk.keyword_stuffing    lists in which most entries repeat one word: share of the entries
    junk.placeholder         template fields and lorem ipsum: share of the characters

Each rule first searches for byte strings that any match of it must contain, so a normal page costs little.
docs/design/junk.md has the measurements and the known limits.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from ingot.data.filters.injection import INJECTION_SIGNS, injection, near
from ingot.data.native import compiled
from ingot.ranges import Count, Limit
from ingot.schema.corpus import Document, Drop

__all__ = ["Junk", "JunkRules"]

_MOST, _PLACES = 64, 3


class Signs:
    """A set of at most 64 short byte strings ("signs") of two bytes or more, all found in one pass over a text."""

    def __init__(self, signs: Iterable[bytes]):
        self.signs = tuple(sorted(set(signs)))
        if len(self.signs) > _MOST or min(map(len, self.signs)) < 2:
            raise ValueError(f"{len(self.signs)} signs, must be at most {_MOST} of two bytes or more")
        # For each position 0 .. 2 and byte value: a bit per sign that may have this byte at this position.
        masks = array("Q", bytes(8 * 256 * _PLACES))
        for number, sign in enumerate(self.signs):
            for place in range(_PLACES):
                for byte in sign[place : place + 1] or range(256):
                    masks[256 * place + byte] |= 1 << number
        self._masks = masks.tobytes()

    def found_in(self, data: bytes) -> list[bytes]:
        """Return the signs that occur in `data`."""
        module = compiled("_quality")
        return module.signs(data, self.signs, self._masks) if module else self.plain_found_in(data)

    def plain_found_in(self, data: bytes) -> list[bytes]:
        """Return the result of `found_in`; the reference implementation in Python."""
        return [sign for sign in self.signs if sign in data]


_BLOCKS = 12  # a run without spaces that is a sixth of the text covers at least one block of a twelfth
# Encoded data has no spaces; base64 in mails and keys has lines of 64 or 76 characters.
_UNBROKEN = re.compile(r"[!-~]{64,}+(?:\n[!-~]{1,80})*+")
_WEB_ADDRESS = re.compile(r"https?://|www\.")
_SLASHES = 30  # a run with more than one slash per 30 characters is a path; base64 has one in 64
_ESCAPES = re.compile(
    r"(?:%[0-9A-Fa-f]{2}){2,}|(?:\\x[0-9A-Fa-f]{2}|\\u\{?[0-9A-Fa-f]{4,6}\}?|\\[0-7]{3}|\\[nrt\"'/\\]){2,}"
    r"|(?:&(?:#[0-9]{2,6}|#x[0-9A-Fa-f]{2,5}|[a-z]{2,6});){3,}|(?:=[0-9A-F]{2}){3,}"
)
_HEX_DUMP = re.compile(r"(?:\b(?:0x)?[0-9A-Fa-f]{2}\b[ ,\n]{1,2}){16,}|(?:\b[0-9A-Fa-f]{4}\b[ \n]){8,}")
_HEX_LETTER = re.compile("[A-Fa-f]")
_IN_HEX_DUMPS = b"0123456789abcdefx ,\r\n"
_SHORTEST = 100  # least number of bytes in a block
_LONG_LINE = 300  # characters; minified code has lines at least this long
_DISTINCT = 12  # least number of different characters in encoded data; rows of dashes and DNA have fewer

# UTF-8 decoded as Latin-1 or Windows-1252: the lead byte and the continuation bytes each become a character.
_CONTINUATION = bytes(range(0x80, 0xC0)).decode("latin-1") + bytes(
    byte for byte in range(0x80, 0xA0) if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
).decode("cp1252")
MOJIBAKE = re.compile(
    rf"[\u00c2-\u00c5\u00ce\u00cf][{_CONTINUATION}]|\u00e2[\u0080-\u0082\u20ac][{_CONTINUATION}]"
    rf"|\u00f0[\u009f\u0178][{_CONTINUATION}]{{2}}|(?:[\u00d0\u00d1][{_CONTINUATION}]){{2,}}"
    rf"|(?:[\u00e0\u00e3-\u00e9][{_CONTINUATION}]{{2}}){{2,}}|\u00ef\u00bf\u00bd|\ufffd"
    # UTF-8 decoded as Windows-1251: every second letter is one of two.
    r"|(?:[\u0420\u0421][\u0080-\u00bf\u0400-\u040f\u0450-\u045f\u2013-\u2122\u0490\u0491]){3,}"
)
# The first bytes of such text in UTF-8.
_LATIN = re.compile(
    rb"\xc3(?:[\x82-\x85\x8e-\x91][\xc2-\xe2]|\xa2(?:\xe2\x82|\xc2\x80)|[\xa0\xa3-\xa9]\xc2[\x80-\x9f\xa1-\xbf]|"
    rb"\xaf\xc2\xbf|\xb0(?:\xc5|\xc2\x9f))"
)
_CYRILLIC = re.compile(rb"\xd0\xa0[\xc2-\xe2]")
_REPLACEMENT, _ER = "\ufffd".encode(), "\u0420".encode()
MOJIBAKE_SIGNS = (_REPLACEMENT, _ER)

_OTHER_ALPHABETS = (b"\xce", b"\xcf", b"\xd0", b"\xd1")  # lead bytes of Greek and Cyrillic letters in UTF-8
_OTHER_LETTER = r"[\u0391-\u03a1\u03a3-\u03c9\u0400-\u04ff]"
# At least three letters, so that units and differences ("\u03bcm", "k\u03a9", "\u0394t") do not count.
_MIXED = re.compile(
    rf"(?:[A-Za-z]{_OTHER_LETTER}[A-Za-z]|{_OTHER_LETTER}[A-Za-z]{_OTHER_LETTER}|[A-Za-z]{{3}}{_OTHER_LETTER}"
    rf"|{_OTHER_LETTER}[A-Za-z]{{3}}|[A-Za-z]{_OTHER_LETTER}{{3}}|{_OTHER_LETTER}{{3}}[A-Za-z])\w*"
)


def encoded(text: str, data: bytes, signs: list[bytes]) -> float:
    """Return the share of the characters that are in encoded data, minified code or escapes."""
    covered = 0
    size = len(text)
    block = max(len(data) // _BLOCKS, _SHORTEST)
    if any(data.find(b" ", i, i + block) < 0 for i in range(0, len(data) - block + 1, block)):
        for match in _UNBROKEN.finditer(text):
            blob = match[0]
            is_path = blob.count("/") * _SLASHES > len(blob)
            if len(set(blob)) >= _DISTINCT and not is_path and not _WEB_ADDRESS.match(blob):
                covered += len(blob)
    if b"{" in data and data.count(b"{") * 60 > size:
        lines = (line for line in text.split("\n") if len(line) >= _LONG_LINE)
        lines = (line for line in lines if line.count("\\") * 40 < len(line))  # formulas in TeX have braces too
        covered += sum(len(line) for line in lines if sum(map(line.count, "{}();=")) * 7 > len(line))
    if sum(data.count(sign) for sign in (b"%", b"\\", b"&", b"=") if sign in data) * 20 > size:
        covered += sum(match.end() - match.start() for match in _ESCAPES.finditer(text))
    middle = data[size // 2 : size // 2 + 400]
    if len(middle.translate(None, _IN_HEX_DUMPS)) * 3 < len(middle):
        dumps = (match[0] for match in _HEX_DUMP.finditer(text))
        covered += sum(map(len, filter(_HEX_LETTER.search, dumps)))  # without a hex letter it is a table of numbers
    return min(covered / max(size, 1), 1.0)


def mojibake(text: str, data: bytes, signs: list[bytes]) -> float:
    """Return the share of the characters that come from a wrong decoding or replace undecodable bytes."""
    if text.isascii():
        return 0.0
    seen = _REPLACEMENT in signs or (b"\xc3" in data and _LATIN.search(data))
    if not seen and not (_ER in signs and _CYRILLIC.search(data)):
        return 0.0
    return sum(match.end() - match.start() for match in MOJIBAKE.finditer(text)) / len(text)


def mixed_script(text: str, data: bytes, signs: list[bytes]) -> float:
    """Return the share of the words that mix Latin letters with Cyrillic or Greek letters."""
    if text.isascii() or not any(lead in data for lead in _OTHER_ALPHABETS):
        return 0.0
    return sum(1 for _ in _MIXED.finditer(text)) / (data.count(b" ") + data.count(b"\n") + 1)


# Tortured phrases: word-by-word paraphrases of terms, such as "counterfeit consciousness" for artificial intelligence
# (Cabanac, Labbe and Magazinov 2021, arXiv:2107.06751). The whole text is searched only if one is near a needle.
_TORTURED_NEEDLES = (b"counterfeit conscious", b"profound learning", b"bosom peril")
_TORTURED = re.compile(
    r"counterfeit (?:consciousness|intelligence|neural)|(?:discourse|facial|face|picture|image|voice|gesture) "
    r"acknowledgment|(?:flag|sign|signal)[ -]to[ -](?:commotion|clamou?r)|bosom (?:peril|malignan\w+|disease|growth)|"
    r"profound (?:learning|neural|brain)|(?:haze|mist) figuring|(?:irregular|arbitrary) (?:backwoods|woods|woodland)|"
    r"(?:colossal|enormous|gigantic) information|mean[ -](?:square|squared|outright) blunder|blunder rate|"
    r"(?:kidney|heart|cardiovascular|renal|liver) disappointment|fake (?:neural|brain) (?:organization|network)s?|"
    r"neural organization|(?:guileless|credulous) bayes|leftover (?:vitality|energy)"
)
# Phrases that translation services add to a page.
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
_ENTRIES = 30  # a list has at least this many entries


def machine_translated(text: str, data: bytes, signs: list[bytes]) -> int:
    """Count the different remains of machine translation and article spinning in `text`.

    Spintax ("{good|fine}") counts 2 per three occurrences.
    """
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
    """Return the share of entries that contain the most frequent word; 0 if the text is not mostly a list of short
    entries."""
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
    """Return the share of the characters that are in unfilled template fields or in lines of lorem ipsum."""
    covered = 0
    if any(sign in _FIELD_SIGNS for sign in signs):
        covered += sum(match.end() - match.start() for match in _FIELDS.finditer(text))
    if b"ipsum" in signs:
        lines = text.lower().split("\n")
        covered += sum(len(line) for line in lines if len(_LOREM.findall(line)) * 60 > len(line) > 0)
    return covered / max(len(text), 1)


# Name -> measure. Its arguments: the text, its UTF-8 with ASCII letters in lower case, the SIGNS found in these bytes.
# Searching bytes costs the same for every script; `str.lower` of a non-ASCII page would cost more than all rules.
MEASURES: dict[str, Callable[[str, bytes, list[bytes]], float]] = {
    "encoded": encoded,
    "mojibake": mojibake,
    "mixed_script": mixed_script,
    "injection": injection,
    "machine_translated": machine_translated,
    "keyword_stuffing": keyword_stuffing,
    "placeholder": placeholder,
}
SIGNS = Signs((*MOJIBAKE_SIGNS, *INJECTION_SIGNS, *RESIDUE_SIGNS))


@dataclass(frozen=True, kw_only=True)
class JunkRules:
    """Thresholds of the junk rules. A document is dropped if a measure reaches its threshold; 0 switches a rule off."""

    enabled: bool = True
    encoded: Limit = 0.2
    mojibake: Limit = 0.01
    mixed_script: Limit = 0.02
    injection: Limit = 3.0
    machine_translated: Count = 2
    keyword_stuffing: Limit = 0.3
    placeholder: Limit = 0.1

    def problems(self):
        for name in MEASURES:
            value = getattr(self, name)
            most = 1 if name not in ("injection", "machine_translated") else 100
            if not 0 <= value <= most:
                yield name, f"is {value}, must be in [0, {most}]"


class Junk:
    """Stage with the rules junk.encoded ... junk.placeholder; the drop names the first rule that applies."""

    name = "junk"

    def __init__(self, rules: JunkRules | None = None):
        self.rules = rules or JunkRules()
        self._measures = [(name, measure, getattr(self.rules, name)) for name, measure in MEASURES.items()]
        self._measures = [(name, measure, most) for name, measure, most in self._measures if most]

    @property
    def ran(self) -> str:
        on = [f"{name} < {most:g}" for name, _, most in self._measures]
        off = [
            field.name for field in fields(self.rules) if field.name in MEASURES and not getattr(self.rules, field.name)
        ]
        return ", ".join(on) + (f"; off: {', '.join(off)}" if off else "")

    def __call__(self, document: Document) -> Drop | None:
        text = document.text
        data = text.encode("utf-8", "surrogatepass").lower()
        signs = SIGNS.found_in(data)
        for name, measure, most in self._measures:
            value = measure(text, data, signs)
            if value >= most:
                return Drop(self.name, f"junk.{name}", f"{value:.3g} >= {most:g}")
        return None
