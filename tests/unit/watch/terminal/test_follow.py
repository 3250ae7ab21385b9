"""`ingot watch` on pseudo-terminals: what a real terminal shows after keys, new steps, another size and the end."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from tests.own_time import own_time
from tests.unit.watch.terminal.test_views import START, write_run

pyte = pytest.importorskip("pyte", reason="needs pyte: pip install -e '.[test]'")

SECONDS = 60.0  # at most, for one thing to be shown

# Starts a program as a shell with job control does: on Ctrl-Z it takes the terminal back, on Enter it continues it.
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if not (child := os.fork()):
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
while os.WIFSTOPPED(status := os.waitpid(child, os.WUNTRACED)[1]):
    os.tcsetpgrp(0, os.getpid())
    print("suspended", flush=True)
    input()
    os.tcsetpgrp(0, child)
    os.kill(child, signal.SIGCONT)
sys.exit(os.waitstatus_to_exitcode(status))
"""


class Session:
    """`ingot watch` on a pseudo-terminal, and the screen as a terminal shows it."""

    def __init__(self, *arguments, columns=80, rows=24, shell="", **environment):
        self.screen = pyte.Screen(columns, rows)
        self._stream, self.bytes = pyte.ByteStream(self.screen), b""
        self._main, self.terminal = pty.openpty()
        self.before = termios.tcgetattr(self.terminal)
        self.resize(columns, rows)
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "LC_ALL", "COLUMNS")}
        self.process = subprocess.Popen(
            [sys.executable, *(("-c", shell) if shell else ()), "-m", "ingot", "watch", *map(str, arguments)],
            stdin=self.terminal, stdout=self.terminal, stderr=self.terminal, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C and the size reach it
            env=env | {"TERM": "screen-256color", "LC_ALL": "C.UTF-8"} | environment,
        )  # fmt: skip

    def resize(self, columns, rows):
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def press(self, keys):
        os.write(self._main, keys)

    def text(self):
        return "\n".join(self.screen.display)

    def wait(self, *words, gone=()):
        """Wait until the screen has all words, and none of `gone`."""
        ends = time.monotonic() + SECONDS
        while not (all(word in self.text() for word in words) and not any(word in self.text() for word in gone)):
            assert time.monotonic() < ends, f"{words} are not on the screen:\n{self.text()}"
            self._read(0.5)

    def _read(self, seconds):
        if select.select([self._main], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                found = os.read(self._main, 1 << 16)
                self.bytes += found
                self._stream.feed(found)

    def end(self):
        """Wait for the end of the program. Return its exit code."""
        ends = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < ends, self.text()
            self._read(0.1)
        while select.select([self._main], [], [], 0)[0]:
            self._read(0)
        self.expect_terminal_as_before()
        return self.process.returncode

    def expect_terminal_as_before(self):
        """Check lines, echo and signals, and that the first screen is shown."""
        assert termios.tcgetattr(self.terminal) == self.before
        assert self.bytes.count(b"\x1b[?1049h") == self.bytes.count(b"\x1b[?1049l")

    def send(self, number):
        """Send a signal to the program that has the terminal."""
        os.killpg(os.tcgetpgrp(self._main), number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._main)
        os.close(self.terminal)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return write_run(tmp_path / "run", ended=False)


def test_a_session_with_keys_new_steps_and_another_size(folder):
    with Session(folder.root) as session:
        session.wait("demo", "1 run", "Loss, nats per token", "q quit")
        assert b"\x1b[?1049h" in session.bytes  # the alternate screen
        session.press(b"2")
        session.wait("2 loss", "training loss")
        session.press(b"\x1bOC")  # right, as this terminal sends it
        session.wait("3 gradient", "Gradient norm")
        session.resize(200, 60)
        session.wait("+/- zoom", "Learning rate")
        assert len(session.screen.display[-1].rstrip()) > 100
        with folder.events.open("a") as log:
            step = {"kind": "step", "time": START + 90, "step": 61, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3}
            log.write(json.dumps(step) + "\n")
        session.wait("step 61 of 100")
        session.press(b"q")
        assert session.end() == 0 and b"\x1b[?1049l" in session.bytes.rpartition(b"\x1b[?1049h")[2]  # the first screen


def test_ctrl_c_leaves_a_terminal_without_colors_as_it_was(folder):
    lock = subprocess.Popen(  # a trainer that is killed without a word
        [sys.executable, "-c", "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
         "print('locked', flush=True); time.sleep(600)", folder.lock], stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert lock.stdout and lock.stdout.readline() == b"locked\n"
        with Session(folder.root, NO_COLOR="1", LC_ALL="C") as session:
            session.wait("demo  running", "^", "*")
            lock.kill()
            session.wait("demo  interrupted", "no sign of life since")
            session.press(b"\x03")
            assert session.end() == 0 and b"\x1b[?1049l" in session.bytes and session.bytes.isascii()
            for parameters in session.bytes.split(b"\x1b[")[1:]:
                codes = parameters.partition(b"m")[0]
                if codes.replace(b";", b"").isdigit() and parameters[len(codes) : len(codes) + 1] == b"m":
                    assert not {code for code in codes.split(b";") if code[:1] in (b"3", b"4", b"9")} - {b"4"}, codes
    finally:
        lock.kill()
        lock.wait()


def test_a_suspended_or_terminated_program_leaves_the_terminal_as_it_was(folder):
    with Session(folder.root, shell=SHELL) as session:
        session.wait("demo", "q quit")
        assert termios.tcgetattr(session.terminal) != session.before
        session.press(b"\x1a")  # Ctrl-Z
        session.wait("suspended")
        session.expect_terminal_as_before()
        session.press(b"\r")
        session.wait("q quit", gone=("suspended",))
        session.press(b"2")
        session.wait("2 loss", "training loss")
        session.send(signal.SIGTERM)
        assert session.end() == 128 + signal.SIGTERM


def test_a_folder_that_vanishes_ends_it(folder):
    with Session(folder.root) as session:
        session.wait("demo", "1 run")
        folder.root.rename(folder.root.with_name("moved"))
        assert session.end() == 3
        session.wait("E-WATCH-GONE", gone=("1 run",))  # on the screen from before


def test_a_terminal_that_cannot_be_drawn_on_gets_text(folder):
    with Session(folder.root, TERM="dumb") as session:
        assert session.end() == 0 and b"\x1b" not in session.bytes and b"Loss, nats per token" in session.bytes


def test_plain_screens_for_files_until_the_run_is_finished(folder, capsys):
    from ingot.cli.main import main

    with folder.events.open("a") as log:
        log.write(
            json.dumps({"kind": "finished", "time": START + 99, "step": 60, "tokens": 61440, "seconds": 99.0}) + "\n"
        )
    assert main(["watch", str(folder.root), "--every", "60"]) == 0
    out = capsys.readouterr().out
    assert "demo  finished  step 60 of 100" in out and "\x1b" not in out and "q quit" not in out
    assert main(["watch", str(folder.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["step"] == 60
    assert main(["watch", str(folder.root.parent)]) == 2


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ({"kind": "fault", "time": START + 99, "rank": 1, "cause": "was killed", "step": 60}, "failed"),
        ({"kind": "stopped", "time": START + 99, "step": 60, "reason": "signal", "seconds": 9.0}, "stopped"),
        ({"kind": "progress"}, "interrupted"),
    ],
)
def test_plain_screens_end_with_a_run_that_is_not_finished(folder, capsys, monkeypatch, last, state):
    from ingot.cli.main import main
    from ingot.watch.terminal import follow

    with folder.lock.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def sleep(seconds):
            assert not lock.closed, f"it goes on, and the run is {state}"
            with folder.events.open("a") as log:
                log.write(json.dumps(last) + "\n")
            lock.close()

        own_time(monkeypatch, follow, sleep=sleep)
        assert main(["watch", str(folder.root), "--every", "60"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("demo  ")]
    assert shown == [f"demo  {one}  step 60 of 100 (60%)" for one in ("running", state)]


def test_ctrl_c_ends_plain_screens(folder, capsys, monkeypatch):
    from ingot.cli.main import main
    from ingot.watch.terminal import follow

    def interrupted(seconds):
        raise KeyboardInterrupt

    own_time(monkeypatch, follow, sleep=interrupted)
    with folder.lock.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["watch", str(folder.root), "--every", "60"]) == 0
    assert capsys.readouterr().err == ""
