"""Replace personal data with placeholders: e-mail and IP addresses, phone and card numbers, ids, kinds of plug-ins.

Patterns alone hit order numbers, versions and ISBNs, so each kind is checked further: cards by issuer and Luhn sum
(ISO/IEC 7812-1), IP addresses by range and by the text before them, phone numbers by country code and length
(ITU-T E.164), the North American plan, or a label such as "Tel." in front. The other kinds skip text that a plug-in
found, so that an IBAN does not become a phone number.

Every scan takes time linear in the text, and first searches for a mark that its kind needs: "@", a run of digits, two
colons. Personal names and postal addresses are out of scope; docs/design/junk.md has the measurements.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ingot.data.guard import PluginCalls, broken_contract
from ingot.data.parts import Table, in_words, module_of, settings_of
from ingot.data.pii.addresses import find_emails, find_ipv6, is_public_ipv4
from ingot.data.pii.ids import IdPlugin, load_ids, problems_of
from ingot.data.pii.numbers import find_numbers, is_card
from ingot.data.pii.span import CARD, EMAIL, IP, PHONE, Span, without_overlaps
from ingot.plugins.pii import PII_KINDS
from ingot.plugins.registry import INGOT, resolve
from ingot.ranges import Share
from ingot.schema.corpus import Document, Drop

__all__ = ["CARD", "EMAIL", "IP", "PHONE", "Pii", "PiiRules", "Span", "is_card", "is_public_ipv4", "scrub"]

_WORD = 8  # characters counted as one word, for scripts that have no spaces between words
KINDS = ("email", "phone", "card", "ip")


@dataclass(frozen=True, kw_only=True)
class PiiRules:
    """Settings of the replacement.

    density: the largest number of placeholders per word; a page above this limit is a list of contacts and is dropped.

    kinds: kinds of personal data to replace, in addition to ids: those above, and kinds that plug-ins register
    (plugins/pii.py). obfuscated: also "name [at] host [dot] com".
    ids: names of plug-ins, built in ("iban", "us_ssn", ...: see ids.py) or from installed packages.
    """

    enabled: bool = True
    density: Share = 0.1
    kinds: tuple[str, ...] = KINDS
    obfuscated: bool = False
    ids: tuple[str, ...] = ()

    def problems(self):
        if not 0 < self.density <= 1:
            yield "density", f"is {self.density}, must be in (0, 1]"
        for kind in self.kinds:
            if kind not in PII_KINDS:
                yield "kinds", PII_KINDS.unknown(kind)
        yield from problems_of(self.ids)


class Pii:
    """Stage: replaces personal data in the text and counts it in notes (pii_email, ...).

    Rules: pii.density; pii.plugin if a plug-in raised an exception or returned wrong spans, because the document may
    still contain personal data. tables: the settings of kinds of plug-ins, by name. Raises ConfigError for a plug-in
    that is not installed.
    """

    name = "pii"

    def __init__(self, rules: PiiRules | None = None, tables: Mapping[str, Table] | None = None):
        self.rules = rules or PiiRules()
        self.ids = load_ids(self.rules.ids)
        others = [kind for kind in self.rules.kinds if module_of("pii_kind", kind) != INGOT]
        self._others = [_KindOfPlugin(kind, (tables or {}).get(kind)) for kind in others]

    @property
    def ran(self) -> str:
        names = {"email": "e-mail", "phone": "phone", "card": "card", "ip": "public IPv4 and IPv6"}
        kinds = [names[kind] for kind in KINDS if kind in self.rules.kinds] + [other.name for other in self._others]
        ids = f"ids {', '.join(self.rules.ids)}" if self.rules.ids else "no ids"
        obfuscated = "" if self.rules.obfuscated else ", obfuscated e-mail off"
        return f"{', '.join([*kinds, ids])}{obfuscated} -> placeholders, <= {self.rules.density:g} per word"

    def __call__(self, document: Document) -> Drop | None:
        try:
            claimed = _plugin_spans(document.text, self.ids)
        except Exception as error:  # a plug-in of another package may raise anything
            return Drop(self.name, "pii.plugin", f"{type(error).__name__}: {error}"[:200])
        for other in self._others:
            try:
                claimed += other.spans(document.text)
            except Exception as error:
                return other.calls.raised(error)
            other.calls.returned()
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


class _KindOfPlugin:
    """A kind of personal data of a plug-in, with its settings."""

    def __init__(self, name: str, table: Table | None):
        self.name, part = name, PII_KINDS[name]
        self.calls = PluginCalls(in_words("pii_kind", name), Pii.name)
        self._find, self._placeholder = resolve(part.find), part.placeholder
        if not isinstance(self._placeholder, str):
            raise broken_contract(
                self.calls.part, f"has the placeholder {part.placeholder!r}", "a placeholder is a str"
            )
        self._settings = settings_of("pii_kind", name, table)

    def spans(self, text: str) -> list[Span]:
        """Return the spans of `text`. Raises whatever the plug-in raises, and WrongSpan."""
        found = []
        for pair in self._find(text, self._settings):
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(place) is int for place in pair)):
                raise WrongSpan(f"{self.calls.part}: {pair!r} is not a pair of positions"[:200])
            if not 0 <= pair[0] < pair[1] <= len(text):
                raise WrongSpan(f"{self.calls.part}: span {pair} is not in the text of {len(text)} characters")
            found.append(Span(*pair, self._placeholder))
        found.sort()
        for one, other in itertools.pairwise(found):
            if other.start < one.end:
                raise WrongSpan(f"{self.calls.part}: spans {one[:2]} and {other[:2]} overlap")
        return found


class WrongSpan(ValueError):
    """A plug-in returned a span that cannot be replaced."""


def find_email(text: str, settings: None = None) -> Iterator[tuple[int, int]]:
    """Yield the spans of e-mail addresses, by the contract of plugins/pii.py, as the three functions below."""
    return _bounds(find_emails(text, obfuscated=False))


def find_ip(text: str, settings: None = None) -> Iterator[tuple[int, int]]:
    return _bounds(without_overlaps(find_ipv6(text) + find_numbers(text, ("ip",))))


def find_card(text: str, settings: None = None) -> Iterator[tuple[int, int]]:
    return _bounds(find_numbers(text, ("card",)))


def find_phone(text: str, settings: None = None) -> Iterator[tuple[int, int]]:
    return _bounds(find_numbers(text, ("phone",)))


def _bounds(spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
    return ((span.start, span.end) for span in spans)


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

    Where spans overlap, the kind that is first in this order is kept: ids, kinds of plug-ins, e-mail, IPv6, IPv4, card,
    phone. claimed: the spans that ids and plug-ins found. The kinds made of digits are found in one pass, which is
    faster than a call of find_ip, find_card and find_phone.
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
