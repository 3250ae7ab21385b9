"""A corpus folder: kept documents by source, dropped ones with their reasons, and `corpus.json` over all of it.

    corpus.json            CorpusManifest; written last, so a folder without it is not a corpus
    SOURCE-NNNNN.jsonl.gz  kept documents (id, url, source, file, record_id, language, text)
    dropped-NNNNN.jsonl.gz dropped ones (id, url, source, stage, rule, value, the first 300 characters of text)

The same documents give the same bytes on every machine that has the same zlib.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import DataError
from ingot.schema.corpus import CorpusManifest
from ingot.storage import atomic_file, sha256_file

MANIFEST = "corpus.json"
EXCERPT_CHARACTERS = 300
_REBUILD = "build the corpus again: ingot data build FILES... --out DIR"


@contextmanager
def jsonl_writer(path: Path):
    """Yield `write(row: dict)`: gzip JSONL that appears at `path` when the block ends without an error.

    No file name and no time go into the gzip header: equal rows, equal bytes.
    """
    with atomic_file(path) as file, gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        yield lambda row: packed.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass"))


def read_jsonl(path: Path) -> Iterator[dict]:
    """The rows of a gzip JSONL file. Raises DataError naming the line when it is damaged."""
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007
                yield json.loads(line.decode("utf-8", "surrogatepass"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing", rule="every part named in corpus.json exists", fix=_REBUILD) from None
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: damaged after line {number} ({error})", fix=_REBUILD) from None


def load_corpus(folder: Path) -> CorpusManifest:
    """The manifest of a corpus folder. Raises DataError when there is none or it does not fit."""
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} holds no {MANIFEST}", rule="a finished corpus has one; it is written last", fix=_REBUILD
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})", fix=_REBUILD) from None
    return from_dict(CorpusManifest, values, where=lambda key: f"{path} ({key})")


def verify_corpus(folder: Path, manifest: CorpusManifest | None = None) -> CorpusManifest:
    """Check the hash of every kept and dropped part. Raises DataError naming the first one that differs."""
    manifest = manifest or load_corpus(folder)
    for part in (*manifest.parts, *manifest.dropped):
        _check(folder / part.name, part.sha256)
    return manifest


def _check(path: Path, sha256: str) -> None:
    if not path.exists():
        raise DataError(f"{path} is missing", rule=f"every part named in {MANIFEST} exists", fix=_REBUILD)
    found = sha256_file(path)
    if found != sha256:
        raise DataError(
            f"{path} has SHA-256 {found[:12]}.., {MANIFEST} says {sha256[:12]}..",
            rule="a corpus is not edited after it was built",
            fix=_REBUILD,
        )


def read_documents(corpus: Path, *, verify: bool = True) -> Iterator[tuple[str, dict]]:
    """(source, document) of every kept document in order; `verify` checks each part's hash before it is read.

    A document has id, url, source, file, record_id, language and text, all str.
    """
    for part in load_corpus(corpus).parts:
        if verify:
            _check(corpus / part.name, part.sha256)
        for row in read_jsonl(corpus / part.name):
            yield part.source, row


def read_dropped(corpus: Path) -> Iterator[dict]:
    """Every dropped document in order: id, url, source, stage, rule, value, text (an excerpt)."""
    for part in load_corpus(corpus).dropped:
        yield from read_jsonl(corpus / part.name)


def write_rows(path: Path, rows: Iterable[dict]) -> int:
    """Write `rows` to the gzip JSONL `path`; returns how many there were."""
    count = 0
    with jsonl_writer(path) as write:
        for count, row in enumerate(rows, 1):  # noqa: B007
            write(row)
    return count
