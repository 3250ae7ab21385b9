"""docs/public_bugs.md names tests, faults and rows that exist."""

import re
from pathlib import Path

from tests.board import ALL
from tests.mutants.parallel import MUTANTS
from tests.proof.planting import FAULTS

from .test_numerics import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public_bugs.md").read_text()


def test_every_test_of_the_page_exists_and_every_test_is_on_the_page():
    named = set(re.findall(r"`((?:tests/\S+/)?test_\w+\.py)::(test_\w+)`", PAGE))
    for file, test in named:
        path = ROOT / file if "/" in file else Path(__file__).with_name(file)
        assert f"def {test}(" in path.read_text(), (file, test)
    ours = {
        (path.name, test)
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name != Path(__file__).name
        for test in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert {test for _, test in ours} - {test for _, test in named} == {
        "test_copies_without_the_sum_drift_apart_and_with_it_stay_equal"  # of a fault that the page names
    }


def test_every_planted_fault_and_row_of_the_page_exists():
    planted = {name for _, _, name in KINDS.values()}
    assert planted <= FAULTS.keys() | {mutant.name for mutant in MUTANTS}
    assert all(f"`{name}`" in PAGE for name in planted)
    assert set(re.findall(r"\bRS\d\d\b", PAGE)) <= {row.id for row in ALL}
