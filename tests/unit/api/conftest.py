"""A crawl, and copies of the golden artifacts, which earlier versions wrote."""

import importlib.util
import json
import multiprocessing
import os
import shutil
import traceback
from pathlib import Path
from types import ModuleType

import pytest

import ingot
from ingot.cli.main import main
from ingot.trainer.checkpoint.manifest import list_checkpoints

TESTS = Path(__file__).parents[2]
# Imported before forks, which would each import them.
_NEEDED_TO_TRAIN = ("ingot.api.trainer", "ingot.trainer.run", "ingot.trainer.launch.own_loop", "ingot.trainer.evaluate")


def crawl_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("crawl_for_api", TESTS / "unit" / "data" / "conftest.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """`data`, and runs of 6 steps that were stopped after step 4."""
    folder = tmp_path_factory.mktemp("golden") / "artifacts"
    return Path(shutil.copytree(TESTS / "golden", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "old")))


@pytest.fixture(scope="session")
def crawl_file(tmp_path_factory) -> Path:
    """A WARC file of 40 good pages, a page in German, a short page and a missing page."""
    crawl = crawl_module()
    pages = [(f"http://a.example/{n}", crawl.english(n, 24), 200) for n in range(40)]
    german = "Der Hund und die Katze gehen heute nicht in den Wald, weil es regnet. " * 9
    pages += [("http://a.example/missing", "not found", 404), ("http://a.example/german", german, 200)]
    pages += [("http://a.example/short", "too short to stay", 200)]
    return crawl.write_crawl(tmp_path_factory.mktemp("crawl") / "crawl.warc.gz", pages)


@pytest.fixture
def command(capsys):
    """`command(*words)` runs a command in this process. Returns its exit code and the object that --json prints."""

    def run(*words: object) -> tuple[int, dict]:
        capsys.readouterr()
        code = main([*map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def run_file(golden, tmp_path) -> Path:
    """The run file of a small model for one rank: 6 steps, a log line at every second one, a checkpoint at the 4th."""
    text = (golden / "dense-1-rank" / "run.toml").read_text()
    text = text.replace("../data", str(golden / "data")).replace("log_every = 1", "log_every = 2")
    path = tmp_path / "run.toml"
    path.write_text(text.replace('name = "dense-1-rank"', 'name = "own"'))
    return path


def numbers(run):
    """(metrics, files of the newest checkpoint) of the run in a folder."""
    run = ingot.Run(run)
    manifest = list_checkpoints(run.paths.checkpoints)[0].manifest
    assert manifest
    return run.metrics(), manifest.files


@pytest.fixture(scope="session")
def whole(golden, tmp_path_factory):
    """The numbers of the undisturbed run of `run_file`, trained by the command: on one rank, and on two."""
    folder, found = tmp_path_factory.mktemp("whole"), {}
    text = (golden / "dense-1-rank" / "run.toml").read_text().replace("../data", str(golden / "data"))
    text = text.replace("log_every = 1", "log_every = 2").replace("dense-1-rank", "own")
    for ranks in (1, 2):
        path = folder / f"{ranks}.toml"
        path.write_text(text.replace("dp_shard = 1", f"dp_shard = {ranks}"))
        found[ranks] = numbers(ingot.train(path, folder / f"run-{ranks}").run)
    return found


@pytest.fixture
def forked():
    """`forked(function, *arguments)` calls a function in a process forked from this one, and returns its result.

    What trains in the calling process leaves the process of the tests alone. An error becomes the test's failure.
    """
    pytest.importorskip("torch")
    for module in _NEEDED_TO_TRAIN:
        importlib.import_module(module)

    def call(function, *arguments, seconds: float = 60):
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)

        def child() -> None:
            try:
                theirs.send((True, function(*arguments)))
            except BaseException:
                theirs.send((False, traceback.format_exc()))
            finally:
                theirs.close()
                os._exit(0)

        process = context.Process(target=child)
        process.start()
        theirs.close()
        try:
            fine, value = ours.recv() if ours.poll(seconds) else (False, f"no answer within {seconds} s")
        except EOFError:
            fine, value = False, "died"
        if not fine:
            process.kill()
            pytest.fail(value, pytrace=False)
        process.join()
        return value

    return call
