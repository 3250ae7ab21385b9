import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.data.dedup.arrays import ArrayFile, ArrayWriter, Partitions, by_hash, partitions_for
from ingot.data.dedup.equal import firsts, rows_of, text_hash

KEYS = st.integers(0, 12) | st.integers(0, 2**64 - 1)


def by_dictionary(parts):
    seen, found = {}, []
    for part, rows in enumerate(parts):
        for row, key in enumerate(rows):
            first = seen.setdefault(key, (part, row))
            if first != (part, row):
                found.append((part, row, *first))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("equal")


@settings(max_examples=40)
@given(st.lists(st.lists(KEYS, max_size=30), max_size=6), st.sampled_from([100, 400, 1 << 20]))
def test_as_with_a_dictionary(folder, parts, limit):
    arrays = [np.array(rows, np.uint64) for rows in parts]
    assert firsts(arrays, folder / "out.npy", limit_bytes=limit).tolist() == by_dictionary(parts)
    assert sorted(path.name for path in folder.iterdir()) == ["out.npy"]  # the scratch files are gone


@settings(max_examples=40)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), max_size=6))
def test_both_halves_of_128_bits_decide(folder, parts):
    arrays = [np.array(rows, np.uint64).reshape(-1, 2) for rows in parts]
    assert firsts(arrays, folder / "out.npy", limit_bytes=500).tolist() == by_dictionary(parts)


def test_parts_may_be_files_and_results_are_found_by_part(tmp_path):
    random = np.random.default_rng(3)
    parts = [random.integers(0, 5000, 2000, dtype=np.uint64) for _ in range(4)]
    paths = [tmp_path / f"{number}.npy" for number in range(4)]
    for path, rows in zip(paths, parts, strict=True):
        np.save(path, rows)
    found = firsts(paths, tmp_path / "out.npy", limit_bytes=50_000)
    expected = by_dictionary([rows.tolist() for rows in parts])
    assert found.tolist() == expected
    assert rows_of(found, 2).tolist() == [one for one in expected if one[0] == 2]
    pairs = [np.stack((rows, rows), axis=1) for rows in parts]
    np.save(paths[1], pairs[1])
    assert firsts([pairs[0], paths[1], *pairs[2:]], tmp_path / "out.npy", limit_bytes=50_000).tolist() == expected


def test_texts_are_equal_but_for_whitespace():
    assert text_hash("One  two\n three ") == text_hash("One two three")
    assert text_hash("one two three") != text_hash("One two three")
    assert text_hash("onetwo three") != text_hash("one two three")
    assert np.frombuffer(text_hash("a") + text_hash("\udc80"), "<u8").shape == (4,)
    assert text_hash("a").hex() == "1f4e961eb632c6e63468f15a70af6fa9"  # the same on every machine and in every release


def test_a_growing_array_is_an_npy_file(tmp_path):
    dtype = np.dtype([("earlier", "<u4"), ("later", "<u4"), ("jaccard", "<f4")])
    rows = np.array([(1, 2, 0.5), (3, 4, 0.75)], dtype)
    with ArrayWriter(tmp_path / "a.npy", dtype) as file:
        file.append(rows[:1])
        file.append(rows[1:])
    assert (np.load(tmp_path / "a.npy") == rows).all()
    assert (ArrayFile(tmp_path / "a.npy").read(1, 2) == rows[1:]).all()
    with pytest.raises(RuntimeError), ArrayWriter(tmp_path / "b.npy", "<u8") as file:
        file.append(np.zeros(3, np.uint64))
        raise RuntimeError
    with pytest.raises(ValueError):
        ArrayFile(tmp_path / "b.npy")


def test_pieces_of_a_matrix(tmp_path):
    matrix = np.arange(30, dtype="<u8").reshape(3, 10)
    np.save(tmp_path / "m.npy", matrix)
    pieces = list(ArrayFile(tmp_path / "m.npy").pieces(10, 20, rows=4))
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    assert (np.concatenate(pieces) == matrix[1]).all()


@pytest.mark.parametrize("spill", [0, 3000, 1 << 20])
def test_partitions_keep_the_order(tmp_path, spill):
    rows = np.random.default_rng(1).integers(0, 2**63, 1000, dtype=np.uint64)
    numbers = by_hash(rows, 8)
    spread = Partitions(tmp_path, 8, "<u8", spill)
    for first in range(0, 1000, 100):
        spread.append(rows[first : first + 100], numbers[first : first + 100])
    assert bool(list(tmp_path.iterdir())) == (spill < 1 << 20)
    assert np.bincount(numbers).min() > 80  # even
    for number in range(8):
        pieces = list(spread.take(number, rows=10))
        assert {len(piece) for piece in pieces[:-1]} == {10} and len(pieces[-1]) <= 10
        assert (np.concatenate(pieces) == rows[numbers == number]).all()
        assert not len(spread.take_all(number))
    assert not list(tmp_path.iterdir())


def test_how_many_partitions():
    assert [partitions_for(rows, 10, 100) for rows in (0, 1, 10, 11, 21, 41, 1000)] == [1, 1, 1, 2, 4, 8, 128]
