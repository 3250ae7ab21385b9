"""Token shards that cannot be read for a while, or whose reads hang."""

import errno
import os
import threading

import numpy as np
import pytest
from tests.expect import refused

from ingot.trainer.loader import loader as module
from ingot.trainer.loader import reader as reading
from ingot.trainer.loader.loader import Loader
from ingot.trainer.loader.reader import TokenReader
from ingot.trainer.loader.retry import Retries

SHARDS = [("web", 9000), ("books", 5000)]
SETTINGS = {"seq_len": 32, "global_batch": 8, "micro_batch": 2, "seed": 7, "last_step": 9}


@pytest.fixture
def failing(monkeypatch):
    """`failing(errno, times)`: the next reads of blocks fail; returns the list of the reads."""

    def fail(number: int, times: float) -> list[int]:
        reads: list[int] = []
        honest = os.pread

        def read(fd, size, offset):
            reads.append(offset)
            if len(reads) <= times:
                raise OSError(number, os.strerror(number))
            return honest(fd, size, offset)

        monkeypatch.setattr(reading.os, "pread", read)
        return reads

    return fail


def _batches(folder, **more) -> list:
    with Loader(folder, **SETTINGS, **more) as loader:
        return list(loader)


def test_a_read_that_fails_for_a_while_is_tried_again_and_reported(token_folder, failing):
    folder, _ = token_folder(SHARDS)
    wanted = [batch.inputs.tolist() for batch in _batches(folder)]
    failing(errno.EIO, 3)
    batches = _batches(folder)
    assert [batch.inputs.tolist() for batch in batches] == wanted
    (trouble,) = [trouble for batch in batches for trouble in batch.troubles]
    assert trouble.tries == 3 and trouble.path.endswith(".tokens") and trouble.reason == os.strerror(errno.EIO)
    assert trouble.seconds >= 0.05 + 0.1 + 0.2


def test_a_read_that_fails_for_too_long_names_the_shard(token_folder, failing):
    folder, _ = token_folder(SHARDS)
    failing(errno.ESTALE, 1e9)
    with Loader(folder, **SETTINGS, read_seconds=0.5) as loader, refused("E-SHARD-READ") as error:
        next(loader)
    assert error.value.facts["path"].endswith(".tokens")


def test_an_error_that_does_not_pass_is_not_tried_again(token_folder, failing):
    folder, _ = token_folder(SHARDS)
    reads = failing(errno.EACCES, 1e9)
    reader = TokenReader(folder, 32, retries=Retries(30.0))
    with refused("E-SHARD-READ"):
        reader.read(np.array([0]))
    assert len(reads) == 1


def test_a_thread_that_hangs_is_replaced_and_the_samples_are_the_same(token_folder, monkeypatch):
    folder, _ = token_folder(SHARDS)
    wanted = [(batch.step, batch.inputs.tolist()) for batch in _batches(folder)]
    release, honest, calls = threading.Event(), TokenReader.read, []

    def hang_once(self, ids, out=None):
        calls.append(1)
        if len(calls) == 4:
            release.wait(30)
        return honest(self, ids, out)

    monkeypatch.setattr(module.TokenReader, "read", hang_once)
    batches = _batches(folder, read_seconds=0.3)
    release.set()
    assert [(batch.step, batch.inputs.tolist()) for batch in batches] == wanted
    (trouble,) = [trouble for batch in batches for trouble in batch.troubles]
    assert trouble.tries == 1 and "replaced" in trouble.reason and trouble.seconds >= 0.3
