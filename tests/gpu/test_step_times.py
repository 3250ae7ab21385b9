import time
from types import SimpleNamespace

import pytest
import torch

from ingot.trainer.mesh.step_times import StepTimes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_device_measures_its_own_phases():
    times = StepTimes(torch.device("cuda"), SimpleNamespace(seconds=0.0))
    with times.phase("forward"):
        torch.cuda._sleep(200_000_000)  # cycles of the device: a tenth of a second
    began = time.monotonic()
    assert times.take()["forward"] > 0.05
    assert time.monotonic() - began > 0.03  # the host had not waited before
