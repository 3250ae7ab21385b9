"""Train a tokenizer on corpora and text files, and describe how a tokenizer splits text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.data.build.corpus import MANIFEST, read_documents
from ingot.data.lineage.inspect import corpus_folder
from ingot.errors import ConfigError, DataError, UsageError
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import load_encoder

_CHUNK_CHARACTERS = 1 << 20  # to read at once from a text file: the file may be larger than memory

_SAMPLE = (
    "The quick brown fox doesn't jump over 1,234,567 lazy dogs; naïve café owners (日本語, Ελληνικά) agree 👍.\n"
    "def area(radius):\n    return 3.14159 * radius ** 2  # square metres\n"
)


@dataclass(frozen=True)
class TokenizerDescription:
    """The description of a tokenizer and of the text that it encoded.

    engine: "tiktoken" or "tokenizers". notice: the reason why the engine is not tiktoken, or "". pieces: the text of
    each token.
    """

    file: str
    sha256: str
    vocabulary: int
    end_of_text: str
    end_of_text_id: int
    engine: str
    notice: str
    bytes_per_token: float
    pieces: tuple[str, ...]


def describe(path: Path, text: str = "", *, eot: str = "") -> TokenizerDescription:
    """Open a tokenizer.json, encode `text` (a built-in sample if empty), and return the description."""
    text = text or _SAMPLE
    encoder = load_encoder(path, [text], eot=eot)
    ids = encoder.encode(text)
    return TokenizerDescription(
        file=str(path),
        sha256=encoder.sha256,
        vocabulary=encoder.vocab_size,
        end_of_text=encoder.eot,
        end_of_text_id=encoder.eot_id,
        engine=encoder.engine,
        notice=encoder.notice,
        bytes_per_token=round(len(text.encode("utf-8", "replace")) / max(len(ids), 1), 3),
        pieces=tuple(encoder.decode([i]) for i in ids.tolist()),
    )


def train_on(inputs: Sequence[Path], vocab_size: int, out: Path, *, force: bool = False) -> Path:
    """Train a BPE tokenizer on corpus folders (or output folders of `data build`) and text files; save it at `out`.

    Raises UsageError for other paths, ConfigError if `out` exists and `force` is not given.
    """
    inputs = [corpus_folder(path) for path in inputs]
    if out.exists() and not force:
        raise ConfigError(
            "E-TOKENIZER-EXISTS",
            f"{out} exists",
            rule="a tokenizer is not overwritten, because tokens may have been made with it",
            fix="choose another --out, or add --force",
            path=str(out),
        )
    for path in inputs:
        if not path.is_file() and not (path / MANIFEST).is_file():
            raise UsageError(
                "E-TOKENIZER-INPUT",
                f"{path} is neither a text file nor a corpus folder"
                + ("" if path.exists() else " (it does not exist)"),
                rule=f"a corpus folder holds {MANIFEST}",
                fix="name the folder of data build --out, or UTF-8 text files",
                path=str(path),
            )
    return train_bpe(_texts(inputs), vocab_size, out)


def _texts(inputs: Sequence[Path]) -> Iterator[str]:
    for path in inputs:
        if path.is_dir():
            yield from (document["text"] for _, document in read_documents(path))
            continue
        try:
            with path.open(encoding="utf-8") as file:
                yield from iter(lambda file=file: file.read(_CHUNK_CHARACTERS), "")
        except UnicodeDecodeError as error:
            raise DataError(
                "E-TEXT-ENCODING",
                f"{path} is not UTF-8 text: {error.reason}",
                rule="text files are UTF-8",
                fix="convert the file to UTF-8; for crawl files, build a corpus first: ingot data build",
                path=str(path),
            ) from None
