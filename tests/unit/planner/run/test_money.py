"""Hours, storage, egress, and what checkpoints take."""

import pytest

from ingot.planner.request.presets import load_model
from ingot.planner.run.checkpoints import (
    SAVED_STATE_AND_WEIGHTS_BYTES,
    SAVED_STATE_BYTES,
    blocking_stall,
    copy_stall,
    kept_bytes,
)
from ingot.planner.run.money import device_hours, device_usd, egress_usd, storage_usd
from ingot.theory.memory import checkpoint_bytes
from ingot.theory.params import count_parameters

TERABYTE = 1e12


def test_llama2_70b_at_published_hours():
    """Touvron et al. 2023 (Llama 2), table 2: 1,720,320 A100 hours."""
    days = 1_720_320 / 24 / 2048
    assert device_hours(2048, days) == pytest.approx(1_720_320)
    assert device_usd(2048, days, 1.5).value == pytest.approx(2.58e6, rel=1e-3)


def test_a_month_of_storage_and_a_way_out():
    month = 365.25 / 12
    assert storage_usd(50 * TERABYTE, month).value == pytest.approx(1150)
    assert storage_usd(50 * TERABYTE, 2 * month, 0.01).value == pytest.approx(1000)
    assert egress_usd(TERABYTE).value == pytest.approx(90)
    assert "1,000 GB x $0.05 = $50.00" in egress_usd(TERABYTE, 0.05).formula


def test_ingot_saves_masters_and_moments():
    arch = load_model("llama3-8b").arch
    assert checkpoint_bytes(arch, "bf16").value == SAVED_STATE_BYTES * count_parameters(arch)


@pytest.mark.parametrize(("parameters", "size"), [(176e9, 2.3e12), (340e9, 12.9 * 340e9), (15e9, 13.08 * 15e9)])
def test_measured_checkpoints_lie_between_the_two_kinds(parameters, size):
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
