"""Bytes that loaders read, and whether storage gives them."""

import math
from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.planner.request.presets import load_model
from ingot.planner.run.storage import (
    DRIVES,
    SAVED_STATE_AND_WEIGHTS_BYTES,
    SAVED_STATE_BYTES,
    blocking_stall,
    copy_stall,
    data_reading,
    drives,
    kept_bytes,
    text_bytes_per_second,
    token_bytes,
)
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.memory import checkpoint_bytes
from ingot.theory.params import count_parameters

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


def test_text_that_is_tokenized_while_it_is_read():
    assert text_bytes_per_second(183_000) == pytest.approx(0.73e6, rel=0.01)


@pytest.mark.parametrize(("step", "storage"), [(0, 0), (-1, 0), (math.nan, 0), (1, -5)])
def test_impossible_times_are_refused(step, storage):
    with refused("E-STORAGE-VALUE", storage_bytes_per_second=storage):
        data_reading(RUN, step, storage)


def test_ingot_saves_masters_and_moments():
    arch = load_model("llama3-8b").arch
    assert checkpoint_bytes(arch, "bf16").value == SAVED_STATE_BYTES * count_parameters(arch)


@pytest.mark.parametrize(("parameters", "size"), [(176e9, 2.3e12), (340e9, 12.9 * 340e9), (15e9, 13.08 * 15e9)])
def test_measured_checkpoints_are_between_the_two_kinds(parameters, size):
    assert SAVED_STATE_BYTES * parameters < size < SAVED_STATE_AND_WEIGHTS_BYTES * parameters


def test_bloom_wrote_in_forty_seconds():
    """2.3 TB from 48 nodes, 1.2 GB/s each."""
    assert blocking_stall(2.3e12, 48, 1.2e9).value == pytest.approx(40, rel=0.01)


def test_the_storage_can_be_the_limit():
    assert blocking_stall(2e12, 1000, 1e9, storage_write=1e11).value == pytest.approx(20)
    assert "the storage's" in blocking_stall(2e12, 1000, 1e9, storage_write=1e11).formula
    assert blocking_stall(2e12, 10, 1e9, storage_write=1e11).value == pytest.approx(200)


def test_a_copy_to_the_host_is_made_by_all_devices_at_once():
    assert copy_stall(1e12, 100, 25e9).value == pytest.approx(0.4)


@pytest.mark.parametrize(("keep", "count"), [(0, 384), (3, 3), (1000, 384)])
def test_retention(keep, count):
    sixteen_days = 16 * 86_400
    assert kept_bytes(1.0, 3600, sixteen_days, keep) == count
    assert kept_bytes(1.0, 3600, 0, keep) == 0
