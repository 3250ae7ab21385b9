"""The whole search for near-duplicates in one process, step by step as the tasks of a build take it.

signatures (bands.write_bands, index.add_to_index)
  -> bands.band_candidates, one task per band and one for equal signatures
  -> bands.merge_candidates
  -> verify.verify_pairs, one task per slice
  -> clusters.clusters
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ingot.data.dedup.bands import SignatureFolders, band_candidates, merge_candidates
from ingot.data.dedup.clusters import clusters
from ingot.data.dedup.index import Index
from ingot.data.dedup.minhash import DedupRules
from ingot.data.dedup.verify import slices, verify_pairs

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
    """The documents of `folders` to drop, DUPLICATE records (clusters.py), ascending; the first of a cluster stays.

    folders: written by `write_bands`, in crawl order. set_of(number): the shingle set of a document of `folders`,
    numbered from 0. index: documents that came before; `kept` and `like` count theirs first, then those of `folders`,
    `document` too. work: an empty folder for candidates and verified pairs.
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
