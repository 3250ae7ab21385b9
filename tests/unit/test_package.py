"""The package itself: instant, and with a planner."""

import subprocess
import sys

import pytest

import ingot


def test_importing_ingot_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import ingot; "
        "print(sorted(m for m in set(sys.modules) - before if m != 'ingot'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_plan_is_there_when_it_is_asked_for():
    from ingot import plan

    assert ingot.plan is plan and callable(plan)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = ingot.plam  # type: ignore[attr-defined]
