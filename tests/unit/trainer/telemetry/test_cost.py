from types import SimpleNamespace

from ingot.events import EventLog
from ingot.schema import events
from ingot.trainer.telemetry import usage
from ingot.trainer.telemetry.usage import CostMeter


def test_an_unknown_price_costs_nothing_known(tmp_path):
    assert CostMeter(0.0, 8, tmp_path / "events.jsonl").usd() is None


def test_counts_time_devices_and_earlier_attempts(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for usd in (1.0, 2.5, None):
        log.write(events.PROGRESS, cost_usd=usd)
    clock = iter((100.0, 100.75))
    monkeypatch.setattr(usage, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert CostMeter(3600.0, 2, path).usd() == 2.5 + 2 * 0.75
