"""Indexes of kept documents (`ingot data index`, by default DIR/index): a purge takes documents out of them as well.

A part without them is what `ingot data index` would have written. One that is left empty stays, because the number of
parts names the next.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ingot.data.dedup.index import INDEX, Index, add_to_index
from ingot.data.dedup.minhash import DedupRules
from ingot.data.lineage.purge.journal import Staging
from ingot.data.lineage.purge.rewrite import as_json, read_manifest, require_hash
from ingot.storage import sha256_file

_IDS = "ids.txt"


def indexes_in(data: Path) -> list[Path]:
    """The folders of indexes that lie in `data`. One that was made elsewhere (--out) nobody knows of."""
    return sorted(path.parent for path in data.glob(f"*/{INDEX}"))


def parts_with(index: Path, ids: frozenset[str]) -> list[Path]:
    """The parts of an index in which one of these documents stands."""
    return [path.parent for path in sorted(index.glob(f"*/{_IDS}")) if not ids.isdisjoint(_read_ids(path))]


def rewrite_indexes(data: Path, ids: frozenset[str], staging: Staging) -> None:
    """Stage every index in `data` without these documents. Raises DataError where an index is damaged."""
    for index in indexes_in(data):
        if parts := parts_with(index, ids):
            _rewrite(index, parts, ids, staging)


def _rewrite(index: Path, parts: list[Path], ids: frozenset[str], staging: Staging) -> None:
    facts = read_manifest(index / INDEX)
    rules = DedupRules(**facts["rules"])
    opened, first = Index(index, rules), 0
    for entry in facts["parts"]:
        part, count = index / entry["name"], entry["documents"]
        if part in parts:
            for name, sha256 in entry["sha256"].items():
                require_hash(part / name, sha256)
            scratch = staging.scratch()
            entry["documents"] = add_to_index(scratch, rules, _staying(opened, part, first, ids))
            (made,) = scratch.glob("part-*")
            for name in entry["sha256"]:
                (made / name).rename(path := staging.path(f"{index.name}/{part.name}/{name}"))
                entry["sha256"][name] = sha256_file(path)
            shutil.rmtree(scratch)
        first += count
    staging.write(f"{index.name}/{INDEX}", as_json(facts))


def _staying(opened: Index, part: Path, first: int, ids: frozenset[str]) -> Iterator[tuple[str, np.ndarray]]:
    """(id, shingle set) of the documents of a part, whose first has the number `first`."""
    for number, name in enumerate(_read_ids(part / _IDS), first):
        if name not in ids:
            yield name, opened.set_of(number)


def _read_ids(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="surrogatepass").split("\n")[:-1]
