"""Verification, clusters and the whole search: against brute force, and against a search in memory."""

import csv
import gzip
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import refused
from tests.unit.data.dedup.search import find_duplicates

from ingot.data.dedup import clusters as clusters_module
from ingot.data.dedup.arrays import PIECE, ArrayWriter
from ingot.data.dedup.bands import pack
from ingot.data.dedup.clusters import VERIFIED, clusters, slices, unite_reference, verify_pairs
from ingot.data.dedup.minhash import DedupRules, jaccard, shingle_set
from ingot.data.native import compiled

from .conftest import brute_force, changed, search_in_memory, versions, words

RULES = DedupRules()


def search(texts, folders, work, rules=RULES, **options):
    work.mkdir(exist_ok=True)
    return find_duplicates(folders, lambda n: shingle_set(texts[n], rules), rules, work, **options)


def roots(found, documents):
    kept = list(range(documents))
    for duplicate in found:
        kept[duplicate["document"]] = int(duplicate["kept"])
    return kept


def by_union(documents, pairs):
    root = list(range(documents))
    for a, b, _ in pairs:
        low, high = sorted((root[a], root[b]))
        root = [low if r == high else r for r in root]
    like = {}
    for a, b, similarity in pairs:
        for one, other in ((a, b), (b, a)):
            like[one] = min(like.get(one, (2**32 - 1, 0.0)), (other, similarity))
    return root, [like.get(number, (2**32 - 1, 0.0)) for number in range(documents)]


PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda p: p[0] < p[1]), unique=True)


@pytest.mark.parametrize("core", ["compiled", "plain"])
@settings(max_examples=60)
@given(PAIRS, st.integers(1, 9))
def test_clusters_are_what_pairs_connect(core, tmp_path_factory, pairs, size):
    if core == "compiled" and compiled("_minhash") is None:
        pytest.skip("the compiled core was not built")
    folder = tmp_path_factory.mktemp("pairs")
    rows = [(a, b, 0.75 + (a * 31 + b) % 16 / 128) for a, b in pairs]
    paths = []
    for start in range(0, len(rows), size):
        paths.append(folder / f"{start}.npy")
        np.save(paths[-1], np.array(rows[start : start + size], VERIFIED))
    with pytest.MonkeyPatch.context() as patch:
        if core == "plain":
            patch.setattr(clusters_module, "_CORE", None)
        found = clusters(31, paths)
    expected, like = by_union(31, rows)
    assert found.roots.tolist() == expected
    assert list(zip(found.like.tolist(), found.jaccard.tolist(), strict=True)) == like
    dropped = found.duplicates()
    assert dropped["document"].tolist() == [n for n in range(31) if expected[n] != n]
    assert dropped["kept"].tolist() == [expected[n] for n in dropped["document"].tolist()]
    assert found.duplicates(10).tolist() == [row for row in dropped.tolist() if row[0] >= 10]


def test_long_chains_are_united_quickly_without_the_core():
    count = 200_000
    pairs = np.zeros(count - 1, VERIFIED)
    pairs["earlier"], pairs["later"] = np.arange(count - 1), np.arange(1, count)
    parent, like = np.arange(count, dtype=np.uint32), np.full(count, 2**32 - 1, np.uint32)
    unite_reference(parent, like, np.zeros(count, np.float32), pairs)
    while (parent[parent] != parent).any():
        parent = parent[parent]
    assert not parent.any()
    assert (like == np.concatenate(([1], np.arange(count - 1)))).all()


@pytest.mark.parametrize("parent", [[0, 1, 3, 3], [0, 9, 2, 1], [0, 2, 1, 1]])
def test_the_core_refuses_a_forest_that_leads_anywhere(parent):
    like, similarity = np.full(4, 2**32 - 1, np.uint32), np.zeros(4, np.float32)
    pairs = np.array([(0, 1, 1.0), (2, 3, 1.0)], VERIFIED)
    core = compiled("_minhash")
    if core is None:
        pytest.skip("the compiled core was not built")
    with pytest.raises(ValueError, match="greater than its child"):
        core.unite(np.array(parent, np.uint32), like, similarity, pairs)


def test_a_pair_of_a_document_that_is_not_there(tmp_path):
    np.save(tmp_path / "pairs.npy", np.array([(1, 7, 1.0)], VERIFIED))
    with refused("E-DEDUP-PAIR-RANGE", documents=7):
        clusters(7, [tmp_path / "pairs.npy"])


def test_verified_pairs_are_exact(tmp_path):
    texts = versions(6, 6)
    sets = [shingle_set(text, RULES) for text in texts]
    every = [(i, j) for j in range(36) for i in range(j)]
    with ArrayWriter(tmp_path / "pairs.npy", "<u8") as file:
        file.append(np.sort(pack(*np.array(every, np.uint32).T)))
    done = verify_pairs(tmp_path / "pairs.npy", sets.__getitem__, RULES, tmp_path / "out.npy")
    found = np.load(tmp_path / "out.npy")
    assert (done.candidates, done.similar) == (len(every), len(found))
    assert done.compared < done.candidates  # pairs within a cluster that is already connected
    for earlier, later, similarity in found.tolist():
        assert similarity == np.float32(jaccard(sets[earlier], sets[later])) >= 0.8
    assert clusters(36, [tmp_path / "out.npy"]).roots.tolist() == brute_force(texts, RULES)


def test_how_candidates_are_cut_changes_nothing(tmp_path):
    texts = versions(5, 10, most=4)
    np.save(tmp_path / "pairs.npy", np.array([j << 32 | i for j in range(50) for i in range(j)], np.uint64))
    results = []
    for at_most in (7, 100, 10_000):
        paths = []
        for start, stop in slices(tmp_path / "pairs.npy", at_most):
            paths.append(tmp_path / f"{at_most}-{start}.npy")
            verify_pairs(
                tmp_path / "pairs.npy",
                lambda n: shingle_set(texts[n], RULES),
                RULES,
                paths[-1],
                start=start,
                stop=stop,
                cache_bytes=5000,
            )
        results.append(clusters(50, paths).duplicates().tolist())
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 20


def test_the_cache_is_bounded_and_asks_in_order(tmp_path):
    sets = [shingle_set(changed(words(n)), RULES) for n in range(40)]
    asked = []
    np.save(tmp_path / "pairs.npy", np.array([i + 1 << 32 | i for i in range(39)], np.uint64))
    verify_pairs(
        tmp_path / "pairs.npy",
        lambda n: (asked.append(n), sets[n])[1],
        RULES,
        tmp_path / "out.npy",
        cache_bytes=3 * sets[0].nbytes,
    )
    assert asked == list(range(40))


@pytest.mark.parametrize("seed", range(4))
def test_the_whole_search_finds_what_brute_force_and_the_search_in_memory_find(tmp_path, write_folders, seed):
    texts = versions(40, 6, seed=seed, most=1)  # so far above the threshold that no pair is missed by all bands
    texts += versions(20, 3, seed=seed, most=12)[:-1]  # and pairs around it
    found = search(texts, write_folders(texts, RULES, [100, 199]), tmp_path / "work")
    assert roots(found, 299)[:240] == brute_force(texts[:240], RULES)
    assert roots(found, 299) == search_in_memory(texts, RULES)


def test_the_first_of_a_cluster_stays(tmp_path, write_folders):
    a, b = words(1), words(2)
    texts = [changed(b), changed(a), changed(a, 50), changed(b), changed(a)]
    found = search(texts, write_folders(texts, RULES), tmp_path / "work")
    assert roots(found, 5) == [0, 1, 1, 0, 1]
    assert [0.8 <= similarity < 1 for similarity in found["jaccard"].tolist()] == [True, False, False]


def test_a_pair_below_the_threshold_stays_even_if_a_band_agrees(tmp_path, write_folders):
    a = words(3)
    texts = [changed(a), changed(a, *range(10, 200, 30))]
    assert 0.6 < jaccard(*(shingle_set(text, RULES) for text in texts)) < 0.8
    assert not len(search(texts, write_folders(texts, RULES), tmp_path / "one"))
    rules = DedupRules(jaccard=0.6, bands=32, rows=4)
    assert len(search(texts, write_folders(texts, rules), tmp_path / "two", rules)) == 1


def test_few_permutations_only_nominate_and_never_veto(tmp_path, write_folders):
    texts = [text for n in range(100) for text in (changed(words(n)), changed(words(n), 50, 150))]
    rules = DedupRules(jaccard=0.9, bands=8, rows=1)
    found = search(texts, write_folders(texts, rules), tmp_path / "work", rules)
    assert found["document"].tolist() == list(range(1, 200, 2))


def test_clusters_take_twelve_bytes_per_document(tmp_path):
    """12 bytes per document, 16 per dropped document, and the pieces that are read."""
    documents, dropped, most = 4 << 20, 1000, 24 * PIECE
    pairs = np.zeros(dropped, VERIFIED)
    pairs["earlier"], pairs["later"] = np.arange(dropped), np.arange(dropped) + 1
    np.save(tmp_path / "pairs.npy", pairs)
    tracemalloc.start()
    found = clusters(documents, [tmp_path / "pairs.npy"])
    duplicates = found.duplicates()
    assert tracemalloc.get_traced_memory()[1] < 12 * documents + most
    tracemalloc.stop()
    assert len(duplicates) == dropped and not duplicates["kept"].any()


def test_each_duplicate_names_the_first_document_it_is_like(tmp_path, write_folders):
    a = words(4)
    first, middle, last = changed(a), changed(a, 20, 35), changed(a, 20, 35, 60, 80, 100)
    texts = [changed(words(9)), first, last, middle]
    found = search(texts, write_folders(texts, RULES), tmp_path / "work")
    assert [(row["document"], row["kept"], row["like"]) for row in found] == [(2, 1, 3), (3, 1, 1)]
    assert found["jaccard"][1] == np.float32(jaccard(shingle_set(first, RULES), shingle_set(middle, RULES)))


def test_planted_pairs(test_data, tmp_path, write_folders):
    with gzip.open(test_data / "dedup_docs.jsonl.gz") as file:
        documents = [json.loads(line) for line in file]
    texts = [document["text"] for document in documents]
    number = {document["id"]: i for i, document in enumerate(documents)}
    with (test_data / "dedup_truth.csv").open() as file:
        truth = [(number[a], number[b], float(j)) for a, b, j in list(csv.reader(file))[1:]]
    found = search(texts, write_folders(texts, RULES, [3000, 3000, 2223]), tmp_path / "work")
    kept = roots(found, len(texts))
    similar = [kept[a] == kept[b] for a, b, j in truth if j >= 0.8]
    assert sum(similar) / len(similar) >= 0.985  # recall
    for row in found:  # precision is 1
        similarity = jaccard(shingle_set(texts[row["document"]], RULES), shingle_set(texts[row["like"]], RULES))
        assert row["jaccard"] == np.float32(similarity) >= np.float32(0.8)
    assert kept == search_in_memory(texts, RULES)
