"""Find personal data made of digits: payment cards, phone numbers and IPv4 addresses.

Runs of digits are found first; the checks see only these runs with a little text on both sides. Phone numbers are
international numbers with + or an exit code (ITU-T E.164), North American numbers, and national numbers after a label.
"""

import re
from collections.abc import Iterable

from ingot.data.pii.addresses import find_ipv4
from ingot.data.pii.span import CARD, IP, PHONE, Span

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uff0d"
_SPACES = "\t\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
# Each character is replaced by one character, so that offsets in the text remain valid.
_PLAIN = str.maketrans(
    dict.fromkeys(_DASHES, "-") | dict.fromkeys(_SPACES, " ") | {"\uff0b": "+", "\uff08": "(", "\uff09": ")"}
)
_RUN = re.compile(rf"[0-9][0-9 ()./\-{_DASHES}{_SPACES}\uff08\uff09]{{5,}}[0-9]")
_BEFORE, _AFTER = 48, 10  # characters before and after a run that help to classify it

_CARD = re.compile(
    r"(?<![\w.\-+])(?:[0-9]{13,19}"
    r"|[0-9]{4}( ?[\-.] ?| {1,2})[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?P<tail>\1[0-9]{1,3})?"
    r"|[0-9]{4}( ?[\-.] ?| {1,2})[0-9]{6}\3[0-9]{4,5})(?!\.[0-9]|-?\w)",
    re.ASCII,  # a number may touch letters of scripts without spaces between words
)
# Number of digits -> first digits of card issuers. 13: old Visa; 14: Diners; 15: American Express (not 35: an IMEI
# begins so); 17 to 19: Maestro, UnionPay, JCB, Visa, Discover.
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
    """Return the spans of public IPv4 addresses, cards and phone numbers. Spans may overlap; for each run of digits
    the more certain kind comes first."""
    spans: list[Span] = []
    number_before = 0  # where the previous phone number ends, for "Tel. 12345678 or 12345679"
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
        labeled_otherwise = bool(_LABEL_OF_ANOTHER.search(window[:start]) or _URL.search(window[:start]))
        if "card" in kinds and digits >= 13 and not labeled_otherwise:
            spans += [Span(low + first, low + last, CARD) for first, last in _find_cards(window, start, end)]
        if "phone" in kinds:
            phones = find_phones(window, start, end, number_before - low, labeled_otherwise)
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
    """Check whether the digits of `text` (13 to 19) begin like an issuer's numbers and have a correct Luhn sum."""
    digits = "".join(c for c in text if c in "0123456789")
    issuer = _ISSUERS.get(len(digits))
    if not issuer or not issuer.match(digits) or len(set(digits)) == 1 or not is_luhn(digits):
        return False
    return len(digits) != 13 or not _is_ean13(digits)


def is_luhn(digits: str) -> bool:
    """Check the Luhn sum (ISO/IEC 7812-1, annex B): with every second digit from the right doubled, the sum of all
    digits is divisible by 10."""
    doubled = "0246813579"
    return (sum(map(int, digits[-1::-2])) + sum(int(doubled[int(d)]) for d in digits[-2::-2])) % 10 == 0


def _is_ean13(digits: str) -> bool:
    """Check whether `digits` are a bar code (EAN-13). Only one card number in ten also has a valid bar code sum."""
    return (sum(map(int, digits[::2])) + 3 * sum(map(int, digits[1::2]))) % 10 == 0


# A group of digits, perhaps in brackets, and the separators between groups. Possessive: no backtracking.
# re.ASCII: letters of scripts without spaces between words may touch a number.
_GROUP = r"(?:\([0-9]{1,5}\)|[0-9]++)"
_BETWEEN = r"(?: ?[\-./] ?| )?+"
_END = r"(?!\.[0-9]|-?\w)"
_INTERNATIONAL = re.compile(
    rf"(?<![\w+])(?:\(\+[1-9][0-9]{{0,3}}\)|\+\(?[1-9][0-9]*+\)?)(?:{_BETWEEN}{_GROUP})*+{_END}", re.ASCII
)
# 00 in most of the world, 011 in North America. A gap is required: digits without one may be any zero-padded number.
_EXIT_CODE = re.compile(rf"(?<![\w+.,\-/])(?:00|011[ \-])(?=[1-9])[0-9]++(?:{_BETWEEN}{_GROUP})++{_END}", re.ASCII)
_NORTH_AMERICAN = re.compile(
    r"(?<![\w.\-/+])(?:"
    r"(?:1[ .\-]?)?\([1-9][0-9]{2}\)(?: ?- ?|[ ./])?[0-9]{3}(?: ?- ?|[ .])?[0-9]{4}"  # (393) 759-6305
    r"|(?:1[ .\-])?[1-9][0-9]{2}([.\-])[0-9]{3}\1[0-9]{4}"  # 393-759-6305; made-up ones (555-123-4567) as well
    r"|(?:1 )?[2-9][0-9]{2}( )[2-9][0-9]{2} [0-9]{4}"  # 393 759 6305
    r"|[2-9][0-9]{2}/[2-9][0-9]{2}-[0-9]{4}"  # 393/759-6305
    rf"){_END}",
    re.ASCII,
)
_NATIONAL = re.compile(rf"(?<![\w+])\(?[0-9]++\)?(?:{_BETWEEN}{_GROUP})*+{_END}", re.ASCII)
_DIGITS = re.compile(r"[0-9]+")
_VOLUME = re.compile(r"(?<![0-9])[0-9]{1,3} ?$")

_WORDS = (
    r"tel(?:e(?:phone|f[oó]n[eo]?|fax))?|t[ée]l(?:[ée](?:phone|fono|copie))?|phone|ph|fax|mob(?:ile?|iel|il(?:telefon|funk))?|"
    r"cell(?:ular|phone)?|handy|call(?! num)|dial|ring|sms|whatsapp|hotline|helpline|fon|telefoon|puhelin|tlf|tlph|"
    r"portable|celular|m[óo]vil|cellulare|тел|телефон|факс|моб|טלפון|هاتف|تلفن|फ़ोन|दूरभाष|โทร"
)
_FILLERS = (
    r"no|nr|num|number|numbers|us|me|him|her|them|now|today|at|on|is|direct|mobile|home|work|office|free|toll-free"
)
_LABEL = re.compile(
    rf"(?:(?<!\w)(?:{_WORDS})|电话|電話|手机|手機|传真|傳真|전화|☎|☏|✆|📞|📱|(?<!\w)[TMF](?=[:.]))"
    rf"(?:[ .:)\-/]{{0,3}}(?<!\w)(?:{_FILLERS})(?!\w))*[ .:=#)\-/|\uff1a\ufe0f]{{0,4}}\(?$",
    re.IGNORECASE,
)
_ALSO = re.compile(r"^ ?(?:/|,|;|\||&|or|and|oder|und|ou|et|o|y|e) ?\(?$", re.IGNORECASE)
_NO_PHONE = re.compile(
    r"(?:19|20)[0-9]{2} ?[-/] ?(?:(?:19|20)?[0-9]{2})(?: ?[-/].*)?|[0-9]+\.[0-9]+"
    r"|[0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{2,4}"
)
# ITU-T E.164 country codes of one and two digits; all other codes have three digits.
_SHORT_CODES = """
    1 7 20 27 30 31 32 33 34 36 39 40 41 43 44 45 46 47 48 49 51 52 53 54 55 56 57 58 60 61 62 63 64 65 66 81 82 84 86
    90 91 92 93 94 95 98
"""
_CODES_1_2 = frozenset(_SHORT_CODES.split())
_CODES_3 = ("21", "22", "23", "24", "25", "26", "29", "35", "37", "38", "42", "50", "59", "67", "68", "69", "80", "85")
_CODES_3 += ("87", "88", "96", "97", "99")
_TOLL_FREE = ("800", "833", "844", "855", "866", "877", "888")
_NATIONAL_MAX = 12
_E164_MAX = 15


def find_phones(
    window: str, start: int, end: int, number_before: int, labeled_otherwise: bool
) -> list[tuple[int, int]]:
    """Return the spans of the phone numbers in window[start:end], a run of digits; international numbers first.

    number_before: where the previous phone number ends, negative if that is before the window. labeled_otherwise: a
    label like "order no." precedes the run, or the run is part of a URL.
    """
    spans: list[tuple[int, int]] = []
    labeled = not labeled_otherwise and _has_label(window, start, number_before)
    if not labeled_otherwise:
        for match in _INTERNATIONAL.finditer(window, max(start - 2, 0), end + 2):
            span = _international(match)
            if span:
                spans.append(span)
    if not spans and (found := _EXIT_CODE.match(window, start, end + 2)):
        groups = [m.span() for m in _DIGITS.finditer(window, *found.span())]
        digits = "".join(window[a:b] for a, b in groups).removeprefix("011").removeprefix("00")
        if (
            not labeled_otherwise
            and (labeled or len(groups) > 2)
            and 9 <= len(digits) <= _E164_MAX
            and _country(digits)
        ):
            spans.append(found.span())
    for match in _NORTH_AMERICAN.finditer(window, max(start - 1, 0), end + 2):
        toll_free = match[0].lstrip("1(-. ")[:3] in _TOLL_FREE
        if labeled_otherwise and not toll_free:
            continue
        follows_one = spans and match.start() - spans[-1][1] <= 3
        if not (labeled or toll_free or follows_one) and _is_other_number(window, match):
            continue
        spans.append(match.span())
    if labeled and not spans:
        spans = _find_national(window, start, end)
    return spans


def _find_national(window: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return the spans of the national numbers at the start of a labeled run: one number, or several with "/", "or" or
    the like between them."""
    spans: list[tuple[int, int]] = []
    first = start - 1 if start and window[start - 1] == "(" else start
    while match := _NATIONAL.match(window, first, min(first + 48, end + 2)):
        span = _cut(match, _NATIONAL_MAX)
        if _NO_PHONE.fullmatch(match[0]) or sum(c.isdigit() for c in window[slice(*span)]) < 7:
            break
        spans.append(span)
        rest = _DIGITS.search(window, span[1], end)
        if not rest or not _ALSO.match(window[span[1] : rest.start()]):
            break
        first = rest.start()
    return spans


def _has_label(window: str, start: int, number_before: int) -> bool:
    before = window[:start]
    if 0 <= number_before <= start and _ALSO.match(window[number_before:start]):
        return True
    return _LABEL.search(before) is not None


def _international(match: re.Match) -> tuple[int, int] | None:
    """Return the span of the number with + in `match`, without groups beyond the 15 digits of E.164; None if it is not
    a phone number."""
    text = match[0]
    digits = "".join(c for c in text if c.isdigit())
    code = _country(digits)
    if not code:
        return None
    if code in ("1", "7"):  # plans of exactly ten digits
        start, end = _cut(match, 11)
    else:
        start, end = _cut(match, _E164_MAX)
    text = match.string[start:end]
    digits = "".join(c for c in text if c.isdigit())
    national = digits[len(code) :]
    if len(digits) < 9 or national.startswith("00") or (code in ("1", "7") and len(digits) != 11):
        return None
    return None if _is_decimal(text) else (start, end)


def _country(digits: str) -> str:
    """Return the country code at the start of `digits`, "" if there is none."""
    for length in (1, 2):
        if digits[:length] in _CODES_1_2:
            return digits[:length]
    return digits[:3] if digits.startswith(_CODES_3) else ""


def _is_decimal(text: str) -> bool:
    """Check whether `text` is a decimal number or a coordinate pair (+51.507351, +40.7128-074.0060), so that its
    points are decimal points and do not separate the groups of a phone number."""
    if "." not in text:
        return False
    points = text.count(".")
    groups = _DIGITS.findall(text)
    return (points == 1 and len(groups) <= 2) or (
        points < len(groups) - 1 and "(" not in text and points > 1 and "-" in text
    )


def _cut(match: re.Match, most: int) -> tuple[int, int]:
    """Return the span of `match`, cut after the last group that keeps the number within `most` digits. The span is not
    cut if the first group alone has more."""
    total, end = 0, match.end()
    for group in _DIGITS.finditer(match.string, match.start(), match.end()):
        total += len(group[0])
        if total > most:
            break
        end = group.end()
    if match.string[end : end + 1] == ")" and end < match.end() and match.string.count("(", match.start(), end):
        end += 1
    return match.start(), end


def _is_other_number(window: str, match: re.Match) -> bool:
    """Check whether `match` looks like a number that is not a phone number.

    If it begins with a bracket: a short number precedes it, as in "vol. 12 (345) 678-6790". Otherwise: all groups end
    in 00 (pages 100-200-3000), or groups with spaces continue before or after the match (200 300 4000 500).
    """
    if match[0].startswith("("):
        return _VOLUME.search(window, max(match.start() - 6, 0), match.start()) is not None
    if all(group.endswith("00") for group in _DIGITS.findall(match[0])):
        return True
    before = window[max(match.start() - 3, 0) : match.start()].rstrip(" ,;")
    after = window[match.end() : match.end() + 3].lstrip(" ,;")
    return bool(match[2]) and (before[-1:].isdigit() or after[:1].isdigit())
