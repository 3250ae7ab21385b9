"""Texts with known similarity, and folders of their signatures."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from ingot.data.dedup.bands import write_bands
from ingot.data.dedup.minhash import DedupRules, shingle_set, signature_of


def words(seed: int, count: int = 200) -> list[str]:
    return [f"w{i}" for i in np.random.default_rng(seed).integers(0, 5000, count)]


def changed(text_words: Sequence[str], *places: int) -> str:
    return " ".join(f"changed{i}" if i in places else word for i, word in enumerate(text_words))


def versions(bases: int, copies: int, seed: int = 0, most: int = 12) -> list[str]:
    """`copies` versions of each of `bases` texts, each with up to `most` changed words, shuffled."""
    random = np.random.default_rng(seed)
    texts = [
        changed(words(base), *random.choice(200, random.integers(0, most + 1), replace=False).tolist())
        for base in range(bases)
        for _ in range(copies)
    ]
    return [texts[i] for i in random.permutation(len(texts))]


def brute_force(texts: Sequence[str], rules: DedupRules) -> list[int]:
    """The first document of each one's cluster, all pairs compared."""
    sets = [set(shingle_set(text, rules).tolist()) for text in texts]
    root = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= rules.jaccard and root[i] != root[j]:
                low, high = sorted((root[i], root[j]))
                root = [low if r == high else r for r in root]
    return root


def buckets(texts: Sequence[str], rules: DedupRules) -> set[frozenset[int]]:
    """The documents that agree in all rows of a band, for every band, where there are several."""
    signatures = np.array([signature_of(text, rules) for text in texts])
    found = defaultdict(set)
    for number, row in enumerate(signatures.reshape(len(texts), rules.bands, rules.rows)):
        for band, values in enumerate(row):
            found[band, values.tobytes()].add(number)
    return {frozenset(bucket) for bucket in found.values() if len(bucket) > 1}


def search_in_memory(texts: Sequence[str], rules: DedupRules) -> list[int]:
    """The first document of each one's cluster, all pairs of each bucket compared."""
    sets = [set(shingle_set(text, rules).tolist()) for text in texts]
    pairs = {pair for bucket in buckets(texts, rules) for pair in combinations(sorted(bucket), 2)}
    root = list(range(len(texts)))
    for i, j in sorted(pairs):
        if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= rules.jaccard and root[i] != root[j]:
            low, high = sorted((root[i], root[j]))
            root = [low if r == high else r for r in root]
    return root


@pytest.fixture
def write_folders(tmp_path):
    """`write_folders(texts, rules, sizes)` writes a signature folder per size; returns them."""

    def write(texts: Sequence[str], rules: DedupRules, sizes: Sequence[int] | None = None) -> list[Path]:
        folders, start = [], 0
        for size in sizes or [len(texts)]:
            folder = tmp_path / f"folder-{len(list(tmp_path.iterdir())):05d}"
            folder.mkdir()
            signatures = [signature_of(text, rules) for text in texts[start : start + size]]
            write_bands(np.array(signatures, np.uint32).reshape(-1, rules.permutations), rules, folder)
            folders.append(folder)
            start += size
        assert start == len(texts)
        return folders

    return write
