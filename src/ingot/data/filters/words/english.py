"""Split text into the words and sentences of spaCy's `blank("en")` and its sentencizer, in plain Python.

A text is cut at whitespace into chunks, and each chunk is split alone: prefixes and suffixes are cut off one after the
other until a special case is left or there are no more; the rest is a special case or a web address, or is cut at
infixes. At the end, adjacent words that together are a special case with punctuation in it (":)") are replaced by the
words of that case.

The rules are those of spaCy 3.8.18, in the same order. They are written here as scans of bounded cost, because the
usual way, one regular expression per rule, takes quadratic time on hostile text. `native/quality.c` does the same much
faster; words/__init__.py chooses between the two.
"""

from functools import cache, lru_cache
from itertools import accumulate

from ingot.data.filters.words.tables import (
    ALPHANUMERIC,
    BEFORE_STOP,
    CATEGORY_P,
    DECIMAL,
    FLAGS,
    ICON,
    LETTER,
    LONGEST_UNIT,
    LOWER,
    PREFIX,
    QUOTE,
    SENTENCE,
    SUFFIX,
    UNITS,
    UPPER,
    special_cases,
)

SPECIAL = special_cases()
LONGEST_SPECIAL = max(map(len, SPECIAL))
_DIGITS = frozenset("0123456789")
_LONGEST_KEPT = 64  # longer chunks rarely repeat, so they are not cached


def words_of_chunk(chunk: str) -> tuple[str, ...]:
    """Return the words of `chunk`, a text without whitespace; joined they equal `chunk`."""
    return _remembered(chunk) if len(chunk) <= _LONGEST_KEPT else _joined(_split(chunk, True))


@lru_cache(1 << 15)
def _remembered(chunk: str) -> tuple[str, ...]:
    return _joined(_split(chunk, True))


def _is_special(text: str, start: int, end: int) -> bool:
    return start < end <= start + LONGEST_SPECIAL and text[start:end] in SPECIAL


def _split(chunk: str, special: bool) -> list[str]:
    """Return the words of `chunk` before adjacent words are joined to special cases. special: apply special cases while
    cutting."""
    words, suffixes = [], []
    start, end = 0, len(chunk)
    while start < end:
        if special and _is_special(chunk, start, end):
            break
        prefix = prefix_length(chunk, start, end)
        if prefix and special and _is_special(chunk, start + prefix, end):
            words.append(chunk[start : start + prefix])
            start += prefix
            break
        suffix = suffix_length(chunk, start + prefix, end)
        if suffix and special and _is_special(chunk, start, end - suffix):
            suffixes.append(chunk[end - suffix : end])
            end -= suffix
            break
        if not prefix and not suffix:
            break
        if prefix:
            words.append(chunk[start : start + prefix])
        if suffix:
            suffixes.append(chunk[end - suffix : end])
        start, end = start + prefix, end - suffix
    if special and _is_special(chunk, start, end):
        words.extend(SPECIAL[chunk[start:end]])
    elif start < end:
        rest = chunk[start:end]
        words.extend([rest] if "." in rest and is_address(rest) else _split_infixes(rest))
    return words + suffixes[::-1]


def prefix_length(text: str, start: int, end: int) -> int:
    """Return the length of the prefix of text[start:end] that is a separate word, 0 if there is none."""
    if start >= end:
        return 0
    first = text[start]
    if FLAGS[first] & PREFIX:
        return 1
    if first == "+":
        return int(start + 1 == end or text[start + 1] not in _DIGITS)
    if first == ".":
        run = _run(text, start, end)
        return run if run > 1 else 0
    for sign in ("US$", "C$", "A$"):
        if text.startswith(sign, start, end):
            return len(sign)
    return 0


def suffix_length(text: str, start: int, end: int) -> int:
    """Return the length of the longest suffix of text[start:end] that is a separate word, 0 if there is none."""
    if start >= end:
        return 0
    last = text[end - 1]
    for i in range(end - 2, max(end - 2 - LONGEST_UNIT, start - 1), -1):  # a unit or currency after a digit
        if text[i] in _DIGITS:
            if text[i + 1 : end] in UNITS:
                return end - 1 - i
            break
    if last == ".":
        first = end - 1
        while first > start and text[first - 1] == ".":
            first -= 1
        if end - first > 1:
            return end - first
        if first == start:
            return 0
        before = FLAGS[text[first - 1]]
        if before & BEFORE_STOP:
            return 1
        if first - 2 < start:
            return 0
        if before & UPPER and FLAGS[text[first - 2]] & UPPER:
            return 1
        return int(text[first - 2] == "°" and text[first - 1] in "FfCcKk")
    if end - start > 1 and text[end - 2 : end] in ("'s", "'S", "’s", "’S", "……"):
        return 2
    if FLAGS[last] & SUFFIX:
        return 1
    return int(last == "+" and end - 2 >= start and text[end - 2] in _DIGITS)


def _split_infixes(text: str) -> list[str]:
    if text.isascii() and text.isalnum():
        return [text]
    words, start, i = [], 0, 0
    while i < len(text):
        length = infix_length(text, i)
        if length and i:  # an infix at the start cuts nothing
            if i > start:
                words.append(text[start:i])
            words.append(text[i : i + length])
            start = i + length
        i += length or 1
    if start < len(text):
        words.append(text[start:])
    return words


def infix_length(text: str, i: int) -> int:
    """Return the length of the infix at text[i], which cuts `text` in two; 0 if there is none."""
    sign = text[i]
    if sign == "." and text.startswith("..", i):
        return _run(text, i, len(text))
    if sign == "…" or FLAGS[sign] & ICON:
        return 1
    if not i or i + 1 == len(text):
        return 0
    before, after = FLAGS[text[i - 1]], FLAGS[text[i + 1]]
    digit = text[i - 1] in _DIGITS
    if sign in "+-*^" and digit and (text[i + 1] in _DIGITS or text[i + 1] == "-"):
        return 1
    if sign == ".":
        return int(bool(before & (LOWER | QUOTE) and after & (UPPER | QUOTE)))
    if sign == ",":
        return int(bool(before & LETTER and after & LETTER))
    if not before & LETTER and not digit:
        return 0
    if sign in ":<>=/":
        return int(bool(after & LETTER))
    for hyphen in ("-", "–", "—", "--", "---", "——", "~"):
        if text.startswith(hyphen, i) and i + len(hyphen) < len(text) and FLAGS[text[i + len(hyphen)]] & LETTER:
            return len(hyphen)
    return 0


def _run(text: str, start: int, end: int) -> int:
    """Count the full stops in a row from `start` on."""
    i = start
    while i < end and text[i] == ".":
        i += 1
    return i - start


def is_address(text: str) -> bool:
    """Check whether spaCy takes `text` for a URL, a host with a top-level domain, or an e-mail address."""
    starts = {0}
    scheme = 0
    while scheme < len(text) and (FLAGS[text[scheme]] & ALPHANUMERIC or text[scheme] in "_+-."):
        scheme += 1
    if scheme >= 2 and text.startswith("://", scheme):
        starts.add(scheme + 3)
    starts.update(i + 1 for i in range(1, len(text)) if text[i] == "@")
    return any(_is_tail(text, end) for start in starts for end in (_ip(text, start), _host(text, start)) if end)


def _is_tail(text: str, i: int) -> bool:
    """Check whether text[i:] can follow a host: a port, a path, both or nothing."""
    if i < len(text) and text[i] == ":":
        port = i + 1
        while port < len(text) and FLAGS[text[port]] & DECIMAL:
            port += 1
        if not 2 <= port - i - 1 <= 5:
            return False
        i = port
    return i == len(text) or text[i] in "/?#"


def _in_label(character: str) -> bool:
    return (character.isascii() and character.isalnum()) or "\u00a1" <= character <= "\uffff"


def _host(text: str, start: int) -> int:
    """Return the end of the host name at `start`, 0 if there is none. A host name has labels of 1 to 64 characters,
    then 2 to 63 lower-case letters."""
    i, labels = start, 0
    while True:
        label = i
        while i < len(text) and (_in_label(text[i]) or text[i] in "_-"):
            i += 1
        if i == len(text) or text[i] != ".":
            break
        if not 1 <= i - label <= 64 or not _in_label(text[label]) or not _in_label(text[i - 1]):
            return 0
        i, labels = i + 1, labels + 1
    end = label
    while end < len(text) and FLAGS[text[end]] & LOWER:
        end += 1
    return end if labels and 2 <= end - label <= 63 else 0


def _ip(text: str, start: int) -> int:
    """Return the end of the public IPv4 address at `start`, 0 if there is none."""
    octets, i = [], start
    for _ in range(4):
        first = i
        while i < len(text) and i - first < 4 and text[i] in _DIGITS:
            i += 1
        octets.append(text[first:i])
        if not 1 <= i - first <= 3 or (len(octets) < 4 and not text.startswith(".", i)):
            return 0
        i += len(octets) < 4
    values = [int(octet) for octet in octets]
    private = values[0] in (10, 127) or values[:2] in ([169, 254], [192, 168])
    if private or (values[0] == 172 and 16 <= values[1] <= 31) or values[0] > 223 or max(values[1:]) > 255:
        return 0
    if octets[0][0] == "0" or octets[3][0] == "0" or values[3] == 255:
        return 0
    if any(len(octet) == 3 and octet[0] == "0" for octet in octets[1:3]):
        return 0
    return i


@cache
def joining_cases() -> dict[str, list[int]]:
    """Return the special cases that the other rules would cut: case -> end offsets of the words that these rules would
    give."""
    cases = {}
    for case in SPECIAL:
        infix = any(infix_length(case, i) for i in range(len(case)))
        if infix or prefix_length(case, 0, len(case)) or suffix_length(case, 0, len(case)):
            cases[case] = ends(_split(case, False))
    return cases


def ends(words) -> list[int]:
    """Return the end offset of each of `words` in their concatenation."""
    return list(accumulate(map(len, words)))


def _joined(words: list[str]) -> tuple[str, ...]:
    """Return `words` with adjacent words that form a special case replaced by the words of that case; the longest run
    first, then the leftmost."""
    if len(words) < 2:
        return tuple(words)
    found, cases = [], joining_cases()
    for start in range(len(words)):
        text, cuts = "", []
        for word in words[start : start + LONGEST_SPECIAL]:
            text += word
            cuts.append(len(text))
            if len(text) > LONGEST_SPECIAL:
                break
            if cases.get(text) == cuts:
                found.append((-len(cuts), start, text))
    if not found:
        return tuple(words)
    taken, chosen = set(), {}
    for length, start, text in sorted(found):
        span = range(start, start - length)
        if span[0] not in taken and span[-1] not in taken:
            chosen[start] = (-length, text)
        taken.update(span)  # even if the span was not chosen, as in spaCy
    joined, i = [], 0
    while i < len(words):
        length, text = chosen.get(i, (1, ""))
        joined.extend(SPECIAL[text] if text else [words[i]])
        i += length
    return tuple(joined)


def sentences(text: str) -> list[str]:
    """Return the sentences of `text`; joined they equal `text`, and "" is one sentence.

    A sentence ends at the first word after a mark like "." that is not punctuation. Whitespace other than a single
    space counts as such a word, so it belongs to the second sentence.
    """
    pieces, begin, end, after_mark = [], 0, 0, False
    for start, word in _with_whitespace(text):
        is_mark = len(word) == 1 and FLAGS[word] & SENTENCE
        if after_mark and not is_mark and not all(FLAGS[character] & CATEGORY_P for character in word):
            pieces.append(text[begin:end])
            begin, after_mark = end, False
        elif is_mark:
            after_mark = True
        end = start + len(word)
    return [*pieces, text[begin:]]


def _with_whitespace(text: str):
    """Yield (start, word) for each word and each run of whitespace, without the one space that belongs to the word
    before."""
    i = 0
    while i < len(text):
        end, space = i + 1, text[i].isspace()
        while end < len(text) and text[end].isspace() == space:
            end += 1
        if space:
            start = i + (i > 0 and text[i] == " ")
            if start < end:
                yield start, text[start:end]
        else:
            for word in words_of_chunk(text[i:end]):
                yield i, word
                i += len(word)
        i = end
