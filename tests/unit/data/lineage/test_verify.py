"""Verification reads everything and names the first byte that is wrong, also when the hashes were made to fit."""

import json

import numpy as np
import pytest
from tests.expect import refused

from ingot.config import to_dict
from ingot.data.lineage.verify import block_digests, verify_tokens
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard, TokenManifest
from ingot.storage import sha256_bytes, write_json

BLOCK = 4096


def write(folder, tokens, lengths, *, dtype="<u2"):
    """A one-shard folder whose hashes fit whatever is in it."""
    folder.mkdir(exist_ok=True)
    np.asarray(tokens, dtype).tofile(folder / "web-00000.tokens")
    index = np.zeros(len(lengths), DOCUMENT_DTYPE)
    index["tokens"], index["start"] = lengths, np.cumsum(lengths) - lengths
    (folder / "web-00000.documents").write_bytes(index.tobytes())
    blocks = block_digests(folder / "web-00000.tokens", BLOCK)
    (folder / "web-00000.blocks").write_bytes(blocks)
    shard = Shard(
        name="web-00000",
        source="web",
        tokens=len(tokens),
        documents=len(lengths),
        text_bytes=1,
        blocks_sha256=sha256_bytes(blocks),
        documents_sha256=sha256_bytes(index.tobytes()),
    )
    manifest = TokenManifest(
        dtype="uint16" if dtype == "<u2" else "uint32",
        vocab_size=500,
        eot_id=0,
        tokenizer_sha256="",
        corpus_sha256="",
        split="train",
        block_bytes=BLOCK,
        seed=0,
        shards=(shard,),
    )
    write_json(folder / "manifest.json", to_dict(manifest))
    return folder


def good():
    tokens = np.arange(6000) % 499 + 1
    tokens[[99, 4095, 5999]] = 0
    return tokens, [100, 3996, 1904]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_whole_folder_passes(tmp_path, dtype):
    verified = verify_tokens(write(tmp_path / "t", *good(), dtype=dtype))
    size = 6000 * int(dtype[2])
    assert (verified.shards, verified.documents, verified.tokens, verified.bytes) == (1, 3, 6000, size)
    assert verified.blocks == -(-size // BLOCK)


def test_a_flipped_bit_is_named_with_block_and_bytes(tmp_path):
    folder = write(tmp_path / "t", *good())
    data = bytearray((folder / "web-00000.tokens").read_bytes())
    data[5000] ^= 1
    (folder / "web-00000.tokens").write_bytes(data)
    with refused("E-SHARD-HASH", path=str(folder / "web-00000.tokens"), block=1):
        verify_tokens(folder)


def test_an_id_above_the_vocabulary_is_named_with_its_byte(tmp_path):
    tokens, lengths = good()
    tokens[3000] = 500
    with refused("E-SHARD-TOKEN-ID", block=1, token=500, byte=6000):
        verify_tokens(write(tmp_path / "t", tokens, lengths))


@pytest.mark.parametrize(("at", "value"), [(4095, 7), (2500, 0)])
def test_documents_end_with_the_end_of_text_and_nowhere_else(tmp_path, at, value):
    tokens, lengths = good()
    tokens[at] = value
    with refused("E-SHARD-DOCUMENT-END", block=1):
        verify_tokens(write(tmp_path / "t", tokens, lengths))


@pytest.mark.parametrize("lengths", [[100, 3996], [100, 3996, 1903], [100, 3996, 1904, 5], []])
def test_an_index_that_does_not_fill_the_shard_is_refused(tmp_path, lengths):
    with refused("E-SHARD-INDEX"):
        verify_tokens(write(tmp_path / "t", good()[0], lengths))


def test_overlapping_documents_are_refused(tmp_path):
    folder = write(tmp_path / "t", *good())
    index = np.fromfile(folder / "web-00000.documents", DOCUMENT_DTYPE)
    index["start"][1] -= 1
    (folder / "web-00000.documents").write_bytes(index.tobytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["documents_sha256"] = sha256_bytes(index.tobytes())
    write_json(folder / "manifest.json", manifest)
    with refused("E-SHARD-INDEX"):
        verify_tokens(folder)


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("web-00000.tokens", lambda d: d[:-1], "E-SHARD-SIZE"),
        ("web-00000.blocks", lambda d: d[:32], "E-SHARD-HASH"),
        ("web-00000.documents", lambda d: d[:-1], "E-SHARD-HASH"),
        ("manifest.json", lambda d: d.replace(b"uint16", b"uint32"), "E-SHARD-SIZE"),
    ],
)
def test_damage_is_named(tmp_path, name, change, code):
    folder = write(tmp_path / "t", *good())
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with refused(code):
        verify_tokens(folder)


@pytest.mark.parametrize("name", ["web-00000.tokens", "web-00000.blocks", "web-00000.documents"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = write(tmp_path / "t", *good())
    (folder / name).unlink()
    with refused("E-SHARD-MISSING", path=str(folder / name)):
        verify_tokens(folder)


def test_a_missing_or_damaged_manifest_is_refused(tmp_path):
    folder = write(tmp_path / "t", *good())
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"uint16", b"uint8"))
    with refused("E-TOKENS-MANIFEST", path=str(path), keys=["dtype"]):
        verify_tokens(folder)
    path.unlink()
    with refused("E-TOKENS-UNFINISHED", folder=str(folder)):
        verify_tokens(folder)


def test_all_damage_is_reported_at_once(tmp_path):
    folder = write(tmp_path / "t", *good())
    data = bytearray((folder / "web-00000.tokens").read_bytes())
    data[10] ^= 1
    data[9000] ^= 1
    (folder / "web-00000.tokens").write_bytes(data)
    (folder / "web-00000.documents").unlink()
    with refused("E-DATA-DAMAGED", places=3, codes=["E-SHARD-HASH", "E-SHARD-MISSING"]) as error:
        verify_tokens(folder)
    missing, first, last = (str(folder / f"web-00000.{kind}") for kind in ("documents", "tokens", "tokens"))
    assert sorted(error.value.facts["damage"], key=str) == [
        {"code": "E-SHARD-HASH", "path": first, "block": 0},
        {"code": "E-SHARD-HASH", "path": last, "block": 2},
        {"code": "E-SHARD-MISSING", "path": missing},
    ]


def test_a_long_list_of_damage_ends_in_a_count(tmp_path):
    folder = write(tmp_path / "t", np.arange(60_000) % 499 + 1, [60_000])
    (folder / "web-00000.tokens").write_bytes(bytes(120_000))
    with refused("E-DATA-DAMAGED", places=30) as error:
        verify_tokens(folder)
    assert len(error.value.facts["damage"]) == 20
    assert error.value.found.endswith("and 10 more")  # the layout of the message: what it leaves out is counted
