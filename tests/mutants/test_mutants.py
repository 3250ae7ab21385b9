"""The mutants fit the source and the tests of today, and the runner sees what it is for. Cheap: no mutant runs here."""

import ast
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import ingot

from . import ALL, AREAS
from .__main__ import BEGIN, END, line_of, read_lines, table_of, write
from .mutant import DoesNotApplyError, Mutant, changed_text
from .runner import MutantRunner, Played, Result, judge

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ingot.__file__).parent


def test_every_mutant_changes_its_file_into_another_program():
    assert [problem for mutant in ALL if (problem := problem_of(mutant))] == []


def problem_of(mutant: Mutant) -> str:
    try:
        changed = statements_of(changed_text(PACKAGE, mutant))
    except (DoesNotApplyError, SyntaxError) as error:
        return f"{mutant.name}: {error}"
    return f"{mutant.name} changes only comments or the layout" * is_same_program(changed, statements_in(mutant.file))


Statements = list[tuple[str, ast.stmt]]


def is_same_program(one: Statements, other: Statements) -> bool:
    """Compare two files by their trees from the first to the last statement whose text differs: the rest is equal, and
    a dump takes ten times as long as a parse."""
    same = (text == theirs for (text, _), (theirs, _) in zip(one, other, strict=False))
    first = next((number for number, equal in enumerate(same) if not equal), min(len(one), len(other)))
    one, other = one[first:], other[first:]
    while one and other and one[-1][0] == other[-1][0]:
        one, other = one[:-1], other[:-1]
    return [ast.dump(tree) for _, tree in one] == [ast.dump(tree) for _, tree in other]


def statements_of(text: str) -> Statements:
    """Return the statements of a file with their own lines, decorators among them."""
    lines = text.splitlines()
    found = []
    for tree in ast.parse(text).body:
        first = min([tree.lineno, *(one.lineno for one in getattr(tree, "decorator_list", ()))])
        found.append(("\n".join(lines[first - 1 : tree.end_lineno]), tree))
    return found


@cache
def statements_in(file: str) -> Statements:
    return statements_of((PACKAGE / file).read_text(encoding="utf-8"))


def test_a_mutant_that_changes_only_comments_or_the_layout_is_no_other_program():
    sound = "a = 1\n\n\n@cache\ndef f(x):  # one\n    return g(x, 1)\n\n\nb = 2\n"
    for same in ("g(x,  1)", "g(\n        x, 1\n    )", "g(x, 1)  # two"):
        assert is_same_program(statements_of(sound.replace("g(x, 1)", same)), statements_of(sound))
    for old, new in (
        ("g(x, 1)", "g(x, 2)"),
        ("@cache\n", ""),
        ("a = 1\n", ""),
        ("b = 2\n", "b = 2\nc = 3\n"),
        ("a", "b"),
    ):
        assert not is_same_program(statements_of(sound.replace(old, new)), statements_of(sound))


def test_names_are_unique():
    assert [name for name, count in Counter(mutant.name for mutant in ALL).items() if count > 1] == []


def test_every_guard_of_a_run_is_switched_off_before_a_row_of_the_board():
    found = {mutant.name.removeprefix("switched-off-"): mutant.tests for mutant in AREAS["guards_off"]}
    assert found.keys() >= {"watchdog", "ledger-check", "fence", "fsync", "back-off"}
    assert all(test.startswith("tests/board/test_") for tests in found.values() for test in tests)


def test_the_tests_of_every_mutant_exist():
    missing = [(mutant.name, test) for mutant in ALL for test in mutant.tests or ("none",) if not exists(test)]
    assert missing == []


def exists(node: str) -> bool:
    file, _, name = node.partition("::")
    name = name.partition("[")[0]
    return (ROOT / file).is_file() and (not name or name in functions(ROOT / file))


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def mutant_of(before: str, after: str, *, name: str = "one", test: str = "test_double", survives: str = "") -> Mutant:
    tests = (f"tests/test_fake.py::{test}",)
    return Mutant(
        name=name, what="a slip", file="double.py", before=before, after=after, tests=tests, survives=survives
    )


@pytest.fixture
def fake_project(tmp_path):
    """A project of one function, with a test that calls it in a process of its own and a test that is always red."""
    (tmp_path / "src" / "fake").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-ra"\nmarkers = ["nightly"]\n')
    (tmp_path / "src" / "fake" / "__init__.py").write_text("")
    (tmp_path / "src" / "fake" / "double.py").write_text(
        "def double(x):\n    unused = 1\n    return 2 * x\n\n\nif __name__ == '__main__':\n    print(double(3))\n"
    )
    (tmp_path / "tests" / "test_fake.py").write_text(
        "import subprocess, sys\n\n\n"
        "def test_double():\n"
        "    command = [sys.executable, '-m', 'fake.double']\n"
        "    assert subprocess.run(command, capture_output=True, text=True).stdout == '6\\n'\n\n\n"
        "def test_red():\n    assert False\n"
    )
    return tmp_path


def test_the_runner_distinguishes_all_outcomes(fake_project, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of the time of a start
    mutants = [
        mutant_of("2 * x", "3 * x", name="seen"),
        mutant_of("unused = 1", "unused = 2", name="not seen"),
        mutant_of("7 * x", "8 * x", name="of an older source"),
        mutant_of("2 * x", "3 * x", name="red anyway", test="test_red"),
    ]
    lines = []
    before = sorted(fake_project.rglob("*"))
    results = MutantRunner(fake_project, "fake", jobs=2).run(mutants, lines.append)
    assert sorted(fake_project.rglob("*")) == before, "the tree is as it was"
    assert [(result.mutant.name, result.outcome) for result in results] == [
        ("seen", "killed"),
        ("not seen", "survived"),
        ("of an older source", "does not apply"),
        ("red anyway", "red without the change"),
    ]
    assert [result.is_surprise for result in results] == [False, True, True, True]
    assert results[0].detail == "tests/test_fake.py::test_double"
    assert results[3].detail == "tests/test_fake.py::test_red"
    assert lines[0] == "the tests of 1 files on the unchanged source, each once" and lines[1].startswith("1 passed in ")


def test_a_survivor_needs_a_reason_and_a_reason_needs_a_survivor():
    green, red = Played(0, "1 passed"), Played(1, "FAILED tests/test_fake.py::test_double[a b] - assert 9 == 6")
    plain, with_reason = mutant_of("2", "3"), mutant_of("2", "3", survives="both give the same bits")
    assert judge(plain, red) == Result(plain, "killed", "tests/test_fake.py::test_double[a b]", 0.0, "assert 9 == 6")
    assert [judge(plain, end).is_surprise for end in (green, red)] == [True, False]
    assert [judge(with_reason, end).is_surprise for end in (green, red)] == [False, True]


@pytest.mark.parametrize(
    "played",
    [
        Played(1, "E   NameError: name 'y' is not defined\nFAILED tests/test_fake.py::test_double - NameError: ..."),
        Played(1, "rank 0 of 2: Traceback\nImportError: cannot import name 'y'\nFAILED tests/a.py::test_a"),
        Played(2, "E   SyntaxError: invalid syntax\nERROR tests/test_fake.py"),
        Played(2, "ERROR tests/test_fake.py\n1 error during collection"),
        Played(4, "ERROR: not found: tests/test_fake.py::test_gone"),
        Played(5, "1 deselected"),
        Played(None, "", 300.0),
    ],
)
def test_a_fault_that_does_not_run_in_silence_is_invalid(played):
    result = judge(mutant_of("2", "3"), played)
    assert result.outcome == "invalid" and result.is_surprise and result.detail


def test_a_test_has_to_pass_without_the_change():
    text = (
        "PASSED tests/a.py::test_b[1]\nPASSED tests/a.py::test_bc\nFAILED tests/c.py::test_d - assert False\n1 skipped"
    )
    played = Played(1, text)
    for test in ("tests/a.py", "tests/a.py::test_b", "tests/a.py::test_b[1]", "tests/a.py::test_bc"):
        assert played.trouble_with(test) == ""
    assert played.trouble_with("tests/c.py") == "tests/c.py::test_d"
    assert played.trouble_with("tests/skipped.py") and played.trouble_with("tests/a.py::test_b[2]")
    for code in (None, 2, 4, 5):
        assert Played(code, text).trouble_with("tests/a.py")


def test_a_text_has_to_occur_exactly_once(fake_project):
    package = fake_project / "src" / "fake"
    assert "return 3 * x" in changed_text(package, mutant_of("2 * x", "3 * x"))
    for before, after in (("double", "triple"), ("7 * x", "8 * x"), ("2 * x", "2 * x")):
        with pytest.raises(DoesNotApplyError):
            changed_text(package, mutant_of(before, after))


def test_the_table_goes_between_the_markers(tmp_path):
    mutant = ALL[0]
    (page := tmp_path / "page.md").write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    write(page, table_of([Result(mutant, "killed", "tests/test_fake.py::test_double", 7.8)]))
    lines = page.read_text().splitlines()
    assert lines[:2] == ["above", BEGIN] and lines[-2:] == [END, "below"] and "old" not in lines
    assert lines[-3].endswith(f"| {mutant.name} | {mutant.what} | `test_fake.py::test_double` | 8 |")


def test_a_recorded_result_counts_until_its_mutant_changes(tmp_path):
    first, second = ALL[:2]
    lines = [
        line_of(Result(first, "survived", "", 1.0)),
        line_of(Result(first, "killed", "tests/test_fake.py::test_double", 7.8)),
    ]
    (file := tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_lines([first, second], [file]) == {first.name: Result(first, "killed", lines[1]["detail"], 7.8)}
    assert read_lines([replace(first, after=f"{first.after} "), second], [file]) == {}
