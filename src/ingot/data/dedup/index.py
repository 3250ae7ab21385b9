"""The index of kept documents, in which later builds search for near-duplicates.

An index is a folder:
    index.json        version, rules, and each part's number of documents and file hashes (SHA-256); written last
    part-00000/       one part per addition
        signatures.npy, keys.npy    as bands.py describes
        sets.npy      uint64: the shingle sets of the part's documents, one after another
        starts.npy    uint64 [documents + 1]: the start of each set
        ids.txt       the ids of the documents, one per line
A search puts the parts of the index before its own folders and calls them fixed: their documents are compared, but
never dropped. The index holds sets, not texts: verification needs only sets, and only hashes of a purged text remain.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ingot.data.dedup.arrays import ArrayFile, ArrayWriter
from ingot.data.dedup.bands import write_bands
from ingot.data.dedup.minhash import DedupRules, signature
from ingot.errors import DataError, DataMissing
from ingot.storage import sha256_file, write_atomic, write_json

INDEX = "index.json"
_VERSION = 1
_FILES = ("signatures.npy", "keys.npy", "sets.npy", "starts.npy", "ids.txt")
_COMPARED = ("ngram", "bands", "rows")  # rules that change the files; searches with any `jaccard` can share an index


def add_to_index(index: Path, rules: DedupRules, documents: Iterable[tuple[str, np.ndarray]]) -> int:
    """Add `documents`, pairs (id, shingle set), as one part of the folder `index`, created if missing; return their
    number.

    A part has the documents of one processed input file; all its signatures are in memory. The part is used only once
    index.json names it. Raises DataError if the index was made with other rules, or if an id has a line break.
    """
    facts = (
        _facts(index, rules) if (index / INDEX).exists() else {"version": _VERSION, "rules": _rules(rules), "parts": []}
    )
    folder = index / f"part-{len(facts['parts']):05d}"
    folder.mkdir(parents=True, exist_ok=True)
    ids, signatures, starts = [], [], [0]
    with ArrayWriter(folder / "sets.npy", "<u8") as sets:
        for name, shingles in documents:
            if "\n" in name:
                raise DataError(
                    "E-INDEX-ID",
                    f"a document's id contains a line break: {name!r}",
                    rule="an index has one id per line",
                    fix="remove line breaks from the ids of the input",
                    id=name,
                )
            ids.append(name)
            signatures.append(signature(shingles, rules.permutations))
            sets.append(shingles)
            starts.append(sets.rows)
    write_bands(np.array(signatures, np.uint32).reshape(-1, rules.permutations), rules, folder)
    np.save(folder / "starts.npy", np.array(starts, "<u8"))
    write_atomic(folder / "ids.txt", "".join(f"{name}\n" for name in ids).encode("utf-8", "surrogatepass"))
    hashes = {name: sha256_file(folder / name) for name in _FILES}
    facts["parts"].append({"name": folder.name, "documents": len(ids), "sha256": hashes})
    write_json(index / INDEX, facts)
    return len(ids)


class Index:
    """An index for reading. Documents are numbered consecutively over its parts."""

    def __init__(self, index: Path, rules: DedupRules, *, verify: bool = False):
        """Open the folder `index`. verify: read every file and compare its hash.

        Raises DataMissing if there is no index, DataError if it is damaged or has other rules or another version.
        """
        if not (index / INDEX).exists():
            raise DataMissing(
                "E-INDEX-MISSING",
                f"there is no index of kept documents at {index}",
                rule=f"the folder of an index contains a file {INDEX}",
                fix="correct the path given with --against",
                index=str(index),
            )
        parts = _facts(index, rules)["parts"]
        self.folders = [index / part["name"] for part in parts]
        self._starts = np.concatenate(([0], np.cumsum([part["documents"] for part in parts], dtype=np.int64)))
        for folder, part in zip(self.folders, parts, strict=True):
            for name, sha256 in part["sha256"].items():
                if not (folder / name).exists() or (verify and sha256_file(folder / name) != sha256):
                    raise DataError(
                        "E-INDEX-DAMAGED",
                        f"{folder / name} is missing, or differs from its hash in {INDEX}",
                        rule="every file of an index is present and unchanged",
                        fix="restore the file, or rebuild the index from its corpus",
                        path=str(folder / name),
                    )
        self._sets = [ArrayFile(folder / "sets.npy") for folder in self.folders]
        self._set_starts = [np.load(folder / "starts.npy", mmap_mode="r") for folder in self.folders]

    @property
    def documents(self) -> int:
        return int(self._starts[-1])

    def set_of(self, number: int) -> np.ndarray:
        """Return the shingle set of document `number`."""
        part, row = self._place(number)
        start, stop = self._set_starts[part][row : row + 2].tolist()
        return self._sets[part].read(start, stop)

    def id_of(self, number: int) -> str:
        """Return the id of document `number`. This reads the list of ids, so use it for messages only."""
        part, row = self._place(number)
        with (self.folders[part] / "ids.txt").open(encoding="utf-8", errors="surrogatepass", newline="\n") as file:
            return next(line for count, line in enumerate(file) if count == row).removesuffix("\n")

    def _place(self, number: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return part, number - int(self._starts[part])


def _rules(rules: DedupRules) -> dict[str, object]:
    return {name: value for name, value in asdict(rules).items() if name in _COMPARED}


def _facts(index: Path, rules: DedupRules) -> dict:
    facts = json.loads((index / INDEX).read_text(encoding="utf-8"))
    if facts.get("version") != _VERSION:
        raise DataError(
            "E-INDEX-VERSION",
            f"{index} has version {facts.get('version')}",
            rule=f"this ingot reads version {_VERSION}",
            fix="rebuild the index from its corpus",
            index=str(index),
            version=facts.get("version"),
        )
    if facts["rules"] != _rules(rules):
        differ = [f"{name} = {facts['rules'].get(name)}, not {value}" for name, value in _rules(rules).items()]
        differ = [
            text
            for text, name in zip(differ, _COMPARED, strict=True)
            if facts["rules"].get(name) != getattr(rules, name)
        ]
        raise DataError(
            "E-DEDUP-RULES-DIFFER",
            f"the index at {index} was made with {', '.join(differ)}",
            rule="a build and its index must use the same ngram, bands and rows",
            fix="use the settings of the index, or rebuild the index from its corpus",
            folder=str(index),
            settings=differ,
        )
    return facts
