"""Replace personal data with placeholders: e-mail and IP addresses, phone and card numbers, and plug-ins' id numbers.

Patterns alone hit order numbers, versions and ISBNs, so each kind is checked further: cards by issuer and Luhn sum
(ISO/IEC 7812-1), IP addresses by range and by the text before them, phone numbers by country code and length
(ITU-T E.164), the North American plan, or a label such as "Tel." in front. The other kinds skip text that a plug-in
found, so that an IBAN does not become a phone number.

Every scan takes time linear in the text, and first searches for a mark that its kind needs: "@", a run of digits, two
colons. Personal names and postal addresses are out of scope; docs/design/junk.md has the measurements.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ingot.data.pii.addresses import find_emails, find_ipv6, is_public_ipv4
from ingot.data.pii.ids import IdPlugin, load_ids, problems_of
from ingot.data.pii.numbers import find_numbers, is_card
from ingot.data.pii.span import CARD, EMAIL, IP, PHONE, Span, without_overlaps
from ingot.ranges import Share
from ingot.schema.corpus import Document, Drop

__all__ = ["CARD", "EMAIL", "IP", "PHONE", "Pii", "PiiRules", "Span", "is_card", "is_public_ipv4", "scrub"]

Kind = Literal["email", "phone", "card", "ip"]
_WORD = 8  # characters counted as one word, for scripts that have no spaces between words
KINDS: tuple[Kind, ...] = ("email", "phone", "card", "ip")


@dataclass(frozen=True, kw_only=True)
class PiiRules:
    """Settings of the replacement.

    density: the largest number of placeholders per word; a page above this limit is a list of contacts and is dropped.

    kinds: kinds of personal data to replace, in addition to ids. obfuscated: also "name [at] host [dot] com".
    ids: names of plug-ins, built in ("iban", "us_ssn", ...: see ids.py) or from installed packages.
    """

    enabled: bool = True
    density: Share = 0.1
    kinds: tuple[Kind, ...] = KINDS
    obfuscated: bool = False
    ids: tuple[str, ...] = ()

    def problems(self):
        if not 0 < self.density <= 1:
            yield "density", f"is {self.density}, must be in (0, 1]"
        yield from problems_of(self.ids)


class Pii:
    """Stage: replaces personal data in the text and counts it in notes (pii_email, ...).

    Rules: pii.density; pii.plugin if a plug-in raised an exception or returned a span outside the text, because the
    document may still contain personal data. Raises ConfigError for a plug-in that is not installed.
    """

    name = "pii"

    def __init__(self, rules: PiiRules | None = None):
        self.rules = rules or PiiRules()
        self.ids = load_ids(self.rules.ids)

    @property
    def ran(self) -> str:
        names = {"email": "e-mail", "phone": "phone", "card": "card", "ip": "public IPv4 and IPv6"}
        kinds = [names[kind] for kind in KINDS if kind in self.rules.kinds]
        ids = f"ids {', '.join(self.rules.ids)}" if self.rules.ids else "no ids"
        obfuscated = "" if self.rules.obfuscated else ", obfuscated e-mail off"
        return f"{', '.join([*kinds, ids])}{obfuscated} -> placeholders, <= {self.rules.density:g} per word"

    def __call__(self, document: Document) -> Drop | None:
        try:
            claimed = _plugin_spans(document.text, self.ids)
        except Exception as error:  # a plug-in of another package may raise anything
            return Drop(self.name, "pii.plugin", f"{type(error).__name__}: {error}"[:200])
        text, found = _replace(document.text, _spans(document.text, self.rules.kinds, self.rules.obfuscated, claimed))
        if not found:
            return None
        document.text = text
        for placeholder, count in found.items():
            document.notes[f"pii_{placeholder.strip('<>').lower()}"] = count
        density = sum(found.values()) / max(len(text.split()), len(text) // _WORD)
        if density > self.rules.density:
            return Drop(self.name, "pii.density", f"{density:.3f} > {self.rules.density:g}")
        return None


def scrub(
    text: str, kinds: Iterable[str] = KINDS, *, obfuscated: bool = False, ids: Iterable[IdPlugin] = ()
) -> tuple[str, Counter[str]]:
    """Return (`text` with placeholders, count of each placeholder). ids: plug-ins from `load_ids`.

    Passes on any exception of a plug-in. Raises ValueError if a plug-in returns a span outside the text.
    """
    return _replace(text, _spans(text, tuple(kinds), obfuscated, _plugin_spans(text, ids)))


def _plugin_spans(text: str, ids: Iterable[IdPlugin]) -> list[Span]:
    spans = []
    for plugin in ids:
        for start, end in plugin.find(text):
            if not 0 <= start < end <= len(text):
                raise ValueError(f"{plugin.placeholder}: span ({start}, {end}) is not in the text")
            spans.append(Span(start, end, plugin.placeholder))
    return spans


def _spans(text: str, kinds: tuple[str, ...], obfuscated: bool, claimed: list[Span]) -> list[Span]:
    """Return all spans in the order of the text, without overlaps.

    Where spans overlap, the kind that is first in this order is kept: ids of plug-ins, e-mail, IPv6, IPv4, card,
    phone. claimed: the spans that plug-ins found.
    """
    spans = claimed
    if "email" in kinds:
        spans = spans + find_emails(text, obfuscated)
    if "ip" in kinds:
        spans = spans + find_ipv6(text)
    if any(kind in kinds for kind in ("ip", "card", "phone")):
        spans = spans + find_numbers(text, kinds)
    return without_overlaps(spans)


def _replace(text: str, spans: list[Span]) -> tuple[str, Counter[str]]:
    found: Counter[str] = Counter()
    if not spans:
        return text, found
    pieces, done = [], 0
    for start, end, placeholder in spans:
        pieces += [text[done:start], placeholder]
        found[placeholder] += 1
        done = end
    return "".join([*pieces, text[done:]]), found
