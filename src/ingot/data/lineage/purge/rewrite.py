"""Rewrite the files that contain purged records. The remaining records keep their bytes and their order.

Indexes of kept documents (`ingot data index`, by default DIR/index) are rewritten as well. A rewritten part equals the
part that `ingot data index` would write without the purged documents. An empty part remains, because the number of
parts determines the name of the next part.
"""

import bisect
import gzip
import hashlib
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.build.corpus import json_line, jsonl_writer
from ingot.data.dedup.index import INDEX, Index, add_to_index
from ingot.data.dedup.minhash import DedupRules
from ingot.data.lineage.purge.history import PURGED, REMOVED, STAGE
from ingot.data.lineage.purge.journal import Staging
from ingot.data.lineage.purge.request import PurgeTarget, PurgeTargets
from ingot.data.lineage.records import COPIES, RECORD_COLUMNS, SHARD_COLUMNS, read_lineage, write_rows
from ingot.data.lineage.verify import block_digests
from ingot.errors import DataError
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST
from ingot.storage import atomic_file, sha256_bytes, sha256_file

_DAMAGED = "list all damage with `ingot data verify DIR`, restore the damaged files, then purge"
_SAME_HASH = "a purge rewrites only files with the SHA-256 in their manifest"
_ID = re.compile("[0-9a-f]{32}")
_IDS = "ids.txt"  # the file of ids in a part of an index
_LISTS = ("parts", "dropped", "lineage")  # the keys of corpus.json with a name and a hash per file


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a manifest as plain JSON values, so that keys unknown to this version are kept.

    Raises DataError if the file cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
        assert isinstance(values, dict)
    except (OSError, ValueError, AssertionError) as error:
        raise DataError(
            "E-MANIFEST-UNREADABLE",
            f"{path} cannot be read ({error})",
            rule="a manifest is a JSON object",
            fix=_DAMAGED,
            path=str(path),
        ) from None
    return values


def as_json(values: dict) -> str:
    """Return the text of a manifest file with these values."""
    return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False) + "\n"  # the format of storage.write_json


def rewrite_corpus(data: Path, targets: PurgeTargets, staging: Staging) -> str:
    """Stage the parts, lineage files and manifest of a corpus without `targets`; return the new manifest's SHA-256."""
    manifest, ids = read_manifest(data / "corpus" / CORPUS_MANIFEST), targets.ids
    entries = {entry["name"]: entry for name in _LISTS for entry in manifest.get(name) or ()}
    by_part: dict[str, list[PurgeTarget]] = defaultdict(list)
    by_lineage: dict[str, list[PurgeTarget]] = defaultdict(list)
    for target in (*targets.records, *targets.copies):  # in copies, only the purged ids that they mention change
        by_part[target.file].append(target)
        by_lineage[target.lineage].append(target)
    for name, touched in sorted(by_part.items()):
        require_hash(data / "corpus" / name, entries.get(name, {}).get("sha256"))
        gone = {target.id for target in touched} & ids
        _rewrite_part(data / "corpus" / name, f"corpus/{name}", gone, ids, staging, entries[name])
    removed_rows = {name: sorted(t.row for t in some if t.kept and t.id in ids) for name, some in by_part.items()}
    for name in sorted(by_lineage):
        if name in entries:
            require_hash(data / "corpus" / name, entries[name]["sha256"])
        path = staging.path(f"corpus/{name}")
        rows = _renumbered(data / "corpus" / name, ids, removed_rows)
        records = write_rows(path, rows, RECORD_COLUMNS)
        if name in entries:
            entries[name] |= {"records": records, "sha256": sha256_file(path)}
    for name in _LISTS:
        if name in manifest:
            manifest[name] = [e for e in manifest[name] if name == "lineage" or e["documents"]]
    manifest["funnel"] = _funnel(manifest["funnel"], targets)
    text = as_json(manifest)
    staging.write(f"corpus/{CORPUS_MANIFEST}", text)
    return sha256_bytes(text.encode())


def require_hash(path: Path, sha256: str | None) -> None:
    """Raise DataError if a file differs from its hash in the manifest, so that a new hash does not hide damage."""
    if sha256 is None or not path.exists() or sha256_file(path) != sha256:
        raise _differs(path)


def _differs(path: Path) -> DataError:
    return DataError(
        "E-FILE-HASH",
        f"{path} does not have the hash in its manifest",
        rule=_SAME_HASH,
        fix=_DAMAGED,
        path=str(path),
    )


def _rewrite_part(
    path: Path, relative: str, gone: set[str], ids: frozenset[str], staging: Staging, entry: dict
) -> None:
    """Stage a corpus part without the documents `gone`, and update its manifest entry.

    ids: all purged ids; the values of the remaining rows may mention them, and are then rewritten.
    """
    found: set[str] = set()
    with gzip.open(path, "rb") as lines, jsonl_writer(staging.path(relative)) as keep:
        for line in lines:
            row = json.loads(line)
            if row["id"] in gone:
                found.add(row["id"])
                entry["documents"] -= 1
                entry["text_bytes"] -= len(row["text"].encode("utf-8", "surrogatepass"))
            elif names_one_of(row, ids):
                keep(json_line(row | {"value": without_ids(row["value"], ids)}))
            else:
                keep(line)
    if gone - found:
        raise DataError(
            "E-LINEAGE-MISMATCH",
            f"{path} lacks document {min(gone - found)}, which its lineage names",
            rule="every record that the lineage lists as kept is in the part that it names",
            fix=_DAMAGED,
            path=str(path),
            id=min(gone - found),
        )
    if entry["documents"]:
        entry["sha256"] = sha256_file(staging.staged(relative))
    else:
        staging.delete(relative)


def names_one_of(row: dict, ids: frozenset[str]) -> bool:
    """Check whether a row was dropped as a copy of one of `ids`."""
    return row.get("stage") in COPIES and not ids.isdisjoint(_ID.findall(row["value"]))


def without_ids(value: str, ids: frozenset[str]) -> str:
    return _ID.sub(lambda found: PURGED if found[0] in ids else found[0], value)


def _renumbered(path: Path, gone: frozenset[str], removed: dict[str, list[int]]) -> Iterator[dict]:
    """Yield the remaining rows of a lineage file, with new line numbers in the parts from which rows were removed."""
    for row in read_lineage(path):
        if row["id"] in gone:
            continue
        if row["part"] in removed and row["row"] >= 0:
            row["row"] -= bisect.bisect_left(removed[row["part"]], row["row"])
        if names_one_of(row, gone):
            row["value"] = without_ids(row["value"], gone)
        yield row


def _funnel(funnel: list[dict], targets: PurgeTargets) -> list[dict]:
    """Return the funnel in which all purged records are dropped by the stage `purged` instead of earlier stages."""
    stages: list[dict[str, Any]] = [{**stage, "dropped": dict(stage["dropped"])} for stage in funnel]
    by_name = {stage["name"]: stage for stage in stages}
    if STAGE not in by_name:
        stages.append({"name": STAGE, "ran": "ingot data purge", "dropped": {}, "documents_in": 0, "documents_out": 0})
        by_name[STAGE] = stages[-1]
    for (stage, rule), count in Counter((t.stage, t.rule) for t in targets.records if not t.kept).items():
        dropped = by_name[stage]["dropped"]
        dropped[rule] -= count
        if not dropped[rule]:
            del dropped[rule]
    dropped = by_name[STAGE]["dropped"]
    dropped[REMOVED] = dropped.get(REMOVED, 0) + len(targets.records)
    left = stages[0]["documents_in"]
    for stage in stages:
        stage["documents_in"], stage["documents_out"] = left, left - sum(stage["dropped"].values())
        left = stage["documents_out"]
    return stages


def rewrite_tokens(
    data: Path, split: str, gone: dict[bytes, int], corpus_sha256: str, staging: Staging
) -> tuple[dict, dict]:
    """Stage the shards of one split without the documents `gone`, and the manifest; return the values of the old and
    the new manifest. gone: the number of text bytes of each id."""
    folder, relative = data / "tokens" / split, f"tokens/{split}"
    old = read_manifest(folder / MANIFEST)
    shards = [_rewrite_shard(folder, relative, shard, gone, old, staging) for shard in old["shards"]]
    new = old | {"corpus_sha256": corpus_sha256, "shards": [shard for shard in shards if shard]}
    staging.write(f"{relative}/{MANIFEST}", as_json(new))
    return old, new


def _rewrite_shard(
    folder: Path, relative: str, shard: dict, gone: dict[bytes, int], manifest: dict, staging: Staging
) -> dict | None:
    """Stage a shard without the documents `gone`; return its new manifest entry, or None if it becomes empty."""
    name = shard["name"]
    require_hash(folder / f"{name}.documents", shard["documents_sha256"])
    index = np.fromfile(folder / f"{name}.documents", DOCUMENT_DTYPE)
    leaves = np.isin(index["id"].view("S16"), np.array(list(gone), "S16"))
    lineage = folder / f"{name}.lineage.parquet"
    if not leaves.any():
        return shard
    if leaves.all():
        for suffix in ("tokens", "blocks", "documents", "lineage.parquet"):
            staging.delete(f"{relative}/{name}.{suffix}")
        return None
    size = np.dtype(manifest["dtype"]).itemsize
    path = staging.path(f"{relative}/{name}.tokens")
    ranges = [(int(r["start"]) * size, int(r["start"] + r["tokens"]) * size) for r in index[leaves]]
    _copy_without(folder, shard, ranges, manifest["block_bytes"], path)
    stays = index[~leaves].copy()
    stays["start"] = np.cumsum(stays["tokens"], dtype=np.int64) - stays["tokens"]
    blocks = block_digests(path, manifest["block_bytes"])
    staging.write(f"{relative}/{name}.blocks", blocks)
    staging.write(f"{relative}/{name}.documents", stays.tobytes())
    new = shard | {
        "tokens": int(stays["tokens"].sum()),
        "documents": len(stays),
        "text_bytes": shard["text_bytes"] - sum(gone[bytes(row["id"])] for row in index[leaves]),
        "blocks_sha256": sha256_bytes(blocks),
        "documents_sha256": sha256_bytes(stays.tobytes()),
    }
    if lineage.exists():
        starts = {bytes(row["id"]).hex(): int(row["start"]) for row in stays}
        rows = (row | {"start": starts[row["id"]]} for row in read_lineage(lineage) if row["id"] in starts)
        out = staging.path(f"{relative}/{name}.lineage.parquet")
        write_rows(out, rows, SHARD_COLUMNS)
        new["lineage_sha256"] = sha256_file(out)
    return new


def _copy_without(folder: Path, shard: dict, ranges: list[tuple[int, int]], block_bytes: int, out: Path) -> None:
    """Copy NAME.tokens without the byte ranges `ranges` (ascending), and check the hash of every block."""
    path = folder / f"{shard['name']}.tokens"
    digests = (folder / f"{shard['name']}.blocks").read_bytes()
    if sha256_bytes(digests) != shard["blocks_sha256"]:
        raise _differs(folder / f"{shard['name']}.blocks")
    with ExitStack() as stack:
        source, target = stack.enter_context(path.open("rb")), stack.enter_context(atomic_file(out))
        at = number = first = 0
        while block := source.read(block_bytes):
            if hashlib.sha256(block).digest() != digests[32 * number : 32 * number + 32]:
                raise DataError(
                    "E-SHARD-HASH",
                    f"{path}, block {number}: the SHA-256 differs from that of the build",
                    rule=_SAME_HASH,
                    fix=_DAMAGED,
                    path=str(path),
                    block=number,
                )
            end, written = at + len(block), at
            while first < len(ranges) and ranges[first][0] < end:
                begin, stop = ranges[first]
                target.write(block[written - at : max(begin, at) - at])
                written = min(stop, end)
                if stop > end:
                    break
                first += 1
            target.write(block[written - at :])
            at, number = end, number + 1


# Indexes of kept documents


def indexes_in(data: Path) -> list[Path]:
    """Return the index folders directly in `data`. An index elsewhere (`ingot data index --out`) is not found."""
    return sorted(path.parent for path in data.glob(f"*/{INDEX}"))


def parts_with(index: Path, ids: frozenset[str]) -> list[Path]:
    """Return the folders of the index parts that contain one of the documents `ids`."""
    return [path.parent for path in sorted(index.glob(f"*/{_IDS}")) if not ids.isdisjoint(_read_ids(path))]


def rewrite_indexes(data: Path, ids: frozenset[str], staging: Staging) -> None:
    """Stage every index in `data` without the documents `ids`. Raises DataError for a damaged index."""
    for index in indexes_in(data):
        if parts := parts_with(index, ids):
            _rewrite_index(index, parts, ids, staging)


def _rewrite_index(index: Path, parts: list[Path], ids: frozenset[str], staging: Staging) -> None:
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
    """Yield (id, shingle set) of each remaining document of a part. first: the number of the part's first document."""
    for number, name in enumerate(_read_ids(part / _IDS), first):
        if name not in ids:
            yield name, opened.set_of(number)


def _read_ids(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="surrogatepass").split("\n")[:-1]
