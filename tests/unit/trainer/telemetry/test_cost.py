import time

import pytest

from ingot.events import EventLog
from ingot.schema import events
from ingot.trainer.telemetry.usage import CostMeter


def test_an_unknown_price_costs_nothing_known(tmp_path):
    assert CostMeter(0.0, 8, tmp_path / "events.jsonl").usd() is None


def test_counts_time_devices_and_earlier_attempts(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for usd in (1.0, 2.5, None):
        log.write(events.PROGRESS, cost_usd=usd)
    meter = CostMeter(3600.0, 2, path)
    time.sleep(0.05)
    spent = meter.usd()
    assert spent is not None and spent == pytest.approx(2.5 + 2 * 0.05, abs=0.5)
    assert spent > 2.6
