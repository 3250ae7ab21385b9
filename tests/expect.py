"""Expectations that many tests share."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest

from ingot.errors import IngotError
from ingot.trainer.checkpoint.meter import Meter


@contextmanager
def refused(code: str, **facts: object) -> Iterator[pytest.ExceptionInfo[IngotError]]:
    """Expect an IngotError with this code, and with these among its facts."""
    with pytest.raises(IngotError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    assert {name: caught.value.facts.get(name) for name in facts} == facts


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Turn a KeyboardInterrupt, with which pytest would end, into a failure of the test."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise AssertionError(f"KeyboardInterrupt: {interrupt}") from None


def reported(output: str, code: str, **facts: object) -> dict:
    """Expect `output` of a verb with --json to be an error with this code, and with these among its facts."""
    error = json.loads(output)
    assert error["error"] == code, error
    assert {name: error["facts"].get(name) for name in facts} == facts
    return error


def named(texts: Iterable[str], *words: object) -> bool:
    """Return whether the texts of a fact contain each of `words`: whole keys, values and names, and whole numbers."""
    text = "\n".join(texts)

    def contains(word: str) -> bool:
        before, after = (r"(?<![\w.-])", r"(?!\w|\.\d)") if word[:1].isdigit() else (r"(?<!\w)", r"(?!\w)")
        return bool(re.search(before + re.escape(word) + after, text))

    return all(contains(str(word)) for word in words)


def calls_of(function: Callable[[], object]) -> int:
    """Count the Python functions that `function` calls: what it costs, on any machine and under any load."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def settled(read: Callable[[], int], most: float, seconds: float = 20.0) -> int:
    """Return read() once it is at most `most`, else after `seconds`.

    For memory in use: Gloo's threads release a collective's tensors some time after the wait for it has returned.
    """
    deadline = time.monotonic() + seconds
    while (found := read()) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


class RecordedMeter(Meter):
    """Records the bytes that a command counts: [what, total, done] of each part."""

    def __init__(self):
        self.parts: list[list] = []

    def begin(self, what: str, total: int) -> None:
        self.parts.append([what, total, 0])

    def add(self, size: int) -> None:
        self.parts[-1][2] += size

    def require_whole(self, *expected: str) -> None:
        """Fail unless the parts are `expected`, and each counted all its bytes once."""
        assert [what for what, _, _ in self.parts] == list(expected)
        assert all(total == done > 0 for _, total, done in self.parts), self.parts
