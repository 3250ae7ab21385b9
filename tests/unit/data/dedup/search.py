"""The whole search for near-duplicates in one process, with the functions that the tasks of a build call."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ingot.data.dedup.bands import SignatureFolders, band_candidates, merge_candidates
from ingot.data.dedup.clusters import clusters, slices, verify_pairs
from ingot.data.dedup.index import Index
from ingot.data.dedup.minhash import DedupRules

SLICE = 1 << 20  # candidates per task


def find_duplicates(
    folders: Sequence[Path],
    set_of: Callable[[int], np.ndarray],
    rules: DedupRules,
    work: Path,
    *,
    index: Index | None = None,
    limit_bytes: int = 512 << 20,
) -> np.ndarray:
    """Return the documents of `folders` to drop: DUPLICATE records, ascending; the first of a cluster stays.

    folders: written by `write_bands`, in crawl order. set_of(number): the shingle set of a document of `folders`,
    numbered from 0. index: documents of earlier builds; `document`, `kept` and `like` count its documents first, then
    those of `folders`. work: an empty folder for candidates and verified pairs.
    """
    fixed = index.documents if index else 0
    everything = [*(index.folders if index else ()), *folders]
    documents = SignatureFolders(everything, rules).documents

    def set_of_any(number: int) -> np.ndarray:
        return index.set_of(number) if index and number < fixed else set_of(number - fixed)

    found = [work / f"band-{band:02d}.npy" for band in range(rules.bands + 1)]
    for band, path in enumerate(found):
        band_candidates(band, everything, rules, path, fixed=fixed, limit_bytes=limit_bytes)
    candidates, verified = work / "candidates.npy", []
    merge_candidates(found, candidates)
    for number, (start, stop) in enumerate(slices(candidates, SLICE)):
        verified.append(work / f"verified-{number:05d}.npy")
        verify_pairs(candidates, set_of_any, rules, verified[-1], start=start, stop=stop)
    return clusters(documents, verified).duplicates(fixed)
