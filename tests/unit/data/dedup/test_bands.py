import tracemalloc

import numpy as np
import pytest
from tests.expect import refused

from ingot.data.dedup import bands
from ingot.data.dedup.bands import (
    SignatureFolders,
    band_candidates,
    join_folders,
    merge_candidates,
    pack,
    unpack,
    write_bands,
)
from ingot.data.dedup.minhash import DedupRules, signature_of

from .conftest import buckets, changed, versions, words

RULES = DedupRules()


def pairs_of(path):
    return set(zip(*(side.tolist() for side in unpack(np.load(path))), strict=True))


def by_hand(texts, rules, band):
    """All pairs of one bucket whose signatures agree enough, equal signatures only with their first."""
    signatures = np.array([signature_of(text, rules) for text in texts])
    first = [int(np.flatnonzero((signatures == row).all(axis=1))[0]) for row in signatures]
    found = set()
    for i in range(len(texts)):
        for j in range(i):
            rows = signatures[[j, i], band * rules.rows : (band + 1) * rules.rows]
            low = (signatures[i] & 255) == (signatures[j] & 255)
            estimate = (low.mean() - 1 / 256) / (1 - 1 / 256)
            if first[i] == i and first[j] == j and (rows[0] == rows[1]).all() and estimate >= rules.least_estimate:
                found.add((j, i))
    return found, {(first[i], i) for i in range(len(texts)) if first[i] != i}


@pytest.mark.parametrize("limit", [2_000, 1 << 20])
def test_candidates_are_all_similar_pairs_of_a_bucket(tmp_path, write_folders, limit):
    texts = versions(20, 5, most=4)
    folders = write_folders(texts, RULES, [40, 0, 1, 59])
    for band in (0, 7, 15):
        count = band_candidates(band, folders, RULES, tmp_path / "pairs.npy", limit_bytes=limit)
        similar, copies = by_hand(texts, RULES, band)
        assert pairs_of(tmp_path / "pairs.npy") == similar
        assert count == len(similar) > 20
    band_candidates(RULES.bands, folders, RULES, tmp_path / "pairs.npy", limit_bytes=limit)
    assert pairs_of(tmp_path / "pairs.npy") == copies
    assert copies


def test_the_cut_into_folders_and_the_memory_change_nothing(tmp_path, write_folders):
    texts = versions(8, 60, most=2)  # buckets beyond the window
    results = []
    for sizes, limit in (([480], 1 << 20), ([100, 200, 180], 1 << 20), ([100, 380], 100 * 480)):
        band_candidates(3, write_folders(texts, RULES, sizes), RULES, tmp_path / "pairs.npy", limit_bytes=limit)
        results.append((tmp_path / "pairs.npy").read_bytes())
    assert results[0] == results[1] == results[2]


def test_joined_folders_are_as_the_folders(tmp_path, write_folders):
    texts = versions(10, 6)
    folders = write_folders(texts, RULES, [20, 0, 40])
    for name, joined in (("joined", folders), ("nothing", [])):
        (tmp_path / name).mkdir()
        join_folders(joined, RULES, tmp_path / name)
    assert SignatureFolders([tmp_path / "nothing"], RULES).documents == 0
    (whole,) = write_folders(texts, RULES)
    for name in ("keys.npy", "signatures.npy"):
        assert np.array_equal(np.load(tmp_path / "joined" / name), np.load(whole / name))


def test_pairs_among_fixed_documents_are_left_out(tmp_path, write_folders):
    texts = versions(10, 6)
    folders = write_folders(texts, RULES)
    band_candidates(0, folders, RULES, tmp_path / "all.npy")
    band_candidates(0, folders, RULES, tmp_path / "some.npy", fixed=30)
    every = pairs_of(tmp_path / "all.npy")
    assert pairs_of(tmp_path / "some.npy") == {pair for pair in every if pair[1] >= 30} < every


def test_an_enormous_bucket_costs_a_bounded_number_of_comparisons(tmp_path, write_folders, monkeypatch):
    random = np.random.default_rng(5)
    shared = random.integers(0, 2**32, (1, 8), dtype=np.uint32)
    own = random.integers(0, 2**32, (5000, 120), dtype=np.uint32)
    write_bands(np.hstack((np.repeat(shared, 5000, axis=0), own)), RULES, tmp_path)  # one bucket, nothing else alike
    compared = []
    estimates = SignatureFolders.estimates
    monkeypatch.setattr(
        SignatureFolders, "estimates", lambda self, a, b: (compared.append(len(a)), estimates(self, a, b))[1]
    )
    assert band_candidates(0, [tmp_path], RULES, tmp_path / "pairs.npy") == 0
    assert 5000 * bands.WINDOW < sum(compared) < 5000 * (bands.WINDOW + bands.LEADERS)


@pytest.mark.parametrize("limit", [20 * 1000, 1 << 26])
def test_a_template_with_thousands_of_pages_is_connected_by_few_pairs(tmp_path, write_folders, limit):
    page = words(1)
    texts = [changed(page, number % 200) for number in range(600)] + [changed(words(2), n) for n in range(200)]
    folders = write_folders(texts, RULES)
    connected = set()
    for band in range(RULES.bands + 1):
        count = band_candidates(band, folders, RULES, tmp_path / "pairs.npy", limit_bytes=limit)
        assert count < 800 * 3  # all pairs of a bucket would be tens of thousands
        connected |= pairs_of(tmp_path / "pairs.npy")
    assert {later for _, later in connected} == {*range(1, 600), *range(601, 800)}


def test_estimates_are_near_the_share_of_equal_places(write_folders):
    texts = versions(5, 40)
    source = SignatureFolders(write_folders(texts, RULES, [50, 150]), RULES)
    whole = np.array([signature_of(text, RULES) for text in texts])
    earlier, later = np.random.default_rng(1).integers(0, 200, (2, 5000)).astype(np.uint32)
    errors = source.estimates(earlier, later) - (whole[earlier] == whole[later]).mean(axis=1)
    assert abs(errors.mean()) < 0.001
    assert errors.std() < 0.01
    assert (source.estimates(earlier, earlier) == 1).all()


def test_buckets_are_those_of_whole_rows(tmp_path, write_folders):
    texts = versions(10, 10, seed=4)
    source = SignatureFolders(write_folders(texts, RULES), RULES)
    found = set()
    for band in range(RULES.bands):
        keys = np.concatenate([keys for _, keys in source.keys(band)])
        found |= {frozenset(np.flatnonzero(keys == key).tolist()) for key in keys}
    assert buckets(texts, RULES) == {bucket for bucket in found if len(bucket) > 1}


@pytest.mark.parametrize("band", [0, 2])
def test_what_is_held_does_not_follow_the_number_of_documents(tmp_path, band):
    """All of them in one bucket, with one signature."""
    rules, peaks = DedupRules(bands=2, rows=4), []
    for documents in (50_000, 200_000):
        folders = [tmp_path / f"{documents}-{number}" for number in range(10)]
        for folder in folders:
            folder.mkdir()
            write_bands(np.full((documents // 10, 8), 7, np.uint32), rules, folder)
        tracemalloc.start()
        band_candidates(band, folders, rules, tmp_path / "out.npy", limit_bytes=2 << 20)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] < 8 << 20


def test_merged_candidates_are_sorted_and_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr(bands, "PIECE", 50)
    random, files = np.random.default_rng(2), []
    for number in range(4):
        files.append(tmp_path / f"{number}.npy")
        np.save(files[-1], np.unique(random.integers(0, 500, 100 * number, dtype=np.uint64)))
    count = merge_candidates(files, tmp_path / "out.npy")
    merged = np.load(tmp_path / "out.npy")
    assert merged.tolist() == sorted({pair for file in files for pair in np.load(file).tolist()})
    assert count == len(merged)
    assert merge_candidates([], tmp_path / "out.npy") == 0
    assert merge_candidates(files[:1], tmp_path / "out.npy") == 0


def test_a_pair_is_one_number():
    earlier, later = np.array([0, 1, 2**32 - 2], np.uint32), np.array([5, 2**31, 2**32 - 1], np.uint32)
    assert all((a == b).all() for a, b in zip(unpack(pack(earlier, later)), (earlier, later), strict=True))


def test_signatures_of_other_rules_are_refused(write_folders):
    folders = write_folders(["a b c"], DedupRules(bands=4, rows=4))
    with refused("E-DEDUP-RULES-DIFFER", bands=4, permutations=16):
        SignatureFolders(folders, RULES)


def test_more_documents_than_32_bits_count_are_refused(write_folders, monkeypatch):
    monkeypatch.setattr(bands, "_MOST_DOCUMENTS", 3)
    with refused("E-DEDUP-TOO-MANY", documents=4, limit=3):
        SignatureFolders(write_folders(list("abcd"), RULES), RULES)


def test_no_documents(tmp_path, write_folders):
    for folders in ([], write_folders([], RULES)):
        for band in (0, RULES.bands):
            assert band_candidates(band, folders, RULES, tmp_path / "pairs.npy") == 0
