"""Personal data becomes placeholders: e-mail addresses, phone numbers, payment cards, public IPv4 addresses.

Patterns alone hit order numbers, versions and ISBNs, so each kind is checked further: cards by issuer digit and the
Luhn sum (ISO/IEC 7812-1), addresses by range (private ones stay) and by what stands before them ("version 10.4.2.1"
stays), phone numbers by the shape of the North American plan or a leading + (ITU-T E.164: at most 15 digits).
National formats of other countries without + are not recognised.

Every scan is linear in the text: `@` and runs of digits are found first, and only they are looked at.
"""

import ipaddress
import re
from collections import Counter
from dataclasses import dataclass

from ingot.schema.document import Document, Drop

EMAIL, PHONE, CARD, IP = "<EMAIL>", "<PHONE>", "<CARD>", "<IP>"

# Bounded as RFC 5321 bounds them (64 before the @, 63 per label); the look-behind lets one start per run of characters.
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9_][A-Za-z0-9._%+\-]{0,63}@(?:[A-Za-z0-9][A-Za-z0-9\-]{0,62}\.){1,8}[A-Za-z]{2,24}"
)
# Where a card, phone number or address may stand: a run of digits and what separates them, at least 7 long.
_DIGIT_RUN = re.compile(r"[0-9][0-9 ().\u00a0\-]{5,}[0-9]")
_IP = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\.?\w)")
_CARD = re.compile(
    r"(?<![\w.\-])(?:[0-9]{14,19}|[0-9]{4}([ \-])[0-9]{4}\1[0-9]{4}\1[0-9]{4}|[0-9]{4}([ \-])[0-9]{6}\2[0-9]{4,5})"
    r"(?!\.[0-9]|-?\w)"
)
_PHONE = re.compile(
    r"(?<![\w.\-/])(?:"
    r"\+[0-9](?:[ .\u00a0\-]?(?:\([0-9]{1,5}\)|[0-9])){7,14}"  # international
    r"|(?:\+?1[ .\-]?)?\([2-9][0-9]{2}\)[ \u00a0]?[0-9]{3}[ .\-][0-9]{4}"  # (393) 759-6305
    r"|(?:1[ .\-])?[2-9][0-9]{2}([ .\-])[2-9][0-9]{2}\1[0-9]{4}"  # 393-759-6305
    r")(?!\.[0-9]|-?\w)"
)
_VERSION_BEFORE = re.compile(r"(?:version|release|build|ver\.?|v)\s*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PiiRules:
    """density: the largest number of placeholders per word; above it a page is a list of contacts and is dropped."""

    enabled: bool = True
    density: float = 0.1

    def problems(self):
        if not 0 < self.density <= 1:
            yield "density", f"is {self.density}, must be in (0, 1]"


class Pii:
    """Stage: replaces personal data in the text, counts it in notes (pii_email, ...); rule pii.density."""

    name = "pii"

    def __init__(self, rules: PiiRules | None = None):
        self.rules = rules or PiiRules()

    @property
    def ran(self) -> str:
        return f"e-mail, phone, card, public IPv4 -> placeholders, <= {self.rules.density:g} per word"

    def __call__(self, document: Document) -> Drop | None:
        text, found = scrub(document.text)
        if not found:
            return None
        document.text = text
        for placeholder, count in found.items():
            document.notes[f"pii_{placeholder.strip('<>').lower()}"] = count
        density = sum(found.values()) / len(text.split())
        if density > self.rules.density:
            return Drop(self.name, "pii.density", f"{density:.3f} > {self.rules.density:g}")
        return None


def scrub(text: str) -> tuple[str, Counter[str]]:
    """`text` with placeholders, and how many of each were put in."""
    found: Counter[str] = Counter()
    if "@" in text:
        text, count = _EMAIL.subn(EMAIL, text)
        if count:
            found[EMAIL] += count
    pieces, done = [], 0
    for run in _DIGIT_RUN.finditer(text):
        # A match starts at most one character before the first digit; the neighbours are there for the look-arounds.
        start, end = max(run.start() - 3, done), min(run.end() + 2, len(text))
        before = text[max(start - 12, 0) : start]
        piece = _scrub_run(text[start:end], before, found)
        if piece is not None:
            pieces += [text[done:start], piece]
            done = end
    if not pieces:
        return text, found
    return "".join([*pieces, text[done:]]), found


def _scrub_run(run: str, before: str, found: Counter[str]) -> str | None:
    """`run` with placeholders, or None if it holds no personal data. `before`: the text in front of it."""

    def put(placeholder: str, is_one):
        def replace(match: re.Match) -> str:
            if not is_one(match):
                return match[0]
            found[placeholder] += 1
            return placeholder

        return replace

    def is_address(match: re.Match) -> bool:
        return is_public_ipv4(match[0]) and not _VERSION_BEFORE.search(before + run[: match.start()])

    scrubbed = _IP.sub(put(IP, is_address), run)
    scrubbed = _CARD.sub(put(CARD, lambda match: is_card(match[0])), scrubbed)
    scrubbed = _PHONE.sub(put(PHONE, lambda match: 8 <= sum(map(str.isdigit, match[0])) <= 15), scrubbed)
    return scrubbed if scrubbed != run else None


def is_card(text: str) -> bool:
    """Whether the digits of `text` have a card issuer's first digits (3 to 6, or 22 to 27) and a right Luhn sum."""
    digits = [int(c) for c in text if c.isdigit()]
    if not (3 <= digits[0] <= 6 or (digits[0] == 2 and 2 <= digits[1] <= 7)) or len(set(digits)) == 1:
        return False
    doubled = [d * 2 - 9 if d > 4 else d * 2 for d in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_public_ipv4(text: str) -> bool:
    """Whether `text` is a dotted IPv4 address of the public internet."""
    try:
        return ipaddress.IPv4Address(text).is_global
    except ValueError:
        return False
