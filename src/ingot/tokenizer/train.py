"""Training a byte-level BPE tokenizer on a corpus."""

from collections.abc import Iterable
from pathlib import Path

from ingot.errors import ConfigError, DataError
from ingot.storage import write_atomic

EOT = "<|endoftext|>"

# The split pattern of cl100k and Llama 3: contractions, words with one leading mark, digits in groups of at most
# three, marks with their line ends, line ends, other whitespace. Digits in threes keep numbers readable to a model.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# All bytes and the end of text: below that, some text could not be encoded.
SMALLEST_VOCABULARY = 257


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> Path:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) on `texts` and save it as tokenizer.json.

    Every byte has a token, so every text can be encoded and comes back unchanged; `<|endoftext|>` has id 0.
    The result depends on the texts alone, not on their order or on the number of threads. It may hold fewer than
    `vocab_size` tokens when the texts are too small to merge more. Raises ConfigError and DataError.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size is {vocab_size}",
            rule=f"a byte-level vocabulary has at least {SMALLEST_VOCABULARY} tokens: 256 bytes and {EOT}",
            fix="use 4096 for a toy model, 32768 or more for a real one",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = _Seen(texts)
    tokenizer.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise DataError(
            "there is no text to train a tokenizer on",
            rule="merges are counted on the corpus, so it must hold at least one document with text",
            fix="look at what was dropped (ingot data inspect), or give more files",
        )
    write_atomic(out, tokenizer.to_str(pretty=True) + "\n")
    return out


class _Seen:
    """Passes texts on and counts their characters, so that an empty corpus is noticed without a second pass."""

    def __init__(self, texts: Iterable[str]):
        self.texts, self.characters = texts, 0

    def __iter__(self):
        from ingot.tokenizer.encoder import well_formed

        for text in self.texts:
            self.characters += len(text)
            yield well_formed(text)
