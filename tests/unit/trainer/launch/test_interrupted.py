"""Ctrl-C and progress of the commands that read and move checkpoints."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.checkpoints import model_settings, write_checkpoint
from tests.expect import RecordedMeter

from ingot.cli.main import main
from ingot.cli.progress import ByteBar
from ingot.cli.terminal import Terminal
from ingot.schema.checkpoint import FileEntry, file_of
from ingot.storage import sha256_bytes, write_atomic
from ingot.stores.local import LocalStore
from ingot.trainer.checkpoint import folders
from ingot.trainer.launch import garbage
from ingot.trainer.launch.inspect import inspect_checkpoints
from ingot.trainer.launch.stored import fetch_checkpoint, push_checkpoint

from .conftest import RUN_FILE
from .test_garbage import litter

SIZE = 64 << 10
# A safetensors file without tensors, whose header is padded.
FILE = (SIZE - 8).to_bytes(8, "little") + b"{}".ljust(SIZE - 8)
FILES = {file_of(rank): FileEntry(bytes=SIZE, sha256=sha256_bytes(FILE)) for rank in range(4)}


@pytest.fixture
def run(folder, tmp_path):
    """Two checkpoints of four files on both tiers."""
    set_rate(folder, tmp_path, 0)
    for step in (10, 20):
        for name in FILES:
            write_atomic(folder.checkpoint(step) / name, FILE)
        write_checkpoint(folder, step, model_settings(folder), world=4, files=FILES)
        write_atomic(folder.checkpoint(step) / file_of(0), FILE)
        push_checkpoint(folder.root, step)
    return folder


def set_rate(folder, tmp_path, bytes_per_second: int) -> None:
    store = f'[checkpoint.remote]\nurl = "file://{tmp_path}/store"\nbytes_per_second = {bytes_per_second}\n'
    (tmp_path / "store").mkdir(exist_ok=True)
    write_atomic(folder.config, RUN_FILE + store)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_real_ctrl_c_during_a_fetch_from_a_slow_store(run, tmp_path):
    set_rate(run, tmp_path, 1)  # a byte per second: the fetch would take days
    before, stored = content(run.checkpoints), content(tmp_path / "store/checkpoints")
    fetch = subprocess.Popen(
        [sys.executable, "-m", "ingot.cli.main", "ckpt", "fetch", str(run.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A job started with & in a script ignores Ctrl-C, and so would its children; a user's terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        unfinished = run.checkpoints / ".saving-step-00000020.fetched"
        until = time.monotonic() + 60
        while not any(unfinished.glob("*")) and time.monotonic() < until and fetch.poll() is None:
            time.sleep(0.01)
        assert unfinished.is_dir(), fetch.communicate()[0] if fetch.poll() is not None else ""
        os.kill(fetch.pid, signal.SIGINT)
        output, _ = fetch.communicate(timeout=60)
    finally:
        fetch.kill()
    assert fetch.returncode == 130 and "interrupted" in output, output
    assert content(run.checkpoints) == before and content(tmp_path / "store/checkpoints") == stored
    assert not unfinished.exists()
    assert inspect_checkpoints(run.root, hash_files=True).exit_code == 0
    set_rate(run, tmp_path, 0)
    assert fetch_checkpoint(run.root).step == 20  # and nothing holds the run any more


def test_ctrl_c_between_the_renames_gives_the_old_checkpoint_its_name_back(run, monkeypatch):
    before, rename = content(run.checkpoints), Path.rename

    def interrupted(path, target):
        if path.name.endswith(".fetched"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_checkpoint(run.root)
    assert content(run.checkpoints) == before
    assert folders.remove_leftovers(run) == []


class CtrlC:
    """Presses Ctrl-C just before the call number `at` of the functions that it replaces, in whichever thread."""

    def __init__(self, monkeypatch, *functions):
        self.calls, self.at, self._lock = 0, 0, threading.Lock()
        for owner, name in functions:
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))
        # A job started with & in a script ignores Ctrl-C; a user's terminal does not.
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def _watched(self, function):
        def call(*arguments, **options):
            with self._lock:
                # Without the mark that the lease is free, the next command would wait: this process lives on.
                counts = not any("lease" in str(one) for one in arguments)
                self.calls += counts
                pressed = counts and self.calls == self.at
            if pressed:
                signal.raise_signal(signal.SIGINT)
            return function(*arguments, **options)

        return call

    def each_call_of(self, *command):
        """Give `command`, and press Ctrl-C one call later each time; yield after each that was interrupted. The last
        one ends without."""
        self.at = 1
        while True:
            self.calls = 0
            code = main(list(map(str, command)))
            if self.calls < self.at:
                assert code == 0
                return
            assert code == 130
            yield
            self.at += 1

    def end(self):
        signal.signal(signal.SIGINT, self._before)


@pytest.fixture
def ctrl_c(monkeypatch):
    made = []

    def make(*functions):
        made.append(CtrlC(monkeypatch, *functions))
        return made[0]

    yield make
    for one in made:
        one.end()


def test_ctrl_c_during_a_push_stores_no_part_of_a_checkpoint(run, tmp_path, ctrl_c, capsys):
    """At each write to the store: samples, four files, the run file, and the manifest, which is the last one."""
    store, local = tmp_path / "store", content(run.checkpoints)
    shutil.rmtree(store / "checkpoints/step-00000020")
    stored = content(store / "checkpoints")
    keys = ctrl_c((LocalStore, "write"))
    for _ in keys.each_call_of("ckpt", "push", run.root):
        assert "interrupted" in capsys.readouterr().err
        found = content(store / "checkpoints")
        assert not any(name.startswith("step-00000020") and name.endswith("manifest.json") for name in found)
        assert stored.items() <= found.items() and content(run.checkpoints) == local
    assert keys.calls == 7
    assert fetch_checkpoint(run.root).step == 20
    assert inspect_checkpoints(run.root, hash_files=True).exit_code == 0


def test_ctrl_c_while_it_verifies_changes_nothing(run, ctrl_c, capsys):
    before, keys = content(run.root), ctrl_c((ByteBar, "add"))
    for _ in keys.each_call_of("ckpt", "verify", run.root):
        assert "interrupted" in capsys.readouterr().err
        assert content(run.root) == before
    assert keys.calls == 8  # two checkpoints of four files


def test_ctrl_c_while_it_collects_garbage_removes_nothing_else(run, tmp_path, ctrl_c, capsys):
    store = tmp_path / "store"

    def kept():
        found = {**content(run.root), **{f"store/{name}": data for name, data in content(store).items()}}
        return {name: data for name, data in found.items() if "lease" not in name and "lock" not in name}

    sound, keys = kept(), ctrl_c((garbage, "remove_leftovers"), (Path, "unlink"), (LocalStore, "remove"))
    litter(run, store)
    for _ in keys.each_call_of("ckpt", "gc", run.root):
        assert "interrupted" in capsys.readouterr().err
        assert sound.items() <= kept().items()
        litter(run, store)
    assert keys.calls >= 7 and kept() == sound


def test_every_byte_is_counted_once(run, tmp_path):
    meters = [RecordedMeter() for _ in range(3)]
    inspect_checkpoints(run.root, hash_files=True, meter=meters[0])
    fetch_checkpoint(run.root, meter=meters[1])
    (tmp_path / "store/checkpoints/step-00000020/manifest.json").unlink()
    push_checkpoint(run.root, meter=meters[2])
    assert [meter.parts for meter in meters] == [
        [["verifying", 8 * SIZE, 8 * SIZE]],
        [["fetching", 4 * SIZE, 4 * SIZE]],
        # and the 20 samples of the ledger
        [["verifying", 4 * SIZE, 4 * SIZE], ["uploading", 4 * SIZE + 160, 4 * SIZE + 160]],
    ]


def test_a_bar_shows_bytes_and_rate_on_a_terminal_alone(capsys):
    now, terminal = [0.0], Terminal()
    terminal.interactive = True
    bar = ByteBar(terminal, lambda: now[0])
    bar.add(7)  # nothing has begun: nothing is drawn
    bar.begin("fetching", 4096)
    for at, size in ((1.0, 1024), (1.01, 1024), (2.0, 1024)):
        now[0] = at
        bar.add(size)
    shown = capsys.readouterr().out.split("\r\x1b[K")[1:]
    assert [line.partition("] ")[2] for line in shown] == [
        " 25% fetching  1.0 KiB of 4.0 KiB  1.0 KiB/s",
        " 75% fetching  3.0 KiB of 4.0 KiB  1.5 KiB/s",
    ]
    terminal.interactive = False
    now[0] = 9.0
    bar.add(1)
    assert capsys.readouterr().out == ""


def test_nothing_is_drawn_into_a_pipe(run, capsys):
    assert main(["ckpt", "verify", str(run.root)]) == 0
    assert "\r" not in capsys.readouterr().out
