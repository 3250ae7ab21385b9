"""Write damaged segments of a ledger again: their samples follow from the order, and the checkpoint has their hash.

Every checkpoint lists all segments before it, so one damaged file makes all later checkpoints unusable, although their
weights are sound. A segment is written only if its computed samples have exactly the hash that the checkpoint holds:
the repaired file has the bits of the lost one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ingot.errors import EXIT_OK, CheckpointError, DataError, IngotError
from ingot.report.lineage.exposure import RunTokens
from ingot.report.lineage.order_sections import OrderByStep
from ingot.schema.checkpoint import CheckpointManifest, LedgerSegment
from ingot.schema.run_folder import RunFolder
from ingot.storage import sha256_bytes, sha256_file, write_atomic
from ingot.trainer.checkpoint.folders import find_checkpoint
from ingot.trainer.checkpoint.manifest import files_elsewhere, list_checkpoints, read_manifest, verify_files
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.launch.stored import held, open_run


@dataclass(frozen=True, kw_only=True)
class Repair:
    """The result of a repair. written: the files that were written again, fetched: those of them that came from the
    store, because their samples could not be computed. sound: the steps of the checkpoints whose
    segments all have their hash now. left: code and found of the error for each other checkpoint, by step. elsewhere:
    the tensor files that were not compared because they are on no disk of this node, by step."""

    run: str
    written: tuple[str, ...]
    fetched: tuple[str, ...]
    sound: tuple[int, ...]
    left: dict[int, dict[str, str]]
    elsewhere: dict[int, tuple[str, ...]]

    def as_dict(self) -> dict:
        return asdict(self) | {"exit_code": EXIT_OK}


def repair_ledger(path: Path, say: Callable[[str], None] = lambda text: None) -> Repair:
    """Write the damaged and missing segments of the checkpoints of the run folder `path` again, the newest first.

    A segment whose samples cannot be computed, as without the tokens of the run, comes from the store, if that has it.
    A run that had to continue from an older checkpoint may have checkpoints with different segments of one name. Then
    only those of checkpoints with sound tensors count, and a file that has the hash of one of them stays. If files are
    on disks of nodes, those of this node decide: a checkpoint counts unless a file that is here is damaged.
    say: called with the line that says why the command waits. Raises DataError if no checkpoint has all its segments
    afterwards, RunBusyError if the run is training, on this machine or another one, CheckpointError if no manifest can
    be read.
    """
    folder, named = find_checkpoint(path)
    tier = open_run(folder.root)[1]
    with held(folder, tier, say) as lease:
        lease.take()
        manifests = [(c.path, c.manifest) for c in list_checkpoints(folder.checkpoints) if c.manifest]
        manifests, elsewhere = _with_sound_tensors(manifests or [(named, read_manifest(named))])
        needed = {(one.file, one.sha256) for _, manifest in manifests for one in manifest.ledger}
        written, fetched, sound, left = [], [], [], {}
        for _, manifest in manifests:
            try:
                for file, from_store in _repair(folder, manifest, needed, tier):
                    written.append(file)
                    fetched += [file] if from_store else []
                sound.append(manifest.step)
            except DataError as error:
                left[manifest.step] = error
        if not sound:
            raise next(iter(left.values()))
    why = {step: {"code": error.code, "found": error.found} for step, error in left.items()}
    return Repair(
        run=str(path),
        written=tuple(written),
        fetched=tuple(fetched),
        sound=tuple(sound),
        left=why,
        elsewhere=elsewhere,
    )


_Manifests = list[tuple[Path, CheckpointManifest]]


def _with_sound_tensors(manifests: _Manifests) -> tuple[_Manifests, dict[int, tuple[str, ...]]]:
    """Return `manifests`; if they disagree on a segment, only those whose tensors on this node have their hashes, and
    step -> the files of each that were not compared because they are not on this node."""
    by_file: dict[str, set[str]] = {}
    for _, manifest in manifests:
        for one in manifest.ledger:
            by_file.setdefault(one.file, set()).add(one.sha256)
    if all(len(hashes) == 1 for hashes in by_file.values()):
        return manifests, {}
    absent = {manifest.step: tuple(files_elsewhere(path, manifest)) for path, manifest in manifests}
    sound = [one for one in manifests if _has_sound_tensors(*one, absent[one[1].step])]
    return sound or manifests, {step: files for step, files in absent.items() if files}


def _has_sound_tensors(checkpoint: Path, manifest: CheckpointManifest, absent: Iterable[str]) -> bool:
    try:
        verify_files(checkpoint, manifest, sorted(manifest.files.keys() - set(absent)))
    except CheckpointError:
        return False
    return True


def _repair(
    folder: RunFolder, manifest: CheckpointManifest, needed: set[tuple[str, str]], tier: RemoteTier | None
) -> Iterator[tuple[str, bool]]:
    """Write the segments of one checkpoint that lack their hash. Yields their names, and whether they were fetched.

    needed: (file, hash) of all segments that checkpoints need. tier: the store of the run. Raises DataError for the
    first segment that can be neither computed nor fetched, or whose file another checkpoint needs as it is.
    """
    orders: OrderByStep | None = None
    for segment in manifest.ledger:
        path = folder.ledger / segment.file
        found = sha256_file(path) if path.is_file() else ""
        if found == segment.sha256:
            continue
        if (segment.file, found) in needed:
            raise DataError(
                "E-LEDGER-OTHERS",
                f"{path} has the samples of another checkpoint, not those of step {manifest.step}",
                rule="a run that continued from an older checkpoint wrote these steps again; that file stays",
                fix=f"remove the checkpoint of step {manifest.step}: it is from before the run went back",
                path=str(path),
                step=manifest.step,
            )
        try:
            orders = orders or OrderByStep(RunTokens(folder.root, manifest), manifest.step)
            write_atomic(path, _computed(segment, orders, folder.ledger))
        except DataError:
            if tier is None or not _fetched(tier, manifest.step, segment):
                raise
            yield segment.file, True
        else:
            yield segment.file, False


def _fetched(tier: RemoteTier, step: int, segment: LedgerSegment) -> bool:
    """Fetch a segment from the store. Returns False if that has no sound one, or does not answer."""
    try:
        tier.fetch_segment(step, segment)
    except IngotError:
        return False
    return True


def _computed(segment: LedgerSegment, orders: OrderByStep, ledger: Path) -> bytes:
    """Return the content of a segment as the trainer wrote it. Raises DataError if it has another hash."""
    rows = []
    for step in range(segment.first_step, segment.last_step + 1):
        section, order = orders.at(step)
        ids = order.step(step, section.global_batch).astype("<i8")
        rows.append(~ids if step in segment.untrained else ids)
    data = np.concatenate(rows).tobytes()
    if sha256_bytes(data) != segment.sha256:
        raise DataError(
            "E-LEDGER-REPAIR",
            f"the samples of steps {segment.first_step} to {segment.last_step} by the order do not have the hash that "
            f"the checkpoint holds for {segment.file}",
            rule="a segment is written again only with the bits that were saved; nothing was written for it",
            fix="restore the settings and tokens that these steps were trained with, or the file from a copy",
            path=str(ledger / segment.file),
            step=segment.first_step,
            last_step=segment.last_step,
        )
    return data
