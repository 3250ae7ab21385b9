"""Byte-level BPE: train a tokenizer, and convert a tokenizer.json to a tiktoken encoding if that is exact.

`tokenizers` merges only the listed pairs, in the order of the list. tiktoken merges any two neighbors whose bytes
together are a token, lowest rank first, and encodes a whole piece at once if it is a token. So the rank must be the
position in the list of merges, not the id. Both agree on every text if `tokenizers` encodes the bytes of every token as
this token alone:

  Both always merge the lowest pair, leftmost first, so the merges inside two neighbors x y do not depend on the text
  around them. If x y are neighbors in some text, they are also the last two parts when the bytes of xy are merged
  alone. A token whose own bytes merge to it has one such pair, which is in the list, and tiktoken merges no other pair
  to it. A token whose own bytes do not merge to it is safe only if every way to split it is in the list.

A tokenizer that has no exact form (normalizers, prefix spaces, bytes without a token, added tokens that are not
special, Unigram, WordPiece, ...) raises NotExact with the reason; the caller then encodes with `tokenizers`.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.storage import write_atomic

# GPT-2's pattern, which pre_tokenizers.ByteLevel(use_regex=True) uses.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

EOT = "<|endoftext|>"  # the end-of-text token of trained tokenizers

# The split pattern of cl100k and Llama 3: contractions, words with one leading character, groups of at most three
# digits, punctuation with its line ends, line ends, other whitespace. Short groups of digits help models with numbers.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# All bytes and the end-of-text token: a smaller vocabulary could not encode every text.
SMALLEST_VOCABULARY = 257


class NotExact(Exception):
    """The error for a tokenizer.json without an exact tiktoken form, with the reason. Caught in this package."""


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet as character -> byte: printable Latin-1 bytes are their own characters, the other 68
    bytes are U+0100 and up.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def tiktoken_form(spec: dict[str, Any]) -> tuple[str, dict[bytes, int], np.ndarray]:
    """Convert a parsed tokenizer.json to (split pattern, bytes of a token -> rank, ids); ids[rank] is a token's id,
    uint32.

    Raises NotExact if there is no exact tiktoken form.
    """
    model = spec["model"]
    _require_plain(spec, model)
    pattern = _pattern(spec.get("pre_tokenizer"))
    alphabet, vocab = byte_of_character(), model["vocab"]
    missing = sorted(byte for character, byte in alphabet.items() if character not in vocab)
    if missing:
        raise NotExact(f"{len(missing)} bytes have no token (first: 0x{missing[0]:02x})")
    merges = [(a, b) for a, b in (m.split(" ") if isinstance(m, str) else m for m in model["merges"])]
    tokens = [*alphabet, *_reached_tokens(merges, vocab, bool(model.get("ignore_merges")))]
    try:
        ranks = {bytes(map(alphabet.__getitem__, token)): rank for rank, token in enumerate(tokens)}
    except KeyError as error:
        raise NotExact(f"a merge uses the character {error.args[0]!r}, which is not that of a byte") from None
    ids = np.array([vocab[token] for token in tokens], dtype=np.uint32)
    reserved = {token["id"]: token["content"] for token in spec.get("added_tokens") or ()}
    if clash := reserved.keys() & set(ids.tolist()):
        raise NotExact(f"merging plain text can give its special token {reserved[min(clash)]!r}")
    return pattern, ranks, ids


def _require_plain(spec: dict[str, Any], model: dict[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise NotExact(f"its model is {model['type']}, not BPE")
    if spec.get("normalizer"):
        raise NotExact(f"it normalizes text first ({spec['normalizer'].get('type')})")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise NotExact(f"its model uses {option}")
    for token in spec.get("added_tokens") or ():
        if not token.get("special"):
            raise NotExact(f"its added token {token['content']!r} is not special, so plain text may contain it")


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the split pattern of a pre-tokenizer that is ByteLevel, or one Split and then ByteLevel. Raises NotExact
    for other pre-tokenizers.
    """
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    kinds = [step.get("type") for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise NotExact(f"its pre-tokenizer is {kinds}, not byte-level with one split")
    if steps[-1].get("add_prefix_space", True):
        raise NotExact("it puts a space before the text (add_prefix_space)")
    uses_regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"]:
        if not uses_regex:
            raise NotExact("it does not split text into words")
        return GPT2_PATTERN
    split = steps[0]
    if uses_regex or split.get("behavior") != "Isolated" or split.get("invert") or "Regex" not in split["pattern"]:
        raise NotExact("its split is not one plain pattern")
    return split["pattern"]["Regex"]


def _reached_tokens(merges: list[tuple[str, str]], vocab: dict[str, int], ignore_merges: bool) -> list[str]:
    """Return the merged tokens in the order of their merges, without tokens that no text is encoded to. Raises NotExact
    if the order has no exact tiktoken form (see the module).
    """
    from tokenizers import models

    # Several pairs may merge to the same token (converted vocabularies list every split), but only one after the other.
    tokens = [token for token, _ in itertools.groupby(a + b for a, b in merges)]
    if len(set(tokens)) < len(tokens):
        raise NotExact("two merges far apart make the same token, so it has no single rank")
    by_merging = models.BPE(vocab=vocab, merges=merges)
    dead = {token for token in tokens if len(by_merging.tokenize(token)) != 1}
    if not ignore_merges:
        return [token for token in tokens if token not in dead]
    # With ignore_merges a whole word that is in the vocabulary becomes one token without merges, so all entries matter.
    known, listed = set(tokens) | set(byte_of_character()), set(merges)
    loose = {token for token in vocab.keys() - known if set(token) <= known}
    if loose:
        raise NotExact(f"{len(loose)} vocabulary entries have no merge, but are taken as whole words (ignore_merges)")
    for token in dead:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        if any(pair not in listed for pair in splits if pair[0] in known and pair[1] in known):
            raise NotExact(f"merging the bytes of token {token!r} does not lead to it")
    return tokens


def well_formed(text: str) -> str:
    """Return `text` with lone surrogates, which UTF-8 cannot encode, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> Path:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) on `texts` and save it as tokenizer.json.

    Every byte has a token, so every text can be encoded and decoded without change; `<|endoftext|>` has id 0.
    The result depends only on the texts, not on their order or on the number of threads. The vocabulary is smaller
    than `vocab_size` if the texts have too few pairs to merge. Raises ConfigError if `vocab_size` is too small,
    DataError if there is no text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            "E-TOKENIZER-VOCABULARY-SIZE",
            f"vocab_size is {vocab_size}",
            rule=f"a byte-level vocabulary has at least {SMALLEST_VOCABULARY} tokens: 256 bytes and {EOT}",
            fix="use 4096 for a toy model, 32768 or more for a real model",
            vocab_size=vocab_size,
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = _CountedTexts(texts)
    tokenizer.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise DataError(
            "E-TOKENIZER-NO-TEXT",
            "there is no text to train a tokenizer on",
            rule="merges are counted on the corpus, so it must have at least one document with text",
            fix="look at the dropped documents (ingot data inspect), or give more files",
        )
    write_atomic(out, tokenizer.to_str(pretty=True) + "\n")
    return out


class _CountedTexts:
    """An iterable over texts that counts their characters, so that an empty corpus is detected in the same pass."""

    def __init__(self, texts: Iterable[str]):
        self.texts, self.characters = texts, 0

    def __iter__(self):

        for text in self.texts:
            self.characters += len(text)
            yield well_formed(text)
