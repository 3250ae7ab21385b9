"""Ranks that all cases of a module share."""

import pytest

from .ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as ranks:
        yield ranks
