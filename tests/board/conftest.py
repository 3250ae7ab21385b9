"""One bench for all tests of a module."""

import pytest

from . import killpoints
from .bench import Bench


@pytest.fixture(scope="module")
def bench():
    """Return a bench; skip where the library of disk faults cannot be built."""
    if reason := killpoints.missing():
        pytest.skip(reason)
    with Bench() as bench:
        yield bench
