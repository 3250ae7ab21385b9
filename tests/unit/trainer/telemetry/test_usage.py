import subprocess
import sys

# A process of its own: the peak of this one already includes every other test.
SCRIPT = """
import torch
from ingot.trainer.telemetry.usage import peak_memory_bytes
before = peak_memory_bytes(torch.device("cpu"))
held = torch.ones(256 << 20, dtype=torch.uint8)
del held
print(before, peak_memory_bytes(torch.device("cpu")))
"""


def test_the_peak_stays_after_memory_is_freed():
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60).stdout
    before, after = map(int, out.split())
    assert 50 << 20 < before < 4 << 30
    assert after - before > 240 << 20
