"""C4: line and document rules (Raffel et al. 2020, arXiv 1910.10683, section 2.2), as FineWeb uses them.

FineWeb leaves out the rule that every line ends in punctuation (it loses a third of the text) and the bad-word list.
Thresholds and phrases: huggingface/datatrove, pipeline/filters/c4_filters.py and examples/fineweb.py.
"""

import re
from dataclasses import dataclass

from ingot.schema.document import Document, Drop

POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
# A sentence ends inside a line where its mark, and perhaps a closing quote, meets a space and no lower-case letter.
_SENTENCE_BREAK = re.compile(r"[.!?]+[\"'”’)\]]*[ \t]+(?![a-z])")


@dataclass(frozen=True, kw_only=True)
class C4Rules:
    """Lines with a word longer than `word_length` characters, or with fewer than `line_words` words, are cut.

    lorem_ipsum, curly_bracket: drop documents that hold "lorem ipsum" or "{". Switch the latter off for source code.
    javascript, policy_phrases: cut lines that ask for JavaScript or speak of cookies and policies.
    sentences: a document that has fewer after its lines were cut is dropped.
    """

    enabled: bool = True
    sentences: int = 5
    lorem_ipsum: bool = True
    curly_bracket: bool = True
    javascript: bool = True
    policy_phrases: bool = True
    word_length: int = 1000
    line_words: int = 3


class C4:
    """Stage with rules c4.*; cuts citation marks like [3], then lines, out of the text, and blank lines with them."""

    name = "c4"
    ran = "all rules but terminal punctuation and bad words"

    def __init__(self, rules: C4Rules | None = None):
        self.rules = rules or C4Rules()

    def __call__(self, document: Document) -> Drop | None:
        rules, text = self.rules, document.text
        lower = text.lower()
        has_javascript = rules.javascript and "javascript" in lower
        has_policy = rules.policy_phrases and any(phrase in lower for phrase in POLICY_PHRASES)
        has_long_word = len(text) > rules.word_length
        kept = []
        for line in text.splitlines():
            if "[" in line:
                line = _CITATION.sub("", line)
            words = line.split()
            if len(words) < rules.line_words:
                continue
            if has_long_word and len(line) > rules.word_length and max(map(len, words)) > rules.word_length:
                continue
            if has_javascript or has_policy:
                lower_line = line.lower()
                if has_javascript and "javascript" in lower_line:
                    continue
                if has_policy and any(phrase in lower_line for phrase in POLICY_PHRASES):
                    continue
            kept.append(line.strip())
        text = "\n".join(kept)
        if rules.curly_bracket and "{" in text:
            return Drop(self.name, "c4.curly_bracket", "holds '{'")
        if rules.lorem_ipsum and "lorem ipsum" in lower and "lorem ipsum" in text.lower():
            return Drop(self.name, "c4.lorem_ipsum", "holds 'lorem ipsum'")
        sentences = count_sentences(text)
        if sentences < rules.sentences:
            return Drop(self.name, "c4.sentences", f"{sentences} < {rules.sentences}")
        document.text = text
        return None


def count_sentences(text: str) -> int:
    """Sentences of `text`: at least one per line that is not blank. Abbreviations before capitals count as ends."""
    lines = sum(1 for line in text.split("\n") if line.strip())
    return lines + sum(1 for _ in _SENTENCE_BREAK.finditer(text))
