"""A drill works on a copy in a folder of its own: the run is only read, and its store is not used."""

import hashlib
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.drill.copied import RESULT, lock_of, open_copy, with_interval
from ingot.theory.rules import load_run
from ingot.trainer.resilience.lock import RunLock

OWN = """
[launch]
stop_after = "4h"
[evaluate]
every_steps = 10
"""
REMOTE = '\n[checkpoint.remote]\nurl = "s3://bucket/run"\n'


def hashes(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def test_the_run_is_only_read_and_its_places_are_not_used(run_file, tmp_path):
    run_file.write_text(run_file.read_text().replace("every_steps = 20", 'every_steps = 20\ndisks = ["/disk"]') + OWN)
    run_file.write_text(run_file.read_text() + REMOTE)
    before = hashes(tmp_path)
    copy, changes = open_copy(run_file, None)
    assert copy.root == tmp_path / "runs" / "tiny-drill"
    config = load_run(with_interval(copy, 60).run_file)
    assert {path: text for path, text in hashes(tmp_path).items() if path in before} == before
    assert (config.checkpoint.remote.url, config.checkpoint.disks, config.launch.stop_after) == ("", (), "")
    assert (config.evaluate.every_steps, config.watch.log_every, config.launch.watchdog_seconds) == (0, 1, 3.0)
    assert config.checkpoint.every_steps == 10 and config.train.steps == 120
    assert (copy.root / config.data.tokens).resolve() == tmp_path / "tokens"
    assert 'launch.stop_after = ""' in changes and 'checkpoint.remote.url = ""' in changes
    assert config.launch.max_restarts == 3


def test_a_run_folder_and_settings_of_the_command(run_file, tmp_path):
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    text = run_file.read_text().replace('"tokens"', '"../../tokens"')
    (folder / "run.toml").write_text(text + "\n[launch]\nnodes = 2\nmin_ranks = 1\n")
    copy, changes = open_copy(folder, None, ["train.steps=500"], many_faults=True)
    assert copy.root == tmp_path / "runs" / "demo-drill" and copy.config.train.steps == 500
    assert (copy.config.launch.min_ranks, copy.config.launch.nodes) == (0, 1) and "launch.nodes = 1" in changes
    assert copy.config.launch.max_restarts > 1000 and not any("train.steps" in change for change in changes)


def test_only_the_folder_of_an_earlier_drill_is_emptied(run_file, tmp_path):
    out = tmp_path / "out"
    open_copy(run_file, out)
    (out / "old").touch()
    open_copy(run_file, out)
    assert [path.name for path in out.iterdir()] == [RESULT]
    (out / RESULT).unlink()
    (out / "own").touch()
    with refused("E-DRILL-FOLDER", folder=str(out)):
        open_copy(run_file, out)
    assert (out / "own").exists()
    with refused("E-DRILL-FOLDER"):
        open_copy(run_file, tmp_path / "runs" / "tiny")


def test_two_drills_do_not_share_a_folder(run_file, tmp_path):
    copy, _ = open_copy(run_file, tmp_path / "out")
    (copy.root / "RS01").mkdir()
    with RunLock(lock_of(copy.root)), refused("E-DRILL-FOLDER", folder=str(copy.root)):
        open_copy(run_file, tmp_path / "out")
    assert (copy.root / "RS01").exists()
    open_copy(run_file, tmp_path / "out")
    assert not (copy.root / "RS01").exists()


@pytest.mark.parametrize(("steps", "every"), [(8, 1), (24, 4), (100, 16), (5, 1)])
def test_a_copy_has_several_checkpoints(run_file, steps, every):
    copy, _ = open_copy(run_file, None)
    assert with_interval(copy, steps).config.checkpoint.every_steps == every
