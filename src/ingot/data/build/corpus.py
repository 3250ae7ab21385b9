"""Read and write a corpus folder: kept documents by source, dropped documents with their reasons, and `corpus.json`.

    corpus.json            CorpusManifest; written last, so a folder without corpus.json is not a corpus
    seconds.json           CPU seconds by stage; in a separate file, so that equal builds have an equal corpus.json
    SOURCE-NNNNN.jsonl.gz  kept documents (id, url, source, file, record_id, language, text; before, after: hashes of
                           the text as it was extracted and as it is kept)
    dropped-NNNNN.jsonl.gz dropped documents (id, url, source, file, stage, rule, value, the first 300 characters)
    lineage-NNNNN.parquet  every record of an input, kept or dropped, without its text (lineage/records.py)

The same documents give the same bytes on every machine that has the same zlib.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from ingot.config import from_dict, to_dict
from ingot.data.guard import RULE
from ingot.data.lineage.verify import raise_all
from ingot.errors import ConfigError, DataError, DataMissing
from ingot.schema.corpus import CorpusManifest
from ingot.storage import atomic_file, sha256_file, write_json

MANIFEST = "corpus.json"
SECONDS = "seconds.json"
EXCERPT_CHARACTERS = 300
_REBUILD = "remove the corpus folder and build it again: ingot data build FILES... --out DIR"


@contextmanager
def jsonl_writer(path: Path):
    """Yield `write(line: bytes)` for a gzip JSONL file, which appears at `path` when the block ends without an error.

    The gzip header has neither a file name nor a time, so equal lines give equal bytes.
    """
    with atomic_file(path) as file, gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        yield packed.write


def json_line(row: dict) -> bytes:
    """Return `row` as a line of UTF-8 JSON. Lone surrogates (in broken URLs) become \\uXXXX, which reads back equal."""
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def read_jsonl(path: Path) -> Iterator[dict]:
    """Yield the rows of a gzip JSONL file. Raises DataError with the line number if the file is damaged."""
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007
                yield json.loads(line)
    except FileNotFoundError:
        raise _missing(path) from None
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            "E-CORPUS-FILE-DAMAGED",
            f"{path}: damaged after line {number} ({error})",
            rule="every line of a corpus file is one JSON object",
            fix=_REBUILD,
            path=str(path),
            line=number,
        ) from None


def _missing(path: Path) -> DataError:
    return DataError(
        "E-CORPUS-FILE-MISSING",
        f"{path} is missing",
        rule=f"every file named in {MANIFEST} exists",
        fix=_REBUILD,
        path=str(path),
    )


def write_manifest(folder: Path, manifest: CorpusManifest) -> None:
    """Write corpus.json, and the CPU seconds of the stages into seconds.json."""
    values = to_dict(manifest)
    write_json(folder / SECONDS, {stage["name"]: stage.pop("seconds") for stage in values["funnel"]})
    write_json(folder / MANIFEST, values)


def load_corpus(folder: Path) -> CorpusManifest:
    """Return the manifest of a corpus folder; its funnel has CPU seconds if the folder has a seconds.json.

    Raises DataMissing if the folder is missing or empty, DataError if it has no readable manifest.
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
                "E-CORPUS-MISSING",
                f"there is no corpus at {folder}",
                rule=f"a finished corpus holds {MANIFEST}",
                fix="check the path; ingot data build FILES... --out DIR makes a corpus",
                path=str(folder),
            ) from None
        raise DataError(
            "E-CORPUS-UNFINISHED",
            f"{folder} holds no {MANIFEST}",
            rule=f"a finished corpus holds {MANIFEST}, which is written last",
            fix=_REBUILD,
            path=str(folder),
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            "E-CORPUS-MANIFEST",
            f"{path} cannot be read ({error})",
            rule="a corpus is not edited after the build",
            fix=_REBUILD,
            path=str(path),
        ) from None
    try:
        return from_dict(CorpusManifest, values, where=lambda key: f"{path} ({key})")
    except ConfigError as error:
        raise DataError(
            "E-CORPUS-MANIFEST",
            error.found,
            rule="a corpus is not edited after the build",
            fix=_REBUILD,
            **error.facts | {"path": str(path)},
        ) from None


def verify_corpus(folder: Path, manifest: CorpusManifest | None = None) -> CorpusManifest:
    """Check the hash of every file of a corpus. Raises one DataError that names all files that differ."""
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
        raise _missing(path)
    found = sha256_file(path)
    if found != sha256:
        raise DataError(
            "E-CORPUS-HASH",
            f"{path} has SHA-256 {found[:12]}.., but {MANIFEST} lists {sha256[:12]}..",
            rule="a corpus is not edited after the build",
            fix=_REBUILD,
            path=str(path),
            found=found,
            expected=sha256,
        )


def read_part(path: Path, sha256: str) -> Iterator[dict]:
    """Check the hash of a corpus file, then yield its rows. Raises DataError if the file is damaged."""
    _check(path, sha256)
    yield from read_jsonl(path)


def read_documents(corpus: Path, *, verify: bool = True) -> Iterator[tuple[str, dict]]:
    """Yield (source, document) for every kept document, in order. verify: check the hash of each file first.

    A document is a dict with id, url, source, file, record_id, language and text, all str.
    """
    for part in load_corpus(corpus).parts:
        if verify:
            _check(corpus / part.name, part.sha256)
        for row in read_jsonl(corpus / part.name):
            yield part.source, row


def read_dropped(corpus: Path) -> Iterator[dict]:
    """Yield every dropped document, in order: id, url, source, file, stage, rule, value, text (an excerpt)."""
    for part in load_corpus(corpus).dropped:
        yield from read_jsonl(corpus / part.name)


def cut_files(corpus: Path) -> tuple[str, ...]:
    """Return a warning for every input that is truncated or could not be read, which the funnel counts as one record,
    and for every stage in which a plug-in raised."""
    manifest = load_corpus(corpus)
    counts = {rule: count for stage in manifest.funnel for rule, count in stage.dropped.items()}
    cut, bad = "read.truncated_file", "read.bad_input"
    warnings = [
        f"{file} is cut at {value.partition(':')[0]}; its whole records were kept"
        if rule == cut
        else f"left out: {value}"
        for file, rule, value in (_dropped_by(corpus, manifest, (cut, bad)) if counts.keys() & {cut, bad} else ())
    ]
    for rule in (rule for rule in counts if rule.endswith(f".{RULE}")):
        documents = "a document" if counts[rule] == 1 else f"{counts[rule]:,} documents"
        for _, _, value in _dropped_by(corpus, manifest, (rule,), first=1):
            warnings.append(f"{rule}: a plug-in raised on {documents}, dropped; the first error: {value}")
    return tuple(warnings)


def _dropped_by(
    corpus: Path, manifest: CorpusManifest, rules: tuple[str, ...], first: int | None = None
) -> list[tuple[str, str, str]]:
    """Return (file, rule, value) of the first records that `rules` dropped, all of them by default."""
    paths = [corpus / part.name for part in manifest.lineage]
    if not paths:
        rows = (row for row in read_dropped(corpus) if row["rule"] in rules)
        return [(row["file"], row["rule"], row["value"]) for row in islice(rows, first)]
    from ingot.data.lineage.records import lineage_connection

    with lineage_connection(paths) as lineage:  # reads only these columns; the files of dropped records hold text
        query = (
            "SELECT file, rule, value FROM lineage WHERE rule IN (SELECT unnest(?)) ORDER BY filename, file_row_number"
        )
        limit = f" LIMIT {first}" if first else ""
        return lineage.execute(query + limit, [list(rules)]).fetchall()
