"""The right tokens, in any order of asking, and never one that was not built."""

import json

import numpy as np
import pytest
from tests.expect import refused

from ingot.errors import DataError
from ingot.schema.tokens import check_vocabulary
from ingot.trainer.loader.reader import TokenReader, document_numbers

SHARDS = [("web", 10_000), ("books", 5_000), ("web", 7_777)]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_are_the_tokens_that_were_written(token_folder, dtype):
    folder, written = token_folder(SHARDS, dtype=dtype)
    reader = TokenReader(folder, 64)
    ids = np.random.default_rng(0).permutation(reader.windows.count)
    out = reader.read(ids)
    assert out.dtype == np.int64
    assert out.shape == (len(ids), 65)
    shards, starts = reader.windows.locate(ids)
    for row, shard, start in zip(out, shards, starts, strict=True):
        assert np.array_equal(row, written[shard][start : start + 65])
    buffer = np.empty((3, 65), np.int64)
    assert reader.read(ids[:3], out=buffer) is buffer
    assert np.array_equal(buffer, out[:3])


def test_few_open_shards_give_the_same_tokens(token_folder):
    folder, _ = token_folder([("web", 1000)] * 9)
    ids = np.random.default_rng(1).integers(0, 9 * 15, 200)
    narrow = TokenReader(folder, 64, open_shards=2)
    assert np.array_equal(narrow.read(ids), TokenReader(folder, 64).read(ids))
    assert len(narrow._open) == 2


def test_opening_reads_nothing_but_the_manifest(token_folder):
    folder, _ = token_folder(SHARDS)
    for path in folder.iterdir():
        if path.name != "manifest.json":
            path.unlink()
    reader = TokenReader(folder, 64)
    with refused("E-SHARD-MISSING"):
        reader.read(np.array([0]))


def test_a_block_is_checked_once_also_when_its_shard_was_closed_between(token_folder, monkeypatch):
    folder, _ = token_folder([("web", 5000), ("web", 5000)])
    reader = TokenReader(folder, 64, open_shards=1)
    checked = []
    honest = TokenReader._check
    monkeypatch.setattr(TokenReader, "_check", lambda self, *a: (checked.append(a[::2]), honest(self, *a)))
    for _ in range(2):
        reader.read(np.arange(reader.windows.count))
    assert len(checked) == len(set(checked)) == 2 * 3  # blocks of 2048 tokens


@pytest.mark.parametrize("block", [0, 2, 4])
def test_one_flipped_bit_is_found_when_its_block_is_touched_and_not_before(token_folder, block):
    folder, _ = token_folder([("web", 10_000)])
    path = folder / "web-00000.tokens"
    data = bytearray(path.read_bytes())
    data[block * 4096 + 100] ^= 4
    path.write_bytes(data)
    windows = TokenReader(folder, 64).windows
    _, starts = windows.locate(np.arange(windows.count))
    touches = (starts // 2048 <= block) & ((starts + 64) // 2048 >= block)
    assert block == 0 or starts[touches][0] // 2048 == block - 1  # the first one begins in the block before
    for window in np.flatnonzero(touches)[[0, -1]]:
        reader = TokenReader(folder, 64)
        reader.read(np.flatnonzero(~touches))
        with refused("E-SHARD-HASH", shard="web-00000", path=str(path), block=block):
            reader.read(np.array([window]))


def damage(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "code", "facts"),
    [
        ("web-00000.tokens", lambda d: d[:-2], "E-SHARD-SIZE", {"bytes": 19_998, "expected": 20_000}),
        ("web-00000.tokens", lambda d: d + b"\0", "E-SHARD-SIZE", {"bytes": 20_001, "expected": 20_000}),
        ("web-00000.tokens", lambda d: b"", "E-SHARD-SIZE", {"bytes": 0, "expected": 20_000}),
        ("web-00000.blocks", lambda d: d[:-1], "E-SHARD-HASH", {}),
        ("web-00000.blocks", lambda d: bytes([d[0] ^ 1]) + d[1:], "E-SHARD-HASH", {}),
        (
            "manifest.json",
            lambda d: d.replace(b'"uint16"', b'"uint32"'),
            "E-SHARD-SIZE",
            {"bytes": 20_000, "expected": 40_000},
        ),
    ],
)
def test_damage_is_named(token_folder, name, change, code, facts):
    folder, _ = token_folder([("web", 10_000)])
    damage(folder, name, change)
    path = folder / name.replace("manifest.json", "web-00000.tokens")
    with refused(code, shard="web-00000", path=str(path), **facts) as caught:
        TokenReader(folder, 64).read(np.array([0]))
    assert caught.value.fix


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1}', b"\xff"])
def test_a_broken_manifest_is_a_data_error(token_folder, content):
    folder, _ = token_folder([("web", 10_000)])
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(DataError):
        TokenReader(folder, 64)


@pytest.mark.parametrize(
    ("name", "value"), [("version", 2), ("block_bytes", 0), ("block_bytes", 4097), ("eot_id", 1000), ("eot_id", -1)]
)
def test_a_manifest_that_cannot_be_right_is_a_data_error(token_folder, name, value):
    folder, _ = token_folder([("web", 10_000)])
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(values | {name: value}))
    with refused("E-TOKENS-MANIFEST"):
        TokenReader(folder, 64)


def test_a_folder_without_manifest_is_no_token_folder(tmp_path):
    with refused("E-TOKENS-MISSING"):
        TokenReader(tmp_path / "nothing", 64)


def test_vocabulary_has_to_fit(make_manifest):
    check_vocabulary(make_manifest([("web", 10)]), 1000)
    with refused("E-VOCABULARY-SMALL", vocab_size=999):
        check_vocabulary(make_manifest([("web", 10)]), 999)


def test_document_numbers_count_ends_before_a_token():
    inputs = np.array([[5, 0, 6, 7, 0, 0, 8], [0, 1, 2, 3, 4, 5, 6]])
    assert document_numbers(inputs, 0).tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert document_numbers(inputs, 0).dtype == np.int32
    assert document_numbers(inputs.reshape(1, 2, 7), 9).max() == 0
