"""The purge: remove documents from a finished data folder, prove that nothing of them is left, and record the purge.

The documents are found by lineage. Only files that contain one of them are rewritten; the other documents in these
files keep their bytes and their order. The manifests of corpus and tokens change, so the folder has new fingerprints: a
run that continues on it has to accept the change (--accept-change data.tokens). All files change in one transaction
(journal.py). The folder keeps a record of the purge, the earlier token layouts, and a list for later builds
(history.py).
"""

import getpass
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.build.corpus import json_line
from ingot.data.lineage.purge.history import (
    LIST,
    PURGES,
    PurgedList,
    blank_older,
    read_purges,
    redacted_hash,
    save_layout,
)
from ingot.data.lineage.purge.journal import FOLDER, Staging, finish, is_unfinished
from ingot.data.lineage.purge.proof import Progress, PurgeProof, probes_of, prove
from ingot.data.lineage.purge.request import PurgeRequest, PurgeTarget, PurgeTargets, find_targets, list_entries
from ingot.data.lineage.purge.rewrite import indexes_in, parts_with, rewrite_corpus, rewrite_indexes, rewrite_tokens
from ingot.data.lineage.records import SPLITS, DocumentLocation, locate_documents
from ingot.data.sources.url import canonical_url
from ingot.errors import DataError, DataMissing
from ingot.schema.tokens import MANIFEST, token_manifest_from_dict
from ingot.storage import disk_full, exclusive, is_full, require_free, sha256_file

# Takes ids of documents, returns the exposure of each run to them as JSON values (see report/lineage/exposure.py).
FindRuns = Callable[[frozenset[str]], list[dict[str, Any]]]


@dataclass(frozen=True)
class PurgeResult:
    """The result of a purge.

    targets: the records that were (in a dry run: would be) removed. locations: where their tokens are. runs: the runs
    that trained on them, from `FindRuns`. record: the line of purges.jsonl, None if nothing changed. proof: the result
    of the scan. finished: the record of an interrupted earlier purge that was finished first. earlier: the record of
    the last purge with the same request, if nothing was left to remove and only the scan was repeated.
    """

    targets: PurgeTargets
    locations: tuple[DocumentLocation, ...] = ()
    runs: tuple[dict[str, Any], ...] = ()
    record: dict[str, Any] | None = None
    proof: PurgeProof | None = None
    finished: dict[str, Any] | None = None
    earlier: dict[str, Any] | None = None


def purge(
    data: Path,
    request: PurgeRequest,
    *,
    reason: str = "",
    find_runs: FindRuns | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PurgeResult:
    """Remove the records that match `request` from an output folder of `data build`, and prove that they are gone.

    After a kill at any point, the folder is unchanged, or the same call finishes the purge. Raises UsageError for an
    invalid request, RunBusyError while a build or a purge of this folder runs, DataError if a build is unfinished (its
    work files contain texts), if a file is damaged, or if the scan finds a purged document.
    """
    report = progress or (lambda fraction, text: None)
    if not (data / "corpus" / CORPUS_MANIFEST).exists():
        raise DataMissing(
            "E-CORPUS-MISSING",
            f"{data} has no corpus",
            rule="a purge needs a folder that `ingot data build --out` wrote",
            fix="name this folder: ingot data purge DIR",
            folder=str(data),
        )
    with _locked_folder(data):
        finished = _finish_interrupted(data, dry_run, request, report)
        targets = find_targets(data, request, lambda fraction, text: report(0.3 * fraction, f"searching {text}"))
        found = locate_documents(data, targets.ids)
        runs = tuple(find_runs(targets.ids) if find_runs and found else ())
        outcome = PurgeResult(targets, tuple(found), runs, finished=finished)
        if dry_run:
            return outcome
        if not targets.records:
            return outcome if finished else _repeat_scan(data, request, outcome, report)
        probes = probes_of(data, found)
        record = _rewrite(data, request, targets, found, probes, reason, runs)
        proof = prove(data, targets.ids, probes, request, lambda f, t: report(0.4 + 0.6 * f, t))
    return PurgeResult(targets, tuple(found), runs, record, proof, finished)


@contextmanager
def _locked_folder(data: Path) -> Iterator[None]:
    """Lock the folder. Raises RunBusyError if a build of it runs, DataError if a stopped build left a hidden work
    folder."""
    with ExitStack() as stack:
        stack.enter_context(exclusive(data, f"at work in {data}"))
        for parent in (data, data / "tokens"):
            for folder in sorted(parent.glob(".*")):
                if not folder.is_dir() or folder == data / FOLDER:
                    continue
                stack.enter_context(exclusive(folder, f"building {data}"))
                raise DataError(
                    "E-BUILD-UNFINISHED",
                    f"{folder} belongs to a build that was stopped",
                    rule="a purge cannot remove texts from the work folder of a build",
                    fix=f"finish the build with the command that started it, or remove the folder: rm -r {folder}",
                    folder=str(folder),
                )
        yield


def _finish_interrupted(data: Path, dry_run: bool, request: PurgeRequest, report: Progress) -> dict[str, Any] | None:
    if not is_unfinished(data):
        if not dry_run:
            Staging(data).discard()  # the files of a purge that was killed before it was committed
        return None
    if dry_run:
        raise DataError(
            "E-PURGE-UNFINISHED",
            f"a purge of {data} was interrupted: some of its files are old, some are new",
            rule="a dry run needs a folder whose files match its manifests",
            fix="leave out --dry-run: any purge of this folder finishes the interrupted purge first",
            path=str(data),
        )
    facts = finish(data)
    assert facts is not None
    record = facts["record"]
    ids = _ids_of(record)
    same = request.sha256 == record["request_sha256"]
    # Only the hash of the earlier request is known: if it differs, the scan searches only for ids and probes.
    wanted = request if same else PurgeRequest(doc=min(ids))
    prove(data, ids, np.array(facts["probes"], np.uint64), wanted, report)
    return record


def _repeat_scan(data: Path, request: PurgeRequest, outcome: PurgeResult, report: Progress) -> PurgeResult:
    """Repeat the scan of an earlier purge with the same request. Probes are not stored, so there are none this time."""
    records = [record for record in read_purges(data) if record["request_sha256"] == request.sha256]
    if not records:
        return outcome
    ids = frozenset().union(*map(_ids_of, records))
    return replace(outcome, proof=prove(data, ids, np.empty(0, np.uint64), request, report), earlier=records[-1])


def _ids_of(record: dict[str, Any]) -> frozenset[str]:
    return frozenset(document["id"] for document in record["documents"])


def _rewrite(
    data: Path,
    request: PurgeRequest,
    targets: PurgeTargets,
    found: list[DocumentLocation],
    probes: np.ndarray,
    reason: str,
    runs: tuple[dict[str, Any], ...],
) -> dict[str, Any]:
    """Stage and commit all changes, and return the record."""
    _require_room(data, targets, found)
    staging = Staging(data)
    try:
        old_corpus = sha256_file(data / "corpus" / CORPUS_MANIFEST)
        new_corpus = rewrite_corpus(data, targets, staging)
        gone = {bytes.fromhex(target.id): target.text_bytes for target in targets.records if target.kept}
        fingerprints = {}
        for split in SPLITS:
            if (data / "tokens" / split / MANIFEST).exists():
                old, new = rewrite_tokens(data, split, gone, new_corpus, staging)
                before, after = (token_manifest_from_dict(one, split).fingerprint() for one in (old, new))
                fingerprints[split] = [before, after]
                text = (data / "tokens" / split / MANIFEST).read_text(encoding="utf-8")
                save_layout(data, split, (before, after), text, gone, staging)
        blank_older(data, gone, staging)
        rewrite_indexes(data, targets.ids, staging)
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "who": _user(),
            "reason": reason,
            "by": request.kind,
            "request_sha256": request.sha256,
            "documents": [_recorded_document(target) for target in targets.records],
            "kept": sum(target.kept for target in targets.records),
            "tokens": sum(place.tokens for place in found),
            "copies": [copy.id for copy in targets.copies],
            "corpus_sha256": [old_corpus, new_corpus],
            "fingerprints": fingerprints,
            "runs": list(runs),
        }
        earlier = (data / PURGES).read_bytes() if (data / PURGES).exists() else b""
        staging.write(PURGES, earlier + json_line(record))
        staging.write(LIST, PurgedList.load(data).with_entries(list_entries(request, targets)).text)
        staging.commit({"record": record, "probes": probes.tolist()})
    except BaseException as error:
        if not is_unfinished(data):  # an unfinished purge is committed, and the next call finishes it
            staging.discard()
        if isinstance(error, OSError) and is_full(error):
            needs = "a purge, which needs space for the new versions of changed files next to the old versions,"
            raise disk_full(data, error, needs) from None
        raise
    return record


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        return ""


def _recorded_document(target: PurgeTarget) -> dict[str, str]:
    """Return the record of a purged document, which reveals neither its text nor its URL."""
    url = canonical_url(target.url)
    return {"id": target.id, "url": redacted_hash(url) if url else "", "before": target.before, "after": target.after}


def _require_room(data: Path, targets: PurgeTargets, found: list[DocumentLocation]) -> None:
    """Check the free space: until the change is finished, the disk holds the old and the new versions of changed
    files."""
    paths = {data / "corpus" / target.lineage for target in targets.records}
    paths |= {data / "corpus" / target.file for target in targets.records}
    paths |= {data / "tokens" / place.split / f"{place.shard}.tokens" for place in found}
    for index in indexes_in(data):
        paths |= {path for part in parts_with(index, targets.ids) for path in part.iterdir()}
    touched = sum(path.stat().st_size for path in paths if path.exists())
    require_free(data, touched + (64 << 20), "rewriting files")
