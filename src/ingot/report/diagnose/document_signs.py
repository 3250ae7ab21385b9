"""Signs of a document that may harm training: repeated text, damaged characters, injected text, unusual tokens.

Each sign is a number, and says nothing alone: web text repeats itself, and pages about prompts have prompts in them. So
a document is compared with healthy documents of the same run. Its distance is measured from the median of theirs, in
units of the distance of the farthest of them: 2 is twice as far as any healthy document. docs/spike.md lists the signs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ingot.data.filters.injection import INJECTION_SIGNS, first_order, injection
from ingot.data.filters.junk import MOJIBAKE

NGRAM = 8  # tokens; about five words, the shortest of Gopher's duplicate n-grams (arXiv:2112.11446, Table A1)
SHORTEST = 16  # tokens; the shares of shorter parts are noise
NEAR = 64  # the fewest healthy documents of the nearest lengths, for signs that depend on the length; else a quarter
UNUSUAL = 2.0  # times as far from the median as the farthest healthy document
_TOKEN_CHARACTERS = 4  # about the length of a token
_PAIRS = 4  # new pairs of a word that is new, in rare tokens
_EXCERPT = 60  # characters

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]+")
_RUN = re.compile(r"(\S)\1{7,}")
# Names of special tokens of published tokenizers: GPT, ChatML, Llama, Gemma, Mistral, DeepSeek, Phi, BERT, T5.
_SPECIAL = re.compile(
    r"<\|[A-Za-z_][A-Za-z0-9_ .-]{0,40}\|>|<\uff5c[^<>\n]{1,40}\uff5c>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
    r"|\[(?:CLS|SEP|MASK|PAD|UNK|BOS|EOS)\]|<(?:bos|eos|pad|unk|mask)>|</?s>|<extra_id_\d+>"
)
# Code for a browser or a database in place of text (OWASP Top 10 2021, A03 Injection, and its cheat sheets).
_CODE = re.compile(
    r"<script\b[^>\n]{0,200}>|</script>|javascript:[^\s\"'<>]{1,80}|\bon(?:error|load|click|mouseover)\s*=\s*[\"'(\w]"
    r"|\bunion\s+(?:all\s+)?select\b[^\n;]{0,80}|;\s*drop\s+table\b[^\n;]{0,60}|'\s*or\s+'?1'?\s*=\s*'?1"
    r"|\bxp_cmdshell\b|<iframe\b[^>\n]{0,200}>|\beval\s*\(\s*(?:atob|unescape|base64_decode)\s*\([^)\n]{0,80}",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class SignKind:
    """A kind of sign. name: as it is shown, and in a quarantine list. words: its value in words, with {value}. side:
    which values are unusual. unit: what a value counts. by_length: healthy documents of like length are compared with.
    general: it has no cause of its own, so that another sign explains it.
    """

    name: str
    words: str
    side: Literal["high", "both"] = "high"
    unit: Literal["tokens", "characters", "bits"] = "characters"
    by_length: bool = False
    general: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        SignKind(name="repeated_text", words="{value:.1%} of its tokens are repeated", unit="tokens", by_length=True),
        SignKind(name="character_runs", words="{value:.1%} of its text is one character in a row"),
        SignKind(name="undecodable", words="{value:.2%} of its text is not valid UTF-8, or U+FFFD"),
        SignKind(name="mojibake", words="{value:.2%} of its text was decoded wrongly"),
        SignKind(name="control_characters", words="{value:.2%} of its text is control characters"),
        SignKind(name="prompt_injection", words="{value:.1f} points of orders to language models in 1,000 characters"),
        SignKind(name="special_tokens", words="{value:.2%} of its text is names of special tokens"),
        SignKind(name="code_injection", words="{value:.2%} of its text is code for a browser or a database"),
        SignKind(
            name="entropy",
            words="its tokens have {value:.2f} bits of entropy",
            side="both",
            unit="bits",
            by_length=True,
            general=True,
        ),
        SignKind(
            name="rare_tokens",
            words="its tokens have {value:.2f} bits by their usual shares",
            unit="bits",
            by_length=True,
            general=True,
        ),
        SignKind(
            name="new_pairs",
            words="{value:.1%} of its token pairs are new",
            unit="tokens",
            by_length=True,
            general=True,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class DocumentSigns:
    """The signs of a part of a document.

    tokens, characters: its length; 0 characters if its text is unknown. values: by the name of the kind. excerpts: a
    piece of the text that shows the sign, by the same name.
    """

    tokens: int
    characters: int
    values: dict[str, float]
    excerpts: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class UsualTokens:
    """The tokens of healthy text. bits: float64 [vocabulary], -log2 of the share of each token, with one more
    of each. pairs: uint64, sorted, the pairs of neighbours that occur."""

    bits: np.ndarray
    pairs: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[np.ndarray], vocab_size: int) -> "UsualTokens":
        """Count the tokens of healthy parts (integers [n] each, below `vocab_size`)."""
        joined = np.concatenate(parts) if parts else np.empty(0, np.int64)
        counts = np.bincount(joined, minlength=vocab_size) + 1
        pairs = np.unique(np.concatenate([_pairs(part) for part in parts])) if parts else np.empty(0, np.uint64)
        return cls(bits=-np.log2(counts / counts.sum()), pairs=pairs)


def _pairs(tokens: np.ndarray) -> np.ndarray:
    wide = tokens.astype(np.uint64)
    return (wide[:-1] << np.uint64(32)) | wide[1:]


def measure_signs(
    tokens: np.ndarray, text: str | None, usual: UsualTokens, special: Sequence[str] = ()
) -> DocumentSigns:
    """Return the signs of a part of a document: integers [n], n > 0, and its text; None if it is unknown.

    special: the texts of the tokenizer's own special tokens.
    """
    share, at = _repeated(tokens)
    _, counts = np.unique(tokens, return_counts=True)
    shares = counts / len(tokens)
    pairs = _pairs(tokens)
    near = np.minimum(np.searchsorted(usual.pairs, pairs), max(len(usual.pairs) - 1, 0))
    known = usual.pairs[near] == pairs if len(usual.pairs) else np.zeros(len(pairs), bool)
    values = {
        "repeated_text": share,
        "entropy": float(-(shares * np.log2(shares)).sum()),
        "rare_tokens": float(usual.bits[tokens].mean()),
        "new_pairs": float(1 - known.mean()) if len(known) else 0.0,
    }
    excerpts: dict[str, str] = {}
    if text:
        values |= _text_signs(text, special, excerpts)
        beginning = _shown(text[:_EXCERPT])
        excerpts |= dict.fromkeys(("entropy", "rare_tokens", "new_pairs"), beginning)
        if at >= 0:  # the piece of the text that has this share of the tokens before it
            begin = len(text) * at // len(tokens)
            excerpts["repeated_text"] = _shown(text[begin : begin + _EXCERPT])
    return DocumentSigns(tokens=len(tokens), characters=len(text or ""), values=values, excerpts=excerpts)


def _repeated(tokens: np.ndarray) -> tuple[float, int]:
    """Return the share of the tokens that are in an n-gram which occurs twice or more, and the place of the n-gram that
    occurs most often; -1 if there is none."""
    count = len(tokens) - NGRAM + 1
    if count < 2:
        return 0.0, -1
    grams = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    _, first, which, often = np.unique(grams, axis=0, return_index=True, return_inverse=True, return_counts=True)
    repeated = often[which.reshape(-1)] > 1
    if not repeated.any():
        return 0.0, -1
    starts = np.flatnonzero(repeated)
    covered = np.zeros(len(tokens), bool)
    covered[(starts[:, None] + np.arange(NGRAM)).reshape(-1)] = True
    return float(covered.mean()), int(first[np.argmax(often)])


def _text_signs(text: str, special: Sequence[str], excerpts: dict[str, str]) -> dict[str, float]:
    size = len(text)
    runs = max(_RUN.finditer(text), key=lambda match: match.end() - match.start(), default=None)
    found = {
        "character_runs": [runs] if runs else [],
        "undecodable": list(re.finditer("\ufffd+", text)),
        "mojibake": list(MOJIBAKE.finditer(text.replace("\ufffd", " "))),
        "control_characters": list(_CONTROL.finditer(text)),
        "special_tokens": list(_SPECIAL.finditer(text)),
        "code_injection": list(_CODE.finditer(text)),
    }
    covered = {name: sum(match.end() - match.start() for match in matches) for name, matches in found.items()}
    for own in special:
        if not _SPECIAL.fullmatch(own) and (times := text.count(own)) and len(own) > 1:
            covered["special_tokens"] += times * len(own)
            excerpts.setdefault("special_tokens", own)
    for name, matches in found.items():
        if matches:
            begin = max(matches[0].start() - _EXCERPT // 3, 0)
            excerpts[name] = _shown(text[begin : begin + _EXCERPT])
    data = text.encode("utf-8", "surrogatepass").lower()
    score = injection(text, data, [sign for sign in INJECTION_SIGNS if sign in data])
    if order := first_order(text):
        excerpts["prompt_injection"] = _shown(order[:_EXCERPT])
    return {name: number / size for name, number in covered.items()} | {"prompt_injection": 1000 * score / size}


def _shown(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True, kw_only=True)
class JudgedSign:
    """A sign of a document beside those of healthy documents.

    value: its own. median, lowest, highest: of `healthy` healthy documents. ratio: its distance from the median in
    units of that of the farthest healthy document on its side. excerpt: a piece of the text that shows it, or "".
    """

    kind: SignKind
    value: float
    median: float
    lowest: float
    highest: float
    healthy: int
    ratio: float
    excerpt: str

    @property
    def unusual(self) -> bool:
        """True if no healthy document is nearly as far from the usual."""
        return self.ratio >= UNUSUAL

    @property
    def words(self) -> str:
        """The sign in words."""
        limit = self.highest if self.value >= self.median else self.lowest
        own = self.kind.words.format(value=self.value)
        usual = _number(self.kind, limit)
        times = f"{self.ratio:.0f}" if self.ratio >= 10 else f"{self.ratio:.1f}"
        far = f"{times} times as far from the median of {self.healthy:,} healthy documents as the farthest of them"
        return f"{own}: {far} ({usual})"


def _number(kind: SignKind, value: float) -> str:
    spec = kind.words[kind.words.index("{") : kind.words.index("}") + 1]
    return spec.format(value=value)


class HealthySigns:
    """The signs of healthy documents, with which others are compared."""

    def __init__(self, healthy: Sequence[DocumentSigns]):
        healthy = [one for one in healthy if one.tokens >= SHORTEST]
        self._values = {name: np.array([one.values[name] for one in healthy if name in one.values]) for name in KINDS}
        self._lengths = {name: np.log2([one.tokens for one in healthy if name in one.values]) for name in KINDS}

    def judge(self, signs: DocumentSigns) -> list[JudgedSign]:
        """Return the signs of a document, the most unusual one first; none without healthy documents to compare with,
        or if it is shorter than SHORTEST."""
        if signs.tokens < SHORTEST:
            return []
        judged = [one for name in signs.values if (one := self._judge(KINDS[name], signs)) is not None]
        return sorted(judged, key=lambda one: -one.ratio)

    def _judge(self, kind: SignKind, signs: DocumentSigns) -> JudgedSign | None:
        values = self._values[kind.name]
        if kind.by_length:
            distance = np.abs(self._lengths[kind.name] - np.log2(signs.tokens))
            values = values[np.argsort(distance, kind="stable")[: max(NEAR, len(values) // 4)]]
        if not len(values):
            return None
        value = signs.values[kind.name]
        median, lowest, highest = float(np.median(values)), float(values.min()), float(values.max())
        ratio = max(value - median, 0.0) / max(highest - median, _unit(kind, signs))
        if kind.side == "both" and value < median:
            ratio = (median - value) / max(median - lowest, _unit(kind, signs))
        return JudgedSign(
            kind=kind,
            value=value,
            median=median,
            lowest=lowest,
            highest=highest,
            healthy=len(values),
            ratio=ratio,
            excerpt=signs.excerpts.get(kind.name, ""),
        )


def _unit(kind: SignKind, signs: DocumentSigns) -> float:
    """Return the least distance that counts: that of two equal n-grams, of one point, of a new word, or of a token."""
    if kind.name == "repeated_text":
        return 2 * NGRAM / signs.tokens
    if kind.name == "prompt_injection":
        return 1000 / signs.characters
    if kind.unit == "characters":
        return _TOKEN_CHARACTERS / signs.characters
    if kind.unit == "tokens":
        return _PAIRS / signs.tokens
    return float(np.log2(signs.tokens)) / signs.tokens
