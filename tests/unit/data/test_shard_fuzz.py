"""Token folders with bytes changed, cut or added anywhere: reported as damage, or as missing; never another error."""

import random
import shutil

import numpy as np
import pytest

from ingot.data.build.prepare import prepare
from ingot.data.lineage.verify import verify_tokens
from ingot.data.sources.input import Input
from ingot.errors import DataError
from ingot.schema.tokens import read_token_manifest
from ingot.trainer.loader.reader import TokenReader

CASES = 120


@pytest.fixture
def tokens(crawl, tmp_path):
    inputs = [Input(location=str(path)) for path in crawl]
    prepare(inputs, tmp_path / "data", vocab_size=300)
    return tmp_path / "data" / "tokens" / "train"


def changed(data: bytes, pick: random.Random) -> bytes:
    """Something else than `data`: a flipped bit, a cut, bytes put in, a piece twice, zeros, another number."""
    at = pick.randrange(len(data))
    kind = pick.randrange(6)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << pick.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + pick.randbytes(pick.randrange(1, 40)) + data[at:]
    if kind == 3:
        return data[:at] + data[at // 2 :]
    if kind == 4:
        return data[:at] + bytes(len(data) - at)
    return data.replace(b"1", b"-9999999999999999999", 1) if b"1" in data else data + b"\0"


def read(folder):
    """All windows, as training reads them."""
    reader = TokenReader(folder, 32)
    return reader.read(np.arange(reader.windows.count))


def test_damage_anywhere_is_damage(tokens, tmp_path):
    pick, found = random.Random(5), 0
    files = sorted(path.name for path in tokens.iterdir())
    assert {name.partition(".")[2] for name in files} >= {"tokens", "blocks", "documents", "lineage.parquet", "json"}
    for _ in range(CASES):
        folder = tmp_path / "case"
        shutil.copytree(tokens, folder)
        path = folder / pick.choice(files)
        data = path.read_bytes()
        other = changed(data, pick)
        path.write_bytes(other)
        try:
            verify_tokens(folder)
            read(folder)
        except DataError:
            found += 1
        else:
            # Only what says the same in other bytes may pass.
            assert other == data or read_token_manifest(folder) == read_token_manifest(tokens), path.name
        shutil.rmtree(folder)
    assert found > 0.8 * CASES
