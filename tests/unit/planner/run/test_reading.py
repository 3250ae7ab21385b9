"""Bytes that loaders read, and whether storage gives them."""

import math
from dataclasses import replace

import pytest

from ingot.errors import ConfigError
from ingot.planner.request.presets import load_model
from ingot.planner.run.reading import DRIVES, data_reading, drives, text_bytes_per_second, token_bytes
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train

RUN = RunConfig(
    name="run",
    model=load_model("llama3-8b").arch,
    data=Data(tokens="tokens"),
    train=Train(steps=10, seq_len=4096, global_batch=1024, micro_batch=1),
    parallel=Parallel(dp_shard=8),
)


@pytest.mark.parametrize(("vocab_size", "width"), [(32_000, 2), (65_536, 2), (65_537, 4), (128_256, 4)])
def test_two_bytes_hold_65536_ids(vocab_size, width):
    assert token_bytes(vocab_size) == width


def test_tokens_times_their_width_by_the_time_of_a_step():
    reading = data_reading(RUN, 4.0)
    assert reading.tokens_per_second == 1024 * 4096 / 4
    assert reading.bytes_per_second == reading.tokens_per_second * 4
    assert reading.drives == {"hdd": 1, "nvme": 1}
    assert not reading.is_limit
    small = data_reading(replace(RUN, model=replace(RUN.model, vocab_size=32_000)), 4.0)
    assert small.bytes_per_second == reading.bytes_per_second / 2


def test_how_a_run_is_split_changes_nothing():
    split = replace(RUN, parallel=Parallel(dp_shard=2, tp=2, pp=2))
    assert data_reading(split, 4.0) == data_reading(RUN, 4.0)


def test_slow_storage_is_the_limit():
    assert data_reading(RUN, 4.0, storage_bytes_per_second=1e6).is_limit
    assert data_reading(RUN, 4.0, storage_bytes_per_second=1e6).share == pytest.approx(4.194, abs=1e-3)
    assert not data_reading(RUN, 4.0, storage_bytes_per_second=1e7).is_limit


def test_drives_by_kind():
    """A disk gives 62 MB/s in reads of 1 MiB, of which it seeks for 10 of 17 ms, and 150 in order."""
    assert drives(0.73e6, "hdd") == 1
    assert drives(61e6, "hdd") == 1
    assert drives(63e6, "hdd") == 2
    assert drives(149e6, "hdd", read_bytes=1e12) == 1
    assert drives(61e6, "nvme") == 1
    assert drives(6.1e9, "nvme", read_bytes=1e12) == 3


def test_single_windows_at_random_need_many_disks():
    """8 kB each: 0.8 MB/s of one disk. Blocks of a MiB are what the order of samples is there for."""
    assert DRIVES["hdd"].rate(2 * 4096) == pytest.approx(0.81e6, rel=0.01)
    assert drives(17e6, "hdd", read_bytes=2 * 4096) == 21
    assert drives(17e6, "hdd") == 1


def test_text_that_is_tokenised_while_it_is_read():
    assert text_bytes_per_second(183_000) == pytest.approx(0.73e6, rel=0.01)


@pytest.mark.parametrize(("step", "storage"), [(0, 0), (-1, 0), (math.nan, 0), (1, -5)])
def test_impossible_times_are_refused(step, storage):
    with pytest.raises(ConfigError, match="a step takes time"):
        data_reading(RUN, step, storage)
