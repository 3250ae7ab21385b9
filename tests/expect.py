"""Expectations that many tests share."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ingot.errors import IngotError


@contextmanager
def refused(code: str, **facts: object) -> Iterator[pytest.ExceptionInfo[IngotError]]:
    """Expect an IngotError with this code, and with these among its facts."""
    with pytest.raises(IngotError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    assert {name: caught.value.facts.get(name) for name in facts} == facts
