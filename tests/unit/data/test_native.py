"""Tests of the compiled core skip where it was not built. Where it can be built, that must not go unseen."""

import os
import shutil

import pytest

from ingot.data.native import MODULES, compiled


@pytest.mark.skipif(os.environ.get("INGOT_NATIVE") == "0", reason="switched off by INGOT_NATIVE=0")
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
@pytest.mark.parametrize("name", MODULES)
def test_what_can_be_compiled_was_compiled(name):
    assert compiled(name) is not None, "install again, or: make native"


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("INGOT_NATIVE", "0")
    assert [compiled(name) for name in MODULES] == [None] * len(MODULES)
