"""Batches: the same for any number of ranks, in order, ahead of time, and errors arrive where they can be handled."""

import threading
import time

import numpy as np
import pytest
import torch
from tests.expect import refused, settled

from ingot.trainer.loader import loader as module
from ingot.trainer.loader.loader import Loader

SHARDS = [("web", 9_000), ("books", 6_000)]


def batches(folder, **changes):
    settings = {"seq_len": 32, "global_batch": 8, "micro_batch": 2, "seed": 7, "last_step": 5} | changes
    with Loader(folder, **settings) as loader:
        return list(loader)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_together_read_the_global_batch(token_folder, ranks):
    folder, _ = token_folder(SHARDS)
    whole = batches(folder)
    parts = [batches(folder, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step, one in enumerate(whole):
        ids = np.concatenate([part[step].sample_ids for part in parts])
        assert np.array_equal(ids, one.sample_ids)
        inputs = torch.cat([part[step].inputs.reshape(-1, 32) for part in parts])
        assert torch.equal(inputs, one.inputs.reshape(-1, 32))
        assert parts[0][step].inputs.shape == (8 // ranks // 2, 2, 32)
    assert [b.step for b in whole] == [1, 2, 3, 4, 5]


def test_targets_are_inputs_shifted_and_come_from_the_shards(token_folder):
    folder, written = token_folder(SHARDS)
    with Loader(folder, seq_len=32, global_batch=8, micro_batch=4, seed=7, last_step=3) as loader:
        for batch in loader:
            assert batch.inputs.dtype == batch.targets.dtype == torch.int64
            assert torch.equal(batch.inputs[..., 1:], batch.targets[..., :-1])
            shards, starts = loader.order.locate(batch.sample_ids)
            expected = [written[s][a + 1 : a + 33] for s, a in zip(shards, starts, strict=True)]
            assert np.array_equal(batch.targets.reshape(-1, 32), np.stack(expected))
            assert batch.document_ids is None
            assert batch.wait_seconds >= 0


def test_starting_late_gives_the_same_batches(token_folder):
    folder, _ = token_folder(SHARDS)
    late = batches(folder, first_step=4)
    assert [b.step for b in late] == [4, 5]
    assert torch.equal(late[0].inputs, batches(folder)[3].inputs)
    assert batches(folder, first_step=6) == []


def test_documents_are_numbered_within_the_sequence(token_folder):
    folder, _ = token_folder(SHARDS)
    batch = batches(folder, mask_documents=True, seq_len=120, last_step=1)[0]
    assert batch.document_ids.shape == batch.inputs.shape
    assert batch.document_ids.dtype == torch.int32
    ends = (batch.inputs == 0).int()
    assert torch.equal(batch.document_ids, (ends.cumsum(-1) - ends).int())
    assert batch.document_ids.max() >= 2


def test_weights_reach_the_order(token_folder):
    folder, _ = token_folder(SHARDS)
    batch = batches(folder, weights={"books": 1.0}, last_step=1)[0]
    assert batch.sample_ids.min() >= 8999 // 32


def test_damage_is_raised_by_next_and_not_lost_in_the_thread(token_folder):
    folder, _ = token_folder(SHARDS)
    (folder / "books-00001.tokens").write_bytes(b"x")
    with Loader(folder, seq_len=32, global_batch=8, micro_batch=2, seed=7, last_step=50) as loader:
        with refused("E-SHARD-SIZE"):
            list(loader)
        assert list(loader) == []  # no batch after an error


@pytest.mark.parametrize("ahead", [2, 5])
def test_it_runs_so_many_batches_ahead_and_no_further(token_folder, monkeypatch, ahead):
    folder, _ = token_folder(SHARDS)
    reads = []
    honest = module.TokenReader.read
    monkeypatch.setattr(
        module.TokenReader, "read", lambda self, ids, out=None: (reads.append(1), honest(self, ids, out))[1]
    )
    with Loader(folder, seq_len=32, global_batch=8, micro_batch=2, seed=7, last_step=50, prefetch=ahead):
        settled(lambda: ahead + 1 - len(reads), 0)
        time.sleep(0.1)
    assert len(reads) == ahead + 1  # the last waits for its place in the queue


def test_how_far_it_reads_ahead_changes_no_sample(token_folder):
    folder, _ = token_folder(SHARDS)

    def batches(ahead: int) -> list:
        settings = {"seq_len": 32, "global_batch": 8, "micro_batch": 2, "seed": 7, "last_step": 9, "prefetch": ahead}
        with Loader(folder, **settings) as loader:
            return [(batch.step, batch.sample_ids.tolist(), batch.inputs.tolist()) for batch in loader]

    assert batches(1) == batches(2) == batches(32)


def test_closing_ends_the_thread(token_folder):
    folder, _ = token_folder(SHARDS)
    loader = Loader(folder, seq_len=32, global_batch=8, micro_batch=2, seed=7, last_step=50)
    next(loader)
    loader.close()
    loader.close()
    assert "ingot-loader" not in [t.name for t in threading.enumerate()]
    with refused("E-LOADER-CLOSED"):
        next(loader)


def test_storage_that_hangs_is_named_within_the_deadline(token_folder, monkeypatch):
    folder, _ = token_folder(SHARDS)
    release = threading.Event()
    monkeypatch.setattr(module.TokenReader, "read", lambda self, ids, out=None: release.wait(5))
    loader = Loader(folder, seq_len=32, global_batch=8, micro_batch=2, seed=7, last_step=5, deadline_seconds=0.1)
    with refused("E-LOADER-TIMEOUT"):
        next(loader)
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.1)
    with refused("E-LOADER-TIMEOUT"):
        loader.close()
    release.set()


@pytest.mark.parametrize("changes", [{"global_batch": 9}, {"ranks": 3}, {"micro_batch": 3}])
def test_a_batch_that_does_not_divide_is_refused_at_once(token_folder, changes):
    folder, _ = token_folder(SHARDS)
    with refused("E-BATCH-DIVIDE"):
        batches(folder, **changes)


def test_too_long_sequences_are_refused_at_once(token_folder):
    folder, _ = token_folder(SHARDS)
    with refused("E-TOKENS-TOO-FEW"):
        batches(folder, seq_len=10_000)
