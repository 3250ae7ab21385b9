"""What people ask of a tokenizer: train it on what they have, and see how it cuts text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.data.build.corpus import MANIFEST, read_documents
from ingot.data.lineage.inspect import corpus_folder
from ingot.errors import ConfigError, DataError, UsageError
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import load_encoder

_CHUNK_CHARACTERS = 1 << 20  # of a text file, which may be larger than memory

_SAMPLE = (
    "The quick brown fox doesn't jump over 1,234,567 lazy dogs; naïve café owners (日本語, Ελληνικά) agree 👍.\n"
    "def area(radius):\n    return 3.14159 * radius ** 2  # square metres\n"
)


@dataclass(frozen=True)
class Description:
    """notice: why engine is not tiktoken. bytes_per_token, pieces: of the text that was shown."""

    file: str
    sha256: str
    vocabulary: int
    end_of_text: str
    end_of_text_id: int
    engine: str
    notice: str
    bytes_per_token: float
    pieces: tuple[str, ...]


def describe(path: Path, text: str = "", *, eot: str = "") -> Description:
    """Open a tokenizer.json and encode `text` (a built-in sample if empty)."""
    text = text or _SAMPLE
    encoder = load_encoder(path, [text], eot=eot)
    ids = encoder.encode(text)
    return Description(
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
    """Train a BPE on corpus folders (or what `data build --out` wrote) and text files, and save it at `out`.

    Raises UsageError for other paths, ConfigError when `out` exists and `force` is not given.
    """
    inputs = [corpus_folder(path) for path in inputs]
    if out.exists() and not force:
        raise ConfigError(
            f"{out} exists",
            rule="a tokenizer is not overwritten: tokens may have been made with it",
            fix="choose another --out, or add --force",
        )
    for path in inputs:
        if not path.is_file() and not (path / MANIFEST).is_file():
            raise UsageError(
                f"{path} is neither a text file nor a corpus folder"
                + ("" if path.exists() else " (it does not exist)"),
                rule=f"a corpus folder holds {MANIFEST}",
                fix="name the folder of data build --out, or UTF-8 text files",
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
                f"{path} is not UTF-8 text ({error.reason})",
                rule="text files are UTF-8; crawl files go through data build first",
            ) from None
