"""C4: line and document rules (Raffel et al. 2020, arXiv 1910.10683, section 2.2).

FineWeb leaves out the bad-word list and the rule that every line ends in punctuation, which removes a third of the
text; the default here leaves them out too. Thresholds and phrases are those of huggingface/datatrove,
pipeline/filters/c4_filters.py and examples/fineweb.py. The preset `c4` has the thresholds and end marks of
C4's own code (tensorflow/datasets, text/c4_utils.py): 3 sentences, lines of 5 words, and no line that ends in a single
quote. It is not that code, which differs in these respects:

- It strips a line before it removes citation marks, and not again: a line that ends in ". [3]" then ends in a space and
  is removed. Here it stays, without the mark. It also measures long words with their marks.
- It drops pages of more than 190,000 characters (`is_valid_length`); here there is no such limit.
- It counts sentences with NLTK's Punkt, here a regular expression counts them: "Dr. Smith" ends a sentence here.
- It finds a bad word only between two characters of its line, neither of them a letter a-z.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from ingot.data.filters.counts import LineRules, cut_lines, problems_of_limits
from ingot.data.filters.words import count_sentences as english_sentences
from ingot.ranges import Count
from ingot.schema.corpus import Document, Drop

# Inside a line, a sentence ends at a mark, perhaps with a closing quote, before a space and no lower-case letter.
_SENTENCE_BREAK = re.compile(r"[.!?]+[\"'”’)\]]*[ \t]+(?![a-z])")

# Scripts that write words without spaces: Thai, Japanese, Chinese.
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")


@dataclass(frozen=True, kw_only=True)
class C4Rules:
    """Settings of C4's rules. Lines with a word longer than `word_length` characters, or with fewer than `line_words`
    words, are removed.

    lorem_ipsum, curly_bracket: drop documents that contain "lorem ipsum" or "{". Switch the latter off for source code.
    javascript, policy_phrases: remove lines that mention JavaScript, or cookies and policies.
    terminal_punctuation: remove lines that do not end in . ? ! or a quotation mark, or that end in "...".
    single_quotes: a single quotation mark (') is one of them, as in datatrove; in C4's own code it is not.
    sentences: the least number of sentences; a document that has fewer in its remaining lines is dropped.
    bad_words: file with one word or phrase per line; documents that contain one are dropped. "": no such rule. A list
      comes from the user. Words of scripts without spaces (Chinese, Japanese, Thai) are found inside other words too.
    """

    enabled: bool = True
    sentences: Count = 5
    lorem_ipsum: bool = True
    curly_bracket: bool = True
    javascript: bool = True
    policy_phrases: bool = True
    terminal_punctuation: bool = False
    single_quotes: bool = True
    word_length: Count = 1000
    line_words: Count = 3
    bad_words: str = ""

    def problems(self):
        yield from problems_of_limits(self)
        if self.bad_words and not Path(self.bad_words).is_file():
            yield "bad_words", f"is {self.bad_words!r}, which is not a file"


class C4:
    """Stage with the rules c4.*; removes citation marks like [3], and lines that break a line rule, from the text.

    words: "spacy" does the same as datatrove: citation marks count as words, the spaces around them remain, and
    sentences are counted as by spaCy.
    """

    name = "c4"

    def __init__(self, rules: C4Rules | None = None, *, words: str = "whitespace"):
        self.rules = rules = rules or C4Rules()
        self.words = words
        self._lines = LineRules(
            rules.word_length,
            rules.line_words,
            rules.terminal_punctuation,
            rules.javascript,
            rules.policy_phrases,
            rules.lorem_ipsum,
            rules.curly_bracket,
            citations_first=words != "spacy",
            single_quotes=rules.single_quotes,
        )
        self._bad_words = _pattern(Path(rules.bad_words)) if rules.bad_words else None

    @property
    def ran(self) -> str:
        off = [] if self.rules.terminal_punctuation else ["terminal punctuation"]
        off += [] if self._bad_words else ["bad words"]
        return "all rules" + (f" but {' and '.join(off)}" if off else "")

    def __call__(self, document: Document) -> Drop | None:
        reason, num_lines, text = cut_lines(document.text, self._lines)
        if reason:
            return Drop(self.name, f"c4.{reason}", f"holds {'{' if reason == 'curly_bracket' else 'lorem ipsum'!r}")
        least = self.rules.sentences
        if num_lines < least:  # a line counts as at least one sentence
            sentences = self._sentences(text) if num_lines else 0
            if sentences < least:
                return Drop(self.name, "c4.sentences", f"{sentences} < {least}")
        text = text.strip()
        if self._bad_words and (found := self._bad_words.search(text.lower())):
            return Drop(self.name, "c4.bad_words", f"holds {found.group(1)!r}")
        document.text = text
        return None

    def _sentences(self, text: str) -> int:
        return sum(map(english_sentences, text.split("\n"))) if self.words == "spacy" else count_sentences(text)


def _pattern(path: Path) -> re.Pattern[str] | None:
    words = {line.strip().lower() for line in path.read_text(encoding="utf-8").splitlines()} - {""}
    if not words:
        return None
    anywhere = {word for word in words if _UNSPACED.search(word)}
    whole, inside = ("|".join(map(re.escape, sorted(part))) for part in (words - anywhere, anywhere))
    forms = [rf"(?:(?<!\w)(?:{whole})(?!\w))" if whole else "", inside]
    return re.compile(f"({'|'.join(filter(None, forms))})")


def count_sentences(text: str) -> int:
    """Count the sentences of `text`: at least one per line that is not blank. An abbreviation before a capital letter
    counts as the end of a sentence."""
    lines = sum(1 for line in text.split("\n") if line.strip())
    return lines + sum(1 for _ in _SENTENCE_BREAK.finditer(text))
