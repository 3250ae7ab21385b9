"""Counts of a text for the quality rules: compiled loops of one pass each, and plain loops with the same results.

The counts equal those of datatrove 0.10, with which FineWeb was made, including its peculiarities:

- the most frequent n-gram counts as its length with spaces times its number of occurrences, overlapping ones included;
- repeated n-grams are compared, and their characters counted, as words joined without spaces; after a repeated n-gram,
  its n words are skipped;
- paragraphs are split from the stripped text, lines from the unstripped text.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import accumulate
from typing import Any, NamedTuple

from ingot.data.filters.words import native, split_words
from ingot.data.filters.words.tables import BULLET, FLAGS, PUNCTUATION, STOP_WORDS, TERMINAL

POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
CLOSING_QUOTES = "\"'”’»…"
_KELVIN = "\u212a"  # its lower-case form is an ASCII "k"
_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
# Bits of C4's switches, as native/quality.c expects them.
_TERMINAL_PUNCTUATION, _JAVASCRIPT, _POLICY, _LOREM, _CURLY, _CITATIONS_FIRST, _SINGLE_QUOTES = (
    1 << bit for bit in range(7)
)


class GopherCounts(NamedTuple):
    """Counts of one text for Gopher's rules.

    real_words, real_characters: number of words that are not only symbols, and their characters. pieces: lines as the
    repetition rules count them, without blank lines. lines: with spaCy's words all lines, as in datatrove, and only
    "•" and "-" are bullets; otherwise the lines that are not blank, because text from pages has a blank line after
    each entry of a list.
    """

    characters: int
    words: int
    real_words: int
    real_characters: int
    alphabetic_words: int
    hashes: int
    ellipses: int
    lines: int
    bullet_lines: int
    ellipsis_lines: int
    stop_words: int
    paragraphs: int
    duplicate_paragraphs: int
    duplicate_paragraph_characters: int
    pieces: int
    duplicate_lines: int
    duplicate_line_characters: int
    top_2_gram: int
    top_3_gram: int
    top_4_gram: int
    duplicate_5_gram: int
    duplicate_6_gram: int
    duplicate_7_gram: int
    duplicate_8_gram: int
    duplicate_9_gram: int
    duplicate_10_gram: int


class FineWebCounts(NamedTuple):
    """Counts of one text for FineWeb's rules.

    characters: number without newlines. words: separated by whitespace. lines, ended_lines, short_lines and
    duplicate_characters ignore blank lines.
    """

    characters: int
    words: int
    newlines: int
    lines: int
    ended_lines: int
    short_lines: int
    duplicate_characters: int


def count_gopher(text: str, words: str) -> GopherCounts:
    """Return the counts for Gopher's quality and repetition rules. words: the definition of a word, one of WORDS."""
    module = native()
    if module is not None:
        try:
            return GopherCounts._make(module.gopher(text, words == "spacy"))
        except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
            pass
    return plain_gopher(text, words)


def plain_gopher(text: str, words: str) -> GopherCounts:
    """Return the counts of `count_gopher`; the reference implementation in Python."""
    found = split_words(text, words)
    counts = Counter(found)
    alphabetic = sum(count for word, count in counts.items() if word.isalpha() or any(map(str.isalpha, word)))
    real = {word: count for word, count in counts.items() if word.isalpha() or _is_real(word, words)}
    lines = [line for line in map(str.strip, text.splitlines()) if line or words == "spacy"]
    paragraphs = re.split(r"\n{2,}", text.strip())
    pieces = re.split(r"\n+", text)
    return GopherCounts(
        len(text),
        len(found),
        sum(real.values()),
        sum(len(word) * count for word, count in real.items()),
        alphabetic,
        text.count("#"),
        text.count("...") + text.count("…"),
        len(lines),
        sum(line.startswith(("•", "-")) if words == "spacy" else bool(FLAGS[line[0]] & BULLET) for line in lines),
        sum(line.endswith(("...", "…")) for line in lines),
        sum(word in counts for word in STOP_WORDS),
        len(paragraphs),
        *duplicates(paragraphs),
        len(pieces),
        *duplicates(pieces),
        *top_ngrams(found),
        *duplicate_ngrams(found),
    )


def _is_real(word: str, words: str) -> bool:
    """Check that `word` is not only symbols. With spaCy's words a bullet is not a symbol, as in datatrove."""
    if words == "spacy":
        return not all(FLAGS[character] & PUNCTUATION for character in word)
    return any(map(str.isalnum, word))


def duplicates(pieces: list[str]) -> tuple[int, int]:
    """Return (number of `pieces` that equal an earlier piece, their characters)."""
    seen = set(pieces)
    if len(seen) == len(pieces):
        return 0, 0
    return len(pieces) - len(seen), sum(map(len, pieces)) - sum(map(len, seen))


def top_ngrams(words: list[str]) -> list[int]:
    """Return for n = 2, 3, 4 the length with spaces of the most frequent n-gram times its count (of equally frequent
    n-grams the first).

    A repeated n-gram begins and ends with repeated (n-1)-grams, so only n-grams between such positions are counted.
    """
    found = []
    tally: Counter = Counter(words)
    shorter = {i: word for i, word in enumerate(words) if tally[word] > 1}  # position -> (n-1)-gram
    for n in (2, 3, 4):
        last = len(words) - n
        ngrams = {i: (ngram, words[i + n - 1]) for i, ngram in shorter.items() if i <= last and i + 1 in shorter}
        tally = Counter(ngrams.values())
        ngram, count = tally.most_common(1)[0] if tally else (None, 1)
        shorter = {i: ngram for i, ngram in ngrams.items() if tally[ngram] > 1}
        first = next((i for i in shorter if shorter[i] == ngram), 0)
        found.append((sum(map(len, words[first : first + n])) + n - 1) * count if last >= 0 else 0)
    return found


def duplicate_ngrams(words: list[str]) -> list[int]:
    """Return for n = 5 .. 10 the number of characters in n-grams seen before; after such an n-gram, its n words are
    skipped.

    Only positions where an n-gram can repeat are searched: their first 16 joined characters occur at another position
    too, or their first five words have fewer than 16 characters.
    """
    joined, ends = "".join(words), [0, *accumulate(map(len, words))]
    beginnings = [joined[end : end + 16] for end in ends[:-1]]
    tally = Counter(beginnings)
    places = [
        i
        for i, beginning in enumerate(beginnings[: max(len(words) - 4, 0)])
        if tally[beginning] > 1 or ends[i + 5] - ends[i] < 16
    ]
    return [_duplicates_of(n, joined, ends, places) for n in range(5, 11)]


def _duplicates_of(n: int, joined: str, ends: list[int], places: list[int]) -> int:
    seen: set[str] = set()
    characters = next_place = 0
    for i in places:
        if i < next_place or i + n >= len(ends):
            continue
        ngram = joined[ends[i] : ends[i + n]]
        if ngram in seen:
            characters += len(ngram)
            next_place = i + n
        else:
            seen.add(ngram)
    return characters


def count_fineweb(text: str, short_characters: int, closing_quotes: bool) -> FineWebCounts:
    """Return the counts for FineWeb's rules.

    short_characters: largest length of a short line. closing_quotes: a line may also end in a quotation mark or "…".
    """
    module = native()
    if module is not None:
        try:
            return FineWebCounts._make(module.fineweb(text, short_characters, closing_quotes))
        except UnicodeEncodeError:
            pass
    return plain_fineweb(text, short_characters, closing_quotes)


def plain_fineweb(text: str, short_characters: int, closing_quotes: bool) -> FineWebCounts:
    """Return the counts of `count_fineweb`; the reference implementation in Python."""
    lines = [line for line in text.split("\n") if line.strip()]
    more = CLOSING_QUOTES if closing_quotes else ""
    newlines = text.count("\n")
    return FineWebCounts(
        len(text) - newlines,
        len(text.split()),
        newlines,
        len(lines),
        sum(bool(FLAGS[line[-1]] & TERMINAL) or line[-1] in more for line in lines),
        sum(len(line) <= short_characters for line in lines),
        duplicates(lines)[1],
    )


class LineRules(NamedTuple):
    """Settings of C4's rules for lines.

    citations_first: citation marks are removed before the words of a line are counted, not after.
    """

    word_length: int
    line_words: int
    terminal_punctuation: bool
    javascript: bool
    policy_phrases: bool
    lorem_ipsum: bool
    curly_bracket: bool
    citations_first: bool
    single_quotes: bool


def cut_lines(text: str, rules: LineRules) -> tuple[str, int, str]:
    """Apply C4's line rules. Return (rule that drops the document or "", number of kept lines, these lines joined).

    If a rule drops the document, the lines after that are not read.
    """
    module = native()
    if module is not None and _KELVIN not in text:
        bits = (
            _TERMINAL_PUNCTUATION * rules.terminal_punctuation
            | _JAVASCRIPT * rules.javascript
            | _POLICY * rules.policy_phrases
            | _LOREM * rules.lorem_ipsum
            | _CURLY * rules.curly_bracket
            | _CITATIONS_FIRST * rules.citations_first
            | _SINGLE_QUOTES * rules.single_quotes
        )
        try:
            return module.c4(text, rules.word_length, rules.line_words, bits)
        except UnicodeEncodeError:
            pass
    return plain_cut_lines(text, rules)


def plain_cut_lines(text: str, rules: LineRules) -> tuple[str, int, str]:
    """Return the result of `cut_lines`; the reference implementation in Python."""
    kept: list[str] = []
    ends = (".", "?", "!", '"', *("'" * rules.single_quotes))
    for line in text.splitlines():
        if rules.citations_first:
            line = _CITATION.sub("", line)
        line = line.strip()
        words = line.split()
        if len(line) > rules.word_length and max(map(len, words)) > rules.word_length:
            continue
        if not rules.citations_first:
            line = _CITATION.sub("", line)
        if rules.terminal_punctuation and (not line.endswith(ends) or line.endswith("...")):
            continue
        if len(words) < rules.line_words:
            continue
        lower = line.lower()
        if rules.lorem_ipsum and "lorem ipsum" in lower:
            return "lorem_ipsum", len(kept), "\n".join(kept)
        if rules.javascript and "javascript" in lower:
            continue
        if rules.curly_bracket and "{" in line:
            return "curly_bracket", len(kept), "\n".join(kept)
        if rules.policy_phrases and any(phrase in lower for phrase in POLICY_PHRASES):
            continue
        kept.append(line)
    return "", len(kept), "\n".join(kept)


def problems_of_limits(rules: Any) -> Iterator[tuple[str, str]]:
    """Yield (field, message) for each limit below 0 and each pair (least, most) that no value satisfies."""
    for name, value in ((field.name, getattr(rules, field.name)) for field in fields(rules)):
        if isinstance(value, tuple):
            if not 0 <= value[0] <= value[1]:
                yield name, f"is {value[0]:g} to {value[1]:g}, must be at least 0, with the first not above the second"
        elif isinstance(value, (int, float)) and not value >= 0:
            yield name, f"is {value:g}, must be at least 0"
