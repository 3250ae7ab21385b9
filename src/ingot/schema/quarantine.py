"""The quarantine list: documents that later builds and runs leave out, and `ingot data purge --quarantine` removes.

A text file with one JSON object per line, the fields of QuarantineEntry. Lines may be removed by hand. No torch.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ingot.errors import DataError, DataMissing
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard, read_token_manifest
from ingot.storage import exclusive, write_atomic

_ID = re.compile("[0-9a-f]{32}")
_REASON = re.compile("[a-z][a-z_]{0,39}")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True, kw_only=True)
class QuarantineEntry:
    """A document of the list. It is left out by its id, its URL and its text, where these are known.

    document: its id, 32 hex digits. url: "" if it has none. text: XXH3-128 of its text as it was extracted, 32 hex
    digits; "" if unknown. reason: a name in small letters and "_", by which builds count what they leave out.
    evidence: what was measured, for people. run, step: the run and its step in which it was found; "" and 0 for an
    entry by hand. date: the day of the entry, YYYY-MM-DD.
    """

    document: str
    url: str = ""
    text: str = ""
    reason: str
    evidence: str = ""
    run: str = ""
    step: int = 0
    date: str

    def problem(self) -> str:
        """Return what is wrong with the entry; "" if nothing is."""
        for name in ("document", "url", "text", "reason", "evidence", "run", "date"):
            if not isinstance(getattr(self, name), str):
                return f"{name} is not a text"
        if not _ID.fullmatch(self.document):
            return f"document {self.document[:40]!r} is not 32 hex digits"
        if self.text and not _ID.fullmatch(self.text):
            return f"text {self.text[:40]!r} is not 32 hex digits"
        if not _REASON.fullmatch(self.reason):
            return f"reason {self.reason[:40]!r} is not a name of small letters and '_'"
        if not _DATE.fullmatch(self.date):
            return f"date {self.date[:40]!r} is not YYYY-MM-DD"
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            return f"step {self.step!r} is not a number of a step"
        return ""


_FIELDS = frozenset(field.name for field in fields(QuarantineEntry))
_REQUIRED = frozenset(("document", "reason", "date"))


def read_quarantine(path: Path) -> tuple[QuarantineEntry, ...]:
    """Return the entries of a list, in its order. Raises DataMissing without the file, DataError for a line that is no
    entry."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataMissing(
            "E-QUARANTINE-MISSING",
            f"the quarantine list {path} cannot be read ({error.strerror})",
            rule="a list that is named is a file: without it, its documents would be used",
            fix="correct the path, or write the list: ingot explain spike RUN --quarantine LIST.jsonl",
            path=str(path),
        ) from None
    return tuple(_entry(path, number, line) for number, line in enumerate(lines, 1) if line.strip())


def documents_of(path: Path) -> frozenset[str]:
    """Return the ids of the documents of a list. Raises DataMissing if it has none, or the errors of
    `read_quarantine`."""
    if documents := frozenset(entry.document for entry in read_quarantine(path)):
        return documents
    raise DataMissing(
        "E-QUARANTINE-EMPTY",
        f"the quarantine list {path} names no document",
        rule="a list that is searched for has at least one line",
        fix="name another list, or fill this one: ingot explain spike RUN --quarantine LIST.jsonl",
        path=str(path),
    )


@dataclass(frozen=True)
class ListedDocument:
    """The tokens begin..end-1 of a shard, which are a document of a quarantine list. path: of the list."""

    shard: Shard
    begin: int
    end: int
    document: str
    path: Path


def listed_in(tokens: Path, lists: Sequence[Path]) -> list[ListedDocument]:
    """Return the documents of a token folder that are on `lists`, in the order of the tokens; one that is on several
    lists is of the first.

    Reads the document index of every shard, 28 bytes for each document. Raises the errors of `read_quarantine` and of
    `read_token_manifest`, and OSError.
    """
    import numpy as np

    by_id: dict[bytes, Path] = {}
    for path in lists:
        for entry in read_quarantine(path):
            by_id.setdefault(bytes.fromhex(entry.document), path)
    wanted, found = np.array(list(by_id), "S16"), list[ListedDocument]()
    for shard in read_token_manifest(tokens).shards if by_id else ():
        index = np.fromfile(tokens / f"{shard.name}.documents", DOCUMENT_DTYPE)
        for row in index[np.isin(index["id"].view("S16"), wanted)]:
            begin, document = int(row["start"]), bytes(row["id"])
            found.append(ListedDocument(shard, begin, begin + int(row["tokens"]), document.hex(), by_id[document]))
    return found


def _entry(path: Path, number: int, line: bytes) -> QuarantineEntry:
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        if unknown := values.keys() - _FIELDS:
            raise ValueError(f"the field {min(unknown)!r} is unknown")
        if absent := _REQUIRED - values.keys():
            raise ValueError(f"the field {min(absent)!r} is missing")
        entry = QuarantineEntry(**values)
        if problem := entry.problem():
            raise ValueError(problem)
    except (ValueError, RecursionError) as error:
        raise DataError(
            "E-QUARANTINE-LINE",
            f"{path}, line {number}: {error}",
            rule="each line is a JSON object with document, reason, date, and perhaps url, text, evidence, run, step",
            fix="correct or remove the line",
            path=str(path),
            line=number,
        ) from None
    return entry


def add_to_quarantine(path: Path, entries: Iterable[QuarantineEntry]) -> list[QuarantineEntry]:
    """Add those of `entries` to a list whose documents it lacks, and return them. The file is replaced as a whole, so
    an interrupted call leaves it as it was.

    Raises DataError if the list is damaged, RunBusyError while another process works in its folder.
    """
    with exclusive(path.absolute().parent, f"working in {path.absolute().parent}"):
        old = read_quarantine(path) if path.exists() else ()
        known, added = {entry.document for entry in old}, []
        for entry in entries:
            if entry.document not in known:
                known.add(entry.document)
                added.append(entry)
        if added:
            lines = (json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in (*old, *added))
            write_atomic(path, "".join(lines).encode("utf-8", "backslashreplace"))
    return added
