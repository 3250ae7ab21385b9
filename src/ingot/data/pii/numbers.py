"""What is made of digits: IPv4 addresses, payment cards, phone numbers.

Runs of digits are found first, and only they are looked at, with a little text on both sides.
"""

import re
from collections.abc import Iterable

from ingot.data.pii.network import find_ipv4
from ingot.data.pii.phone import find_phones
from ingot.data.pii.span import CARD, IP, PHONE, Span

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uff0d"
_SPACES = "\t\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
# One character for one, so that places stay places.
_PLAIN = str.maketrans(
    dict.fromkeys(_DASHES, "-") | dict.fromkeys(_SPACES, " ") | {"\uff0b": "+", "\uff08": "(", "\uff09": ")"}
)
_RUN = re.compile(rf"[0-9][0-9 ()./\-{_DASHES}{_SPACES}\uff08\uff09]{{5,}}[0-9]")
_BEFORE, _AFTER = 48, 10  # characters around a run that may decide what it is

_CARD = re.compile(
    r"(?<![\w.\-+])(?:[0-9]{13,19}"
    r"|[0-9]{4}( ?[\-.] ?| {1,2})[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?P<tail>\1[0-9]{1,3})?"
    r"|[0-9]{4}( ?[\-.] ?| {1,2})[0-9]{6}\3[0-9]{4,5})(?!\.[0-9]|-?\w)",
    re.ASCII,  # letters of scripts without spaces do not make it part of a word
)
# First digits of issuers by number of digits. 13: old Visa; 14: Diners; 15: American Express (not 35, an IMEI);
# 17 to 19: Maestro, UnionPay, JCB, Visa, Discover.
_ISSUERS = {
    13: re.compile("4"),
    14: re.compile("3(?:0[0-5]|095|[689])"),
    15: re.compile("3[47]"),
    16: re.compile("[3-6]|2[2-7]"),
    17: re.compile("5[06-8]|6"),
    18: re.compile("5[06-8]|6"),
    19: re.compile("4|5[06-8]|6|35"),
}
_LABELS_OF_OTHERS = (
    r"isbn|issn|isin|ean|gtin|upc|imei|meid|vin|doi|arxiv|pmid|oclc|lccn|order|invoice|tracking|shipment|parcel|serial|"
    r"part|model|sku|item|product|catalog(?:ue)?|article|ticket|case|issue|bug|patent|build|version|ref|reference|"
    r"transaction|batch|lot|job|policy|claim|docket|grant|barcode|id|uuid|hash|timestamp|bestellnummer|rechnung"
)
_LABEL_OF_ANOTHER = re.compile(
    rf"(?<![^\W_])(?:{_LABELS_OF_OTHERS})(?:[ _\-]?(?:1[03]|numbers?|nos?|num|nr|ids?|codes?))?[ .:#=]*$", re.IGNORECASE
)
_URL = re.compile(r"(?:://|www\.)[^\s<>\"]*$")


def find_numbers(text: str, kinds: Iterable[str] = ("ip", "card", "phone")) -> list[Span]:
    """Spans of public IPv4 addresses, cards and phone numbers. Where they overlap the more certain kind comes first."""
    spans: list[Span] = []
    number_before = 0  # where the phone number before ends, for "Tel. 12345678 or 12345679"
    for run in _RUN.finditer(text):
        low = max(run.start() - _BEFORE, 0)
        window = text[low : run.end() + _AFTER]
        if not window.isascii():
            window = window.translate(_PLAIN)
        start, end = run.start() - low, run.end() - low
        if "ip" in kinds and window.count(".", start, end) >= 3:
            spans += [Span(low + first, low + last, IP) for first, last in find_ipv4(window, start, end)]
        digits = end - start - sum(window.count(c, start, end) for c in " ()./-")
        if digits < 7:
            continue
        labelled_otherwise = bool(_LABEL_OF_ANOTHER.search(window[:start]) or _URL.search(window[:start]))
        if "card" in kinds and digits >= 13 and not labelled_otherwise:
            spans += [Span(low + first, low + last, CARD) for first, last in _find_cards(window, start, end)]
        if "phone" in kinds:
            phones = find_phones(window, start, end, number_before - low, labelled_otherwise)
            spans += [Span(low + first, low + last, PHONE) for first, last in phones]
            number_before = spans[-1].end if phones else number_before
    return spans


def _find_cards(window: str, start: int, end: int) -> list[tuple[int, int]]:
    spans = []
    for match in _CARD.finditer(window, start, end + 2):
        if is_card(match[0]):
            spans.append(match.span())
        elif match["tail"] and is_card(match[0].removesuffix(match["tail"])):  # "... 1111 123": a security code follows
            spans.append((match.start(), match.start("tail")))
    return spans


def is_card(text: str) -> bool:
    """Whether the digits of `text` have an issuer's first digits for their number (13 to 19) and a right Luhn sum."""
    digits = "".join(c for c in text if c in "0123456789")
    issuer = _ISSUERS.get(len(digits))
    if not issuer or not issuer.match(digits) or len(set(digits)) == 1 or not is_luhn(digits):
        return False
    return len(digits) != 13 or not _is_ean13(digits)


def is_luhn(digits: str) -> bool:
    """ISO/IEC 7812-1, annex B: every second digit from the right doubled, digits of the products summed."""
    doubled = "0246813579"
    return (sum(map(int, digits[-1::-2])) + sum(int(doubled[int(d)]) for d in digits[-2::-2])) % 10 == 0


def _is_ean13(digits: str) -> bool:
    """Whether it is a bar code; the two sums agree on one number in ten only."""
    return (sum(map(int, digits[::2])) + 3 * sum(map(int, digits[1::2]))) % 10 == 0
