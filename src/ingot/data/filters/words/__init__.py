"""The definition of a word. It changes the quality rules, so it is a setting: `words = "whitespace"` or "spacy".

whitespace: the words of `str.split`.
spacy: the words of spaCy's `blank("en")`, with which datatrove counts English: a punctuation mark is a word, "don't" is
two words. These rules of English are used for every language; datatrove uses another splitter per language.
"""

import os
from functools import cache
from types import ModuleType

from ingot.data.filters.words import english, tables
from ingot.data.native import compiled

WORDS = ("whitespace", "spacy")


def split_whitespace(text: str) -> list[str]:
    """The words of `text` between whitespace."""
    return text.split()


def split_english(text: str) -> list[str]:
    """The words of `text` by the rules of spaCy's `blank("en")`, without whitespace."""
    module = native()
    if module is not None:
        try:
            return module.words(text)
        except UnicodeEncodeError:  # a lone surrogate: there is no UTF-8 of it
            pass
    return [word for chunk in text.split() for word in english.words_of_chunk(chunk)]


def split_words(text: str, words: str) -> list[str]:
    """The words of `text` by the definition `words` of WORDS."""
    return split_english(text) if words == "spacy" else split_whitespace(text)


def split_sentences(text: str) -> list[str]:
    """`text` cut into sentences by the rules of spaCy's sentencizer; together they are `text`. At least one."""
    return english.sentences(text)


def count_sentences(text: str) -> int:
    """len(split_sentences(text)), at native speed."""
    module = native()
    if module is not None:
        try:
            return module.sentences(text)
        except UnicodeEncodeError:
            pass
    return len(english.sentences(text))


def native() -> ModuleType | None:
    """The compiled module of words and of the counts of the quality rules, ready for use, or None without it."""
    module = compiled("_quality")
    if module is not None:
        _set_up(module)
    return module


@cache
def _set_up(module: ModuleType) -> None:
    def ends(words) -> tuple[int, ...]:
        return tuple(english.ends(words))

    joining = english.joining_cases()
    cases = [(case, ends(words), tuple(joining.get(case, ()))) for case, words in english.SPECIAL.items()]
    salt = int.from_bytes(os.urandom(8), "little")
    module.setup(
        lambda number: tables.page(number).tobytes(), cases, tuple(sorted(tables.UNITS)), tables.STOP_WORDS, salt
    )
