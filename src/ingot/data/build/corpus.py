"""A corpus folder: kept documents by source, dropped ones with their reasons, and `corpus.json` over all of it.

    corpus.json            CorpusManifest; written last, so a folder without it is not a corpus
    seconds.json           CPU seconds by stage; apart, so that equal builds have an equal corpus.json
    SOURCE-NNNNN.jsonl.gz  kept documents (id, url, source, file, record_id, language, text; before, after: hashes of
                           the text as it was extracted and as it is kept)
    dropped-NNNNN.jsonl.gz dropped ones (id, url, source, file, stage, rule, value, the first 300 characters of text)
    lineage-NNNNN.parquet  the fate of every record of an input, without its text (lineage.py)

The same documents give the same bytes on every machine that has the same zlib.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingot.config import from_dict, to_dict
from ingot.data.lineage.damage import raise_all
from ingot.errors import ConfigError, DataError, DataMissing
from ingot.schema.corpus import CorpusManifest
from ingot.storage import atomic_file, sha256_file, write_json

MANIFEST = "corpus.json"
SECONDS = "seconds.json"
EXCERPT_CHARACTERS = 300
_REBUILD = "remove the corpus folder and build it again: ingot data build FILES... --out DIR"


@contextmanager
def jsonl_writer(path: Path):
    """Yield `write(line: bytes)`: gzip JSONL that appears at `path` when the block ends without an error.

    No file name and no time go into the gzip header: equal lines, equal bytes.
    """
    with atomic_file(path) as file, gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        yield packed.write


def json_line(row: dict) -> bytes:
    """`row` as a line of UTF-8 JSON. Lone surrogates (broken URLs) become \\uXXXX, which reads back as they were."""
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def read_jsonl(path: Path) -> Iterator[dict]:
    """The rows of a gzip JSONL file. Raises DataError naming the line when it is damaged."""
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007
                yield json.loads(line)
    except FileNotFoundError:
        raise DataError(f"{path} is missing", rule="every part named in corpus.json exists", fix=_REBUILD) from None
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: damaged after line {number} ({error})", fix=_REBUILD) from None


def write_manifest(folder: Path, manifest: CorpusManifest) -> None:
    """Write corpus.json, and what the stages cost beside it."""
    values = to_dict(manifest)
    write_json(folder / SECONDS, {stage["name"]: stage.pop("seconds") for stage in values["funnel"]})
    write_json(folder / MANIFEST, values)


def load_corpus(folder: Path) -> CorpusManifest:
    """The manifest of a corpus folder, with the seconds of its funnel if they are there.

    Raises DataError when there is none or it does not fit.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if (folder / SECONDS).exists():
            seconds = json.loads((folder / SECONDS).read_text(encoding="utf-8"))
            for stage in values["funnel"]:
                stage["seconds"] = seconds.get(stage["name"], 0.0)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir() or not any(folder.iterdir()):
            raise DataMissing(
                f"there is no corpus at {folder}",
                rule=f"a finished one holds {MANIFEST}",
                fix="check the path; ingot data build FILES... --out DIR makes one",
            ) from None
        raise DataError(
            f"{folder} holds no {MANIFEST}", rule="a finished corpus has one; it is written last", fix=_REBUILD
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error})", fix=_REBUILD) from None
    try:
        return from_dict(CorpusManifest, values, where=lambda key: f"{path} ({key})")
    except ConfigError as error:
        raise DataError(error.found, rule="a corpus is not edited after it was built", fix=_REBUILD) from None


def verify_corpus(folder: Path, manifest: CorpusManifest | None = None) -> CorpusManifest:
    """Check the hash of every kept and dropped part. Raises one DataError naming all that differ."""
    manifest = manifest or load_corpus(folder)
    damage: list[DataError] = []
    for part in (*manifest.parts, *manifest.dropped, *manifest.lineage):
        try:
            _check(folder / part.name, part.sha256)
        except DataError as error:
            damage.append(error)
    raise_all(damage)
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


def read_part(path: Path, sha256: str) -> Iterator[dict]:
    """The rows of a part whose hash is checked first. Raises DataError when it is damaged."""
    _check(path, sha256)
    yield from read_jsonl(path)


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
    """Every dropped document in order: id, url, source, file, stage, rule, value, text (an excerpt)."""
    for part in load_corpus(corpus).dropped:
        yield from read_jsonl(corpus / part.name)


def cut_files(corpus: Path) -> tuple[str, ...]:
    """A warning for every input that breaks off or could not be read: its funnel counts one record."""
    manifest = load_corpus(corpus)
    cut, bad = "read.truncated_file", "read.bad_input"
    if not any(rule in stage.dropped for stage in manifest.funnel for rule in (cut, bad)):
        return ()
    paths = [corpus / part.name for part in manifest.lineage]
    if paths:
        from ingot.data.lineage.find import asking

        with asking(paths) as lineage:  # two columns, where the dropped records are files full of text
            query = "SELECT file, rule, value FROM lineage WHERE rule IN (?, ?) ORDER BY filename, file_row_number"
            found = lineage.execute(query, [cut, bad]).fetchall()
    else:
        rows = (row for row in read_dropped(corpus) if row["rule"] in (cut, bad))
        found = [(row["file"], row["rule"], row["value"]) for row in rows]
    return tuple(
        f"{file} is cut at {value.partition(':')[0]}; its whole records were kept"
        if rule == cut
        else f"left out: {value}"
        for file, rule, value in found
    )
