"""Taking documents out of a finished folder: found by lineage, cut out of every file, proven gone, and on record.

Only files that hold such a document are written anew, and in them the others stay byte for byte in their order. Both
manifests follow, so the folder has new fingerprints: a run that goes on with it has to accept that (--accept-change
data.tokens). All files change as one (journal.py). DIR/purges.jsonl says what was done, without text or URL;
DIR/purges/ keeps how the tokens were laid out, so that older steps of runs can be traced (layouts.py); DIR/purged.txt
keeps the same documents out of later builds (listed.py).
"""

import errno
import getpass
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.build.corpus import json_line
from ingot.data.lineage.purge.journal import FOLDER, Staging, finish, is_unfinished
from ingot.data.lineage.purge.history import LIST, PurgedList, blank_older, save_layout, secret
from ingot.data.lineage.purge.proof import PURGES, Progress, Proof, probes_of, prove
from ingot.data.lineage.purge.request import Request, Target, Targets, find_targets, list_entries
from ingot.data.lineage.purge.rewrite import indexes_in, parts_with, rewrite_corpus, rewrite_indexes, rewrite_tokens
from ingot.data.lineage.records import SPLITS, Place, places
from ingot.data.sources.url import canonical_url
from ingot.errors import DataError, DataMissing, ResourceError
from ingot.schema.tokens import MANIFEST, token_manifest_from_dict
from ingot.storage import exclusive, require_free, sha256_file

# Ids of documents -> what runs saw of them, as JSON; from the floor above (report/exposure.py).
Saw = Callable[[frozenset[str]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """targets: what was (or, in a dry run, would be) removed. runs: those that saw it, as `Saw` gave them.

    record: the line of purges.jsonl, None if nothing was changed. proof: of the scan. finished: the record of an
    earlier purge that had been interrupted and was finished first. earlier: of the last one of the same, where nothing
    was left to remove and only the scan was done again.
    """

    targets: Targets
    places: tuple[Place, ...] = ()
    runs: tuple[dict[str, Any], ...] = ()
    record: dict[str, Any] | None = None
    proof: Proof | None = None
    finished: dict[str, Any] | None = None
    earlier: dict[str, Any] | None = None


def purge(
    data: Path,
    request: Request,
    *,
    reason: str = "",
    saw: Saw | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Remove what `request` means from the folder of `data build --out`, and prove it.

    Killed at any point, the folder is as it was, or the same call finishes it. Raises UsageError for a bad request,
    RunBusyError while a build or a purge is at work, DataError when a build was left unfinished (its work files hold
    texts), when something is damaged, or when the scan finds anything left.
    """
    report = progress or (lambda fraction, text: None)
    if not (data / "corpus" / CORPUS_MANIFEST).exists():
        raise DataMissing(
            f"{data} holds no corpus", rule="a purge takes the folder that `ingot data build --out` wrote"
        )
    with _held(data):
        finished = _finish_interrupted(data, dry_run, request, report)
        targets = find_targets(data, request, lambda fraction, text: report(0.3 * fraction, f"searching {text}"))
        found = places(data, targets.ids)
        runs = tuple(saw(targets.ids) if saw and found else ())
        outcome = Outcome(targets, tuple(found), runs, finished=finished)
        if dry_run:
            return outcome
        if not targets.records:
            return outcome if finished else _proven_again(data, request, outcome, report)
        probes = probes_of(data, found)
        record = _rewrite(data, request, targets, found, probes, reason, runs)
        proof = prove(data, targets.ids, probes, request, lambda f, t: report(0.4 + 0.6 * f, t))
    return Outcome(targets, tuple(found), runs, record, proof, finished)


def read_purges(data: Path) -> list[dict[str, Any]]:
    """The lines of DIR/purges.jsonl, oldest first."""
    path = data / PURGES
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@contextmanager
def _held(data: Path) -> Iterator[None]:
    """Hold the folder. A hidden folder in it is the work of a build: busy, or left behind by one that was stopped."""
    with ExitStack() as stack:
        stack.enter_context(exclusive(data, f"at work in {data}"))
        for parent in (data, data / "tokens"):
            for folder in sorted(parent.glob(".*")):
                if not folder.is_dir() or folder == data / FOLDER:
                    continue
                stack.enter_context(exclusive(folder, f"building {data}"))
                raise DataError(
                    f"{folder} is left of a build that was stopped",
                    rule="it holds texts of the crawl, which a purge would not reach",
                    fix=f"finish the build with the command that began it, or remove it: rm -r {folder}",
                )
        yield


def _finish_interrupted(data: Path, dry_run: bool, request: Request, report: Progress) -> dict[str, Any] | None:
    if not is_unfinished(data):
        if not dry_run:
            Staging(data).drop()  # what one left that was killed before it was decided
        return None
    if dry_run:
        raise DataError(
            f"a purge of {data} was interrupted: some of its files are old, some new",
            rule="nothing is looked up in a folder that does not fit itself",
            fix="leave out --dry-run: any purge of this folder finishes that one first",
        )
    facts = finish(data)
    assert facts is not None
    record = facts["record"]
    ids = _ids_of(record)
    same = request.sha256 == record["request_sha256"]
    # What was asked for then is known by its hash only: with another request, ids and stretches are looked for.
    wanted = request if same else Request(doc=min(ids))
    prove(data, ids, np.array(facts["probes"], np.uint64), wanted, report)
    return record


def _proven_again(data: Path, request: Request, outcome: Outcome, report: Progress) -> Outcome:
    """For a purge whose scan was stopped, or had found something; the stretches of its documents are forgotten."""
    records = [record for record in read_purges(data) if record["request_sha256"] == request.sha256]
    if not records:
        return outcome
    ids = frozenset().union(*map(_ids_of, records))
    return replace(outcome, proof=prove(data, ids, np.empty(0, np.uint64), request, report), earlier=records[-1])


def _ids_of(record: dict[str, Any]) -> frozenset[str]:
    return frozenset(document["id"] for document in record["documents"])


def _rewrite(
    data: Path,
    request: Request,
    targets: Targets,
    found: list[Place],
    probes: np.ndarray,
    reason: str,
    runs: tuple[dict[str, Any], ...],
) -> dict[str, Any]:
    """Stage and commit everything; returns the record."""
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
            "documents": [_on_record(target) for target in targets.records],
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
        if not is_unfinished(data):  # else it is decided, and the next call finishes it
            staging.drop()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk of {data} is full",
                rule="a purge writes the files that it changes anew, beside the old ones",
                fix="free some space and give the same command again",
            ) from None
        raise
    return record


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        return ""


def _on_record(target: Target) -> dict[str, str]:
    """What stays known of a document: nothing that tells its text or its URL."""
    url = canonical_url(target.url)
    return {"id": target.id, "url": secret(url) if url else "", "before": target.before, "after": target.after}


def _require_room(data: Path, targets: Targets, found: list[Place]) -> None:
    """Old and new versions of the touched files stand side by side for a while."""
    paths = {data / "corpus" / target.lineage for target in targets.records}
    paths |= {data / "corpus" / target.file for target in targets.records}
    paths |= {data / "tokens" / place.split / f"{place.shard}.tokens" for place in found}
    for index in indexes_in(data):
        paths |= {path for part in parts_with(index, targets.ids) for path in part.iterdir()}
    touched = sum(path.stat().st_size for path in paths if path.exists())
    require_free(data, touched + (64 << 20), "writing the touched files anew")
