from types import SimpleNamespace

import pytest
import torch
from tests.own_time import own_time

from ingot.trainer.mesh import step_times
from ingot.trainer.mesh.step_times import StepTimes


def test_the_clock_of_a_phase_stops_while_a_rank_waits(monkeypatch):
    now, waits = [100.0], SimpleNamespace(seconds=7.0)
    own_time(monkeypatch, step_times, monotonic=lambda: now[0])
    times = StepTimes(torch.device("cpu"), waits)

    def spend(phase, seconds, waited):
        with times.phase(phase):
            now[0] += seconds
            waits.seconds += waited

    spend("forward", 1.0, 0.25)
    spend("backward", 3.0, 0.5)
    spend("forward", 2.0, 0.0)
    now[0] += 10.0  # between two phases
    assert times.take() == pytest.approx({"forward": 2.75, "backward": 2.5})
    assert times.take() == {}
