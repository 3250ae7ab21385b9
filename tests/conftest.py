"""What every test may use."""

import os
from pathlib import Path

import pytest

# One thread per process: forked ranks share two cores, and results stay the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real crawl files and text with ground truth; set INGOT_TEST_DATA to their folder."""
    folder = os.environ.get("INGOT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real data: set INGOT_TEST_DATA to its folder")
    return Path(folder)
