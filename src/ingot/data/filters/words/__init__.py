"""Split text into words, by one of two definitions. The quality rules depend on it: `words = "whitespace"` or "spacy".

whitespace: the words of `str.split`.
spacy: the words of spaCy's `blank("en")`, with which datatrove counts English: a punctuation mark is a word, "don't" is
two words. These English rules are used for every language, whereas datatrove has a splitter per language.
"""

import os
from functools import cache
from types import ModuleType

from ingot.data.filters.words import english, tables
from ingot.data.native import compiled

WORDS = ("whitespace", "spacy")


def split_whitespace(text: str) -> list[str]:
    """Return the words of `text` that are separated by whitespace."""
    return text.split()


def split_english(text: str) -> list[str]:
    """Return the words of `text` by the rules of spaCy's `blank("en")`, without whitespace."""
    module = native()
    if module is not None:
        try:
            return module.words(text)
        except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
            pass
    return [word for chunk in text.split() for word in english.words_of_chunk(chunk)]


def split_words(text: str, words: str) -> list[str]:
    """Return the words of `text` by the definition `words`, one of WORDS."""
    return split_english(text) if words == "spacy" else split_whitespace(text)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of `text` by the rules of spaCy's sentencizer: at least one; joined they equal `text`."""
    return english.sentences(text)


def count_sentences(text: str) -> int:
    """Return len(split_sentences(text)), by compiled code if there is any."""
    module = native()
    if module is not None:
        try:
            return module.sentences(text)
        except UnicodeEncodeError:
            pass
    return len(english.sentences(text))


def native() -> ModuleType | None:
    """Return the compiled module for words and the counts of the quality rules, set up; None if it is not built."""
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
