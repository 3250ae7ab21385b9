"""A manifest or a header cannot take more memory than its checkpoint permits, whatever it has in it."""

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.schema.checkpoint import file_of
from ingot.storage import canonical_json, sha256_bytes
from ingot.trainer.checkpoint import headers
from ingot.trainer.checkpoint.headers import LEAST_BYTES, damaged_part, json_memory
from ingot.trainer.checkpoint.manifest import MANIFEST, grade_of_doubt, is_finished, list_checkpoints, read_manifest

GOLDEN = Path(__file__).parents[3] / "golden"
MANY = 20_000
TEXTS = {
    "objects": "[" + "{}," * MANY + "0]",
    "lists": "[" + "[0]," * MANY + "0]",
    "entries": "[" + '{"a":1},' * MANY + "0]",
    "keys": "{" + ",".join(f'"{i:x}":0' for i in range(MANY)) + "}",
    "numbers": "[" + "9999," * MANY + "0]",
    "fractions": "[" + "1.5," * MANY + "0]",
    "texts": "[" + '"ab",' * MANY + "0]",
    "escapes": "[" + '"\\u0100",' * MANY + "0]",
    "wide": json.dumps("a" * MANY + "\U0001f600", ensure_ascii=False),
    "wide escape": json.dumps("a" * MANY + "\U0001f600"),
}


def peak_of(call) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_estimate_is_not_too_low(text):
    data = text.encode()
    assert peak_of(lambda: json.loads(data)) <= json_memory(data) <= 241 * len(data) + 8192


def test_a_manifest_of_many_ranks_is_not_refused():
    """Each rank has a file; each tensor a block per rank, in cuts that tensors share."""
    ranks = 4096
    cuts = [{"ranks": [*range(ranks)], "offsets": [[i, 0] for i in range(ranks)], "sizes": [[1, 64]] * ranks}] * 4
    files = {file_of(i): {"bytes": 5000, "sha256": sha256_bytes(file_of(i).encode())} for i in range(ranks)}
    text = canonical_json({"cuts": cuts, "files": files}).encode()
    assert json_memory(text) < 2 * ranks * 5000


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    shutil.copytree(GOLDEN / "dense-2-ranks", tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    return path


def test_a_hostile_manifest_takes_no_more_than_twice_the_checkpoint(checkpoint):
    """The hash fits, and in memory the values would be 25 times as large."""
    values = json.loads((checkpoint / MANIFEST).read_bytes())
    values.pop("sha256")
    values["callbacks"] = {"x": [{}] * (LEAST_BYTES // 16)}
    text = canonical_json(values)
    (checkpoint / MANIFEST).write_text(f'{text[:-1]},"sha256":"{sha256_bytes(text.encode())}"}}')
    del values, text
    size = sum(file.stat().st_size for file in checkpoint.iterdir())

    def read():
        with refused("E-CKPT-MANIFEST"):
            read_manifest(checkpoint)
        assert not is_finished(checkpoint) and grade_of_doubt(checkpoint) == 0
        assert list_checkpoints(checkpoint.parent)[0].manifest is None

    assert peak_of(read) < 2 * size + (1 << 20)


def test_a_hostile_header_takes_no_more_than_twice_its_file(checkpoint, monkeypatch):
    monkeypatch.setattr(headers, "LEAST_BYTES", 0)
    manifest, text = read_manifest(checkpoint), b"[" + b"{}," * MANY + b"0]"
    path = checkpoint / file_of(0)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    entry = manifest.files[file_of(0)]
    object.__setattr__(entry, "bytes", path.stat().st_size)
    found = []
    peak = peak_of(lambda: found.append(damaged_part(path, manifest, file_of(0), [("model.norm.weight", 0)])))
    assert found == ["its header"] and peak < 2 * len(text) + 10_000
