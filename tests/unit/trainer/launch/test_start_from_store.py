"""The start of a run whose store holds checkpoints: of this run, after its machine was lost, or of another one."""

import shutil
from pathlib import Path

import pytest
from tests import checkpoints
from tests.expect import named, refused

import ingot.trainer.launch.train as launch_train
from ingot.report.status import read_status
from ingot.schema.checkpoint import FULL, WEIGHTS
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.fence import newest_local_epoch
from ingot.trainer.checkpoint.manifest import candidate_folders
from ingot.trainer.launch.stored import fetch_checkpoint, push_checkpoint

from .conftest import write_checkpoint


@pytest.fixture
def place(tmp_path):
    """The setting of a store without checkpoints."""
    (tmp_path / "store").mkdir()
    return f"checkpoint.remote.url=file://{tmp_path}/store"


@pytest.fixture
def stored(run_file, place, jobs, tmp_path, request):
    """A run that trained, with step 40 of 100 in the store, or that of the parameter; its machine is lost.

    Returns the id of the run.
    """
    step = getattr(request, "param", 40)
    folder = RunFolder(launch_train.train(run_file, tmp_path / "lost", overrides=[place]).run)
    config = load_run(folder.config)
    write_checkpoint(folder, step, config, read_token_manifest(tmp_path / "tokens").fingerprint())
    push_checkpoint(folder.root, step)
    checkpoints.write_weights(folder, step, config.settings())
    push_checkpoint(folder.root, step, kind=WEIGHTS)
    run = newest_local_epoch(folder.root).run
    shutil.rmtree(folder.root)
    jobs.clear()
    return run


def test_a_new_folder_continues_the_run_of_the_store_and_says_so(run_file, place, stored, jobs, folder):
    lines = []
    launch_train.train(run_file, overrides=[place], say=lines.append)
    assert candidate_folders(folder.checkpoints) == [folder.checkpoint(40)] and jobs
    (line,) = (line for line in lines if line.startswith("store "))
    assert named([line], "the folder is new", "step 40", "'demo'", stored[:8], place.partition("=")[2])
    assert [line for line in lines if line.startswith("note      the store has no log")]
    lines.clear()
    launch_train.train(run_file, overrides=[place], say=lines.append)
    assert not [line for line in lines if line.startswith("store ")]


@pytest.mark.parametrize("stored", [100], indirect=True)
@pytest.mark.parametrize("left", [[], ["data.heldout=tokens"], ["train.steps=101"]])
def test_a_finished_run_of_the_store_starts_ranks_only_for_what_is_left(run_file, place, stored, jobs, folder, left):
    """The log, which is lost, had the evaluation after the last step."""
    lines, accept = [], [one.partition("=")[0] for one in left]
    outcome = launch_train.train(run_file, overrides=[place, *left], accept=accept, say=lines.append)
    assert bool(jobs) == bool(left) and candidate_folders(folder.checkpoints) == [folder.checkpoint(100)]
    if not left:
        assert outcome.finished and named(lines[-1:], "is finished: step 100 of 100")
        status = read_status(folder.root)
        assert (status.state, status.step, status.losses) == ("finished", 100, ())
        lines.clear()
        assert launch_train.train(folder.root, say=lines.append).finished and not jobs and "finished" in lines[0]


@pytest.mark.parametrize(
    ("setting", "code"), [("optim.lr=0.5", "E-RUN-CHANGED"), ("model.d_ffn=128", "E-RUN-OTHER-MODEL")]
)
def test_nothing_of_another_run_comes_into_the_folder(run_file, place, stored, jobs, folder, setting, code):
    url, key = place.partition("=")[2], setting.partition("=")[0]
    for _ in range(2):  # what the first refusal advises is still there for the second
        with refused(code, store=url, step=40, keys=[key]) as caught:
            launch_train.train(run_file, overrides=[place, setting])
        assert list(folder.root.iterdir()) == [folder.lock] and not jobs
    assert named([caught.value.found], url, "step 40", "'demo'", stored[:8])
    assert named([caught.value.fix], "--set checkpoint.remote.url=NEW_PLACE", f"{url}/run.toml", "init")
    if code == "E-RUN-CHANGED":
        launch_train.train(run_file, overrides=[place, setting], accept=[key])
        assert candidate_folders(folder.checkpoints) == [folder.checkpoint(40)] and jobs


@pytest.mark.parametrize("kind", [FULL, WEIGHTS])
def test_a_command_fetches_nothing_of_another_model(run_file, place, stored, folder, kind):
    """The lease of the new folder names no run yet, so the model alone shows that the run file is of another one."""
    url = place.partition("=")[2]
    own, remote = run_file.read_text(), f'[checkpoint.remote]\nurl = "{url}"\n'
    folder.root.mkdir(parents=True)
    folder.config.write_text(own.replace("d_ffn = 64", "d_ffn = 128") + remote)
    before = sorted(Path(url.removeprefix("file://")).rglob("*"))
    with refused("E-RUN-OTHER-MODEL", store=url, step=40, keys=["model.d_ffn"]) as caught:
        fetch_checkpoint(folder.root, kind=kind)
    assert named([caught.value.found], url, "step 40", "'demo'", stored[:8])
    assert named([caught.value.fix], f"{url}/run.toml", str(folder.config))
    assert not folder.of(kind).checkpoints.exists() and sorted(Path(url.removeprefix("file://")).rglob("*")) == before
    folder.config.write_text(own.replace("steps = 100", "steps = 90") + remote)  # `ingot train` compares other settings
    assert fetch_checkpoint(folder.root, kind=kind).step == 40


def test_a_folder_and_a_store_of_two_runs_are_not_mixed(run_file, place, stored, jobs, folder):
    launch_train.train(run_file)
    jobs.clear()
    for _ in range(2):
        with refused("E-LEASE-OTHER-RUN", store=place.partition("=")[2]):
            launch_train.train(run_file, overrides=[place])
        assert candidate_folders(folder.checkpoints) == [] and not jobs


@pytest.mark.parametrize(("url", "suggested"), [("/mnt/store", "file:///mnt/store"), ("store", "file:///...")])
def test_a_folder_without_a_scheme_is_suggested_with_one(run_file, url, suggested):
    with refused("E-CONFIG-SETTINGS") as caught:
        launch_train.train(run_file, overrides=[f"checkpoint.remote.url={url}"])
    assert f"a folder is {suggested}" in caught.value.found


def test_a_store_whose_disk_is_not_mounted_stops_the_start(run_file, jobs, folder, tmp_path):
    with refused("E-STORE-NO-FOLDER", path=str(tmp_path / "disk/store")):
        launch_train.train(run_file, overrides=[f"checkpoint.remote.url=file://{tmp_path}/disk/store"])
    assert not (tmp_path / "disk").exists() and list(folder.root.iterdir()) == [folder.lock] and not jobs
