"""Programs that are forked from the tests' process behave like those that are started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests import forked

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
seen = {
    "argv": sys.argv, "environ": dict(os.environ), "path": sys.path, "folder": os.getcwd(), "stdin": sys.stdin.read(),
    "shown": [Path("/proc/self", name).read_text().split(chr(0)) for name in ("cmdline", "environ")],
    "handlers": [str(signal.getsignal(number)) for number in range(1, signal.NSIG)],
    "leader": os.getsid(0) == os.getpid(), "main": sys.modules["__main__"].__name__,
    "open": [fd for fd in range(99) if Path(f"/proc/self/fd/{fd}").exists()],
    "hooks": [sys.excepthook is sys.__excepthook__, "pytest" in str(sys.meta_path)],
    "forked": "tests.forked" in sys.modules, "left": "of_a_test" in sys.modules,
}
print(json.dumps(seen), flush=True)
print("to the other stream", file=sys.stderr)
how = sys.argv[1]
if how == "raise":
    raise ValueError("what is wrong")
if how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(int(how) if how.isdigit() else how)
"""
ENDS = {"0": 0, "7": 7, "a text": 1, "raise": 1, "interrupt": -signal.SIGINT}


@pytest.fixture
def program(tmp_path) -> Path:
    if not forked.can_be_described():
        pytest.skip("the kernel does not let a process change how it is shown")
    (tmp_path / "seen.py").write_text(PROGRAM)
    (tmp_path / "other").mkdir()
    return tmp_path


def run(folder: Path, *words: str, **variables: str) -> tuple[int, dict, list[str]]:
    """Run a program. Returns its exit code, what it saw, and its errors without the lines of a traceback."""
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | variables,
        cwd=folder,
        input="in",
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    lines = done.stderr.splitlines()
    return done.returncode, json.loads(done.stdout), [line for line in lines if not line.startswith(" ")]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("words", [["seen.py"], ["-P", "seen.py"], ["-m", "seen"], ["-u", "-m", "seen"]], ids=" ".join)
def test_a_program_sees_the_same(program, words, end, monkeypatch):
    variables = {"OTHER": "ä\nb", "PYTHONPATH": str(program / "other"), "TZ": "Asia/Tokyo"}
    started = run(program, *words, end, **variables)
    plugin = ModuleType("of_a_test")
    plugin.__file__ = str(program / "of_a_test.py")
    monkeypatch.setitem(sys.modules, "of_a_test", plugin)
    monkeypatch.setattr(sys, "excepthook", print)
    monkeypatch.setenv("REMOVED", "1")
    monkeypatch.delenv("REMOVED")
    signal.signal(signal.SIGTERM, lambda *_: None)
    with forked.forking():
        found = run(program, *words, end, **variables)
    assert not started[1].pop("forked") and found[1].pop("forked")
    assert {name: value for name, value in found[1].items() if value != started[1][name]} == {}
    assert (found[0], found[2]) == (started[0], started[2]) and started[0] == ENDS[end]


@pytest.mark.parametrize("variable", ["PYTHONPROFILEIMPORTTIME", "LD_DEBUG", "OMP_NUM_THREADS"])
def test_a_variable_that_is_read_at_the_start_needs_one(program, variable):
    with forked.forking():
        assert not run(program, "seen.py", "0", **{variable: "3"})[1]["forked"]
        assert run(program, "seen.py", "0")[1]["forked"]
    assert not run(program, "seen.py", "0")[1]["forked"]
