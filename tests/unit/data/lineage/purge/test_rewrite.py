"""Cutting ranges out of a file of tokens, wherever blocks begin and end."""

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import refused

from ingot.data.lineage.purge.rewrite import _copy_without
from ingot.data.lineage.verify import block_digests


def shard(folder, data, block_bytes):
    (folder / "x.tokens").write_bytes(data)
    blocks = block_digests(folder / "x.tokens", block_bytes)
    (folder / "x.blocks").write_bytes(blocks)
    return {"name": "x", "blocks_sha256": hashlib.sha256(blocks).hexdigest()}


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    leaves=st.lists(st.booleans(), min_size=20, max_size=20),
    block_bytes=st.integers(1, 40),
)
@settings(max_examples=150)
def test_what_stays_is_what_slicing_leaves(tmp_path_factory, lengths, leaves, block_bytes):
    folder = tmp_path_factory.mktemp("shard")
    data, pieces, ranges, at = bytes(i * 7 % 251 for i in range(sum(lengths))), b"", [], 0
    for length, gone in zip(lengths, leaves, strict=False):
        if gone:
            ranges.append((at, at + length))
        else:
            pieces += data[at : at + length]
        at += length
    _copy_without(folder, shard(folder, data, block_bytes), ranges, block_bytes, folder / "out")
    assert (folder / "out").read_bytes() == pieces


def test_a_damaged_block_is_never_copied(tmp_path):
    entry = shard(tmp_path, bytes(100), 10)
    (tmp_path / "x.tokens").write_bytes(bytes(55) + b"\1" + bytes(44))
    with refused("E-SHARD-HASH", block=5):
        _copy_without(tmp_path, entry, [(0, 20)], 10, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "x.blocks").write_bytes(bytes(320))
    with refused("E-FILE-HASH", path=str(tmp_path / "x.blocks")):
        _copy_without(tmp_path, entry, [(0, 20)], 10, tmp_path / "out")
