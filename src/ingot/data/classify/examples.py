"""Texts to learn from: labelled files, or files of good and of bad texts."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from ingot.data.build.corpus import MANIFEST, read_documents
from ingot.data.classify.features import LABEL
from ingot.data.classify.train import Labelled
from ingot.errors import DataError, DataMissing

TEXT_FIELD, LABEL_FIELD = "text", "label"


def read_texts(path: Path, field: str = TEXT_FIELD) -> Iterator[str]:
    """The texts of a corpus folder, of JSONL (`field` of each line), or of other text, where a line is a text.

    Files may be gzip. Blank texts are left out. Raises DataMissing, and DataError naming file and line.
    """
    if path.is_dir():
        if not (path / MANIFEST).exists() and (path / "corpus" / MANIFEST).exists():
            path = path / "corpus"
        for _, document in read_documents(path):
            yield document["text"]
        return
    for number, line in _lines(path):
        text = _field(path, number, line, field) if _is_jsonl(path) else line
        if not text.isspace() and text:
            yield text


def read_labelled(path: Path, text_field: str = TEXT_FIELD, label_field: str = LABEL_FIELD) -> Iterator[Labelled]:
    """The examples of fastText's lines ("__label__good text ..."), or of JSONL with a text and a label (or a list).

    Lines without a label are an error: a forgotten one would silently teach nothing.
    """
    for number, line in _lines(path):
        if _is_jsonl(path):
            text = _field(path, number, line, text_field)
            given = json.loads(line).get(label_field)
            labels = tuple(str(one) for one in (given if isinstance(given, list) else [given] if given else []))
        else:
            prefix, words, labels = LABEL.decode(), line.split(), []
            while words and words[0].startswith(prefix):
                labels.append(words.pop(0).removeprefix(prefix))
            text, labels = " ".join(words), tuple(labels)
        if not all(labels) or not labels or any(set(label) & set(" \t\r\n\v\f\0") for label in labels):
            raise DataError(
                f"{path}, line {number}: no label, or one with white space",
                rule=f"'__label__NAME text' per line, or JSONL with {text_field!r} and {label_field!r}",
                fix="mend the line; for files that are good or bad as a whole use --positive and --negative",
            )
        yield Labelled(text, labels)


def _is_jsonl(path: Path) -> bool:
    return ".jsonl" in path.suffixes or ".json" in path.suffixes


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode().rstrip("\n")
    except FileNotFoundError:
        raise DataMissing(f"no file at {path}", rule="examples are files or corpus folders") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read after line {number} ({error})", rule="text is UTF-8") from None


def _field(path: Path, number: int, line: str, field: str) -> str:
    try:
        value = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}, line {number}: no {field!r} ({error})", rule="JSONL: one object per line, with that field"
        ) from None
    if not isinstance(value, str):
        raise DataError(f"{path}, line {number}: {field!r} is {type(value).__name__}", rule="a text is a string")
    return value
