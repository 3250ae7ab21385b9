import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import refused

import ingot.trainer.launch.train as launch_train
from ingot.errors import RunBusyError
from ingot.events import EventLog
from ingot.hub.arch_config import huggingface_config
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.storage import shutil as storage_shutil
from ingot.theory.rules import load_run
from ingot.trainer.resilience.lock import RunLock, is_locked

from .conftest import write_checkpoint, write_token_manifest


def test_a_run_lives_in_runs_name_beside_its_file(run_file, jobs, tmp_path):
    outcome = launch_train.train(run_file)
    assert outcome.run == tmp_path / "runs" / "demo"
    assert jobs[0].processes == 1 and jobs[0].arguments == (str(outcome.run), "--epoch", "1")
    assert not is_locked(RunFolder(outcome.run).lock)


def test_relative_data_paths_still_lead_to_the_data(run_file, jobs, tmp_path):
    run = launch_train.train(run_file, tmp_path / "deep" / "er").run
    kept = load_run(run / "run.toml")
    assert kept.data.tokens == "../../tokens"
    assert (run / kept.data.tokens).resolve() == tmp_path / "tokens"
    assert launch_train.train(run).run == run  # the folder alone continues it
    assert load_run(run / "run.toml") == kept


@pytest.mark.parametrize("restart", ["full", "partial"])
def test_ranks_that_keep_their_processes_outlive_their_communicators(run_file, jobs, restart):
    launch_train.train(run_file, overrides=[f'launch.restart="{restart}"'])
    assert jobs[0].env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == {"full": None, "partial": "0"}[restart]


def test_absolute_data_paths_stay(run_file, jobs, tmp_path):
    run = launch_train.train(run_file, overrides=[f"data.tokens={tmp_path / 'tokens'}"]).run
    assert load_run(run / "run.toml").data.tokens == str(tmp_path / "tokens")


def test_the_file_inside_a_run_means_that_run(run_file, jobs):
    run = launch_train.train(run_file).run
    assert launch_train.train(run / "run.toml").run == run


def test_a_plan_of_another_layout_stays_behind(run_file, jobs):
    run_file.with_name("plan.json").write_text("{}")
    run = launch_train.train(run_file, overrides=["parallel.dp_replicate=2", "parallel.dp_shard=1"]).run
    assert not (run / "plan.json").exists()


def test_the_plan_goes_with_the_run(run_file, jobs):
    run_file.with_name("plan.json").write_text("{}")
    run = launch_train.train(run_file).run
    assert (run / "plan.json").read_text() == "{}"
    launch_train.train(run, fresh=True, archive=True)
    assert (run / "plan.json").read_text() == "{}"


def test_a_plan_that_lies_there_already_stays(run_file, jobs, monkeypatch):
    run = launch_train.train(run_file).run
    (run / "plan.json").write_text("{}")
    monkeypatch.chdir(run.parent)
    launch_train.train(run / "run.toml", RunFolder(run).root.relative_to(run.parent))
    assert (run / "plan.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"until_step": 0}, "E-UNTIL-STEP"),
        ({"until_step": 101}, "E-UNTIL-STEP"),
        ({"archive": True}, "E-ARCHIVE-ALONE"),
    ],
)
def test_options_that_would_do_nothing_are_refused(run_file, jobs, options, code):
    with refused(code, **{name: value for name, value in options.items() if name == "until_step"}):
        launch_train.train(run_file, **options)
    assert not jobs and not (run_file.parent / "runs").exists()


def test_fresh_refuses_and_archive_moves_aside(run_file, jobs, config, folder):
    launch_train.train(run_file)
    write_checkpoint(folder, 40, config, "d" * 64)
    with refused("E-FRESH-EXISTS", step=40):
        launch_train.train(run_file, fresh=True)
    assert folder.checkpoint(40).exists()
    for _ in range(2):  # within one second
        launch_train.train(run_file, fresh=True, archive=True)
        assert not folder.checkpoints.exists()
    first, second = sorted(p for p in folder.root.parent.iterdir() if p != folder.root)
    assert RunFolder(first).checkpoint(40).exists() and RunFolder(second).events.exists()
    launch_train.train(run_file.parent / "run.toml", folder.root.parent / "new", fresh=True)  # nothing to refuse


def contents(folder: RunFolder) -> dict[str, bytes]:
    return {str(p.relative_to(folder.root)): p.read_bytes() for p in folder.root.rglob("*") if p.is_file()}


def save_and_lose(folder: RunFolder, *evidence: str, leftover: str = "") -> None:
    """Leave what a run of two saves leaves without its checkpoints: "events", "ledger" or both of them."""
    log = EventLog(folder.events)
    if "events" in evidence:
        log.write("run_started", from_step=0)
        log.write("checkpoint", step=20)
        log.write("checkpoint", step=40)
    folder.ledger.mkdir(exist_ok=True)
    if "ledger" in evidence:
        (folder.ledger / "steps-00000001-00000020.i64").write_bytes(b"1")
        (folder.ledger / "steps-00000021-00000040.i64").write_bytes(b"2")
    if leftover:
        (folder.checkpoints / leftover).mkdir(parents=True)


@pytest.mark.parametrize("leftover", ["", ".removed-step-00000040"])
@pytest.mark.parametrize("evidence", [("events",), ("ledger",), ("events", "ledger")], ids="+".join)
def test_a_run_whose_checkpoints_vanished_does_not_begin_anew(run_file, jobs, folder, evidence, leftover):
    launch_train.train(run_file)
    jobs.clear()
    save_and_lose(folder, *evidence, leftover=leftover)
    before, records = contents(folder), {"events": "events.jsonl", "ledger": "ledger"}
    facts = {"folder": str(folder.checkpoints), "leftovers": [leftover] if leftover else [], "exists": bool(leftover)}
    shown = {records[name]: 40 for name in evidence}
    with refused("E-CKPT-VANISHED", step=40, shown=shown, **facts) as stopped:
        launch_train.train(run_file)
    assert stopped.value.exit_code == 21 and not jobs
    with refused("E-FRESH-EXISTS", step=40):
        launch_train.train(run_file, fresh=True)
    after = contents(folder)
    assert {name: after[name] for name in before} == before  # the ledger, above all
    assert not leftover or (folder.checkpoints / leftover).is_dir()
    launch_train.train(run_file, fresh=True, archive=True)
    (aside,) = [RunFolder(p) for p in folder.root.parent.iterdir() if p != folder.root]
    assert len(jobs) == 1 and not folder.ledger.exists()
    assert {name for name in before if name != "lock"} <= contents(aside).keys()
    assert contents(aside)["events.jsonl"] == before["events.jsonl"]


def test_a_run_without_events_whose_ledger_has_one_save_does_not_begin_anew(run_file, jobs, folder):
    folder.ledger.mkdir(parents=True)
    (folder.ledger / "steps-00000001-00000020.i64").write_bytes(b"1")
    with refused("E-CKPT-VANISHED", step=20, shown={"ledger": 20}):
        launch_train.train(run_file)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(run_file, jobs, folder):
    launch_train.train(run_file)
    log = EventLog(folder.events)
    log.write("progress", step=20)
    folder.ledger.mkdir()
    (folder.ledger / "steps-00000001-00000020.i64").write_bytes(b"1")  # written, and then the save was killed
    (folder.checkpoints / ".saving-step-00000020").mkdir(parents=True)
    launch_train.train(run_file)
    assert len(jobs) == 2


def test_checkpoints_that_are_all_refused_are_no_start(run_file, jobs, folder):
    folder.checkpoint(40).mkdir(parents=True)
    printed = []
    launch_train.train(run_file, say=printed.append)
    assert not any(line.startswith("start") for text in printed for line in text.split("\n"))


def test_what_cannot_be_moved_aside_leaves_the_run_as_it_was(run_file, jobs, config, folder, monkeypatch):
    launch_train.train(run_file)
    write_checkpoint(folder, 40, config, "d" * 64)
    before, rename = contents(folder), Path.rename

    def refuse(path, target):
        if path == folder.checkpoints:  # a mounted volume
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with refused("E-ARCHIVE-MOVE", path=str(folder.checkpoints)):
        launch_train.train(run_file, fresh=True, archive=True)
    assert contents(folder) | {"lock": b""} == before | {"lock": b""}
    assert list(folder.root.parent.iterdir()) == [folder.root] and len(jobs) == 1


def test_a_finished_run_starts_nothing(run_file, jobs, config, folder):
    tokens = write_token_manifest(run_file.parent / "tokens")
    write_checkpoint(folder, 100, config, tokens.fingerprint())
    EventLog(folder.events).write("finished", step=100)
    printed = []
    outcome = launch_train.train(run_file, say=printed.append)
    assert outcome.finished and outcome.step == 100 and not jobs
    assert "finished" in printed[0]


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_trained_again(run_file, jobs, config, folder):
    tokens = write_token_manifest(run_file.parent / "tokens")
    write_checkpoint(folder, 100, config, tokens.fingerprint())
    EventLog(folder.events).write("finished", step=100)
    file = folder.checkpoint(100) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    launch_train.train(run_file)
    assert len(jobs) == 1


def test_a_run_that_was_killed_before_it_finished_again_is_not_finished(run_file, jobs, config, folder):
    """The evaluation after the last step is left to do."""
    tokens = write_token_manifest(run_file.parent / "tokens")
    write_checkpoint(folder, 100, config, tokens.fingerprint())
    log = EventLog(folder.events)
    for kind in ("run_started", "finished", "run_started"):
        log.write(kind, from_step=50)
    launch_train.train(run_file)
    assert len(jobs) == 1


def test_settings_of_the_launcher_that_the_folder_keeps_are_shown(run_file, jobs, folder):
    def kept(*arguments, **options):
        printed = []
        launch_train.train(*arguments, say=printed.append, **options)
        return [line for line in printed if line.startswith("kept")]

    limits = ["launch.stop_after=10s", "launch.watchdog_seconds=0"]
    assert kept(run_file, overrides=limits) == []
    (line,) = kept(folder.root)
    assert 'launch.stop_after = "10s", launch.watchdog_seconds = 0.0 ' in line
    (line,) = kept(folder.root, overrides=["launch.stop_after=4h"])
    assert "launch.watchdog_seconds = 0.0 " in line and "stop_after" not in line
    assert kept(run_file) == kept(folder.root) == []  # the run file does not have them


def test_changes_are_shown_with_their_class(run_file, jobs, config, folder):
    tokens, printed = write_token_manifest(run_file.parent / "tokens"), []
    launch_train.train(run_file)
    write_checkpoint(folder, 40, load_run(folder.config), tokens.fingerprint())
    edits = ["optim.lr=1e-3", "watch.log_every=1", "parallel.dp_shard=2"]
    launch_train.train(run_file, overrides=edits, accept=["optim.lr"], say=printed.append)
    shown = [line.split(maxsplit=1)[1] for line in printed if line.startswith("changed")]
    assert shown == [
        "optim.lr   0.003 -> 0.001   other numbers, accepted",
        "parallel.dp_shard   1 -> 2   same mathematics",
        "watch.log_every   10 -> 1   same bits",
    ]


def test_a_finished_run_keeps_its_settings(run_file, jobs, config, folder):
    tokens = write_token_manifest(run_file.parent / "tokens")
    launch_train.train(run_file)
    write_checkpoint(folder, 100, config, tokens.fingerprint())
    EventLog(folder.events).write("finished", step=100)
    jobs.clear()
    before, printed = {p: p.read_bytes() for p in (folder.config, folder.events)}, []
    launch_train.train(run_file, overrides=["optim.lr=1e-3"], accept=["optim.lr"], say=printed.append)
    assert not jobs and not folder.accepted.exists()
    assert {p: p.read_bytes() for p in before} == before
    assert "settings stay as they were" in printed[1]
    launch_train.train(folder.root)  # nothing to confirm later


def test_a_step_that_is_already_past_starts_nothing(run_file, jobs, config, folder):
    tokens = write_token_manifest(run_file.parent / "tokens")
    write_checkpoint(folder, 60, config, tokens.fingerprint())
    for until, where in ((40, "past"), (60, "at")):
        printed = []
        outcome = launch_train.train(run_file, until_step=until, say=printed.append)
        assert (outcome.exit_code, outcome.step, outcome.saved_step) == (10, 60, 60)
        assert f"is already {where} step" in printed[0] and not jobs
    launch_train.train(run_file, until_step=61)
    assert len(jobs) == 1


def test_a_refused_checkpoint_is_not_what_training_continues_from(run_file, jobs, config, folder):
    tokens = write_token_manifest(run_file.parent / "tokens")
    for step in (40, 60):
        write_checkpoint(folder, step, config, tokens.fingerprint())
    log, printed = EventLog(folder.events), []
    log.write("checkpoint_refused", step=60, path="p", reason="damaged")
    launch_train.train(run_file, until_step=50, say=printed.append)
    assert "continue  after step 40 of 100" in printed[0] and len(jobs) == 1
    log.write("checkpoint", step=60)  # saved anew
    printed.clear()
    launch_train.train(run_file, say=printed.append)
    assert "continue  after step 60 of 100" in printed[0]


def test_leftovers_of_a_killed_save_are_removed(run_file, jobs, folder):
    (folder.checkpoints / ".saving-step-00000007").mkdir(parents=True)
    launch_train.train(run_file)
    assert not list(folder.checkpoints.iterdir())


def test_a_busy_folder_is_left_alone(run_file, jobs, folder):
    (folder.checkpoints / ".saving-step-00000007").mkdir(parents=True)
    with RunLock(folder.lock), pytest.raises(RunBusyError):
        launch_train.train(run_file, fresh=True, archive=True)
    assert (folder.checkpoints / ".saving-step-00000007").exists() and not jobs


@pytest.mark.parametrize(
    ("override", "code", "facts"),
    [
        ("data.tokens=nowhere", "E-TOKENS-MISSING", {"key": "data.tokens"}),
        ("data.heldout=nowhere", "E-TOKENS-MISSING", {"key": "data.heldout"}),
        ("model.vocab_size=63", "E-VOCABULARY-SMALL", {"key": "data.tokens", "needed": 64, "vocab_size": 63}),
        ("train.device=cuda", "E-GPU-COUNT", {"needed": 1, "available": 0}),
        ("train.stepz=5", "E-CONFIG-SETTINGS", {"meant": {"train.stepz": ["train.steps"]}}),
        ("name='a/../b'", "E-RUN-NAME", {"name": "a/../b"}),
        ("model.d_model=9000000", "E-DISK-SPACE", {"purpose": "4 checkpoints and 4 saves of the weights"}),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(run_file, jobs, monkeypatch, override, code, facts):
    monkeypatch.setattr("ingot.trainer.launch.checks.find_gpus", lambda: ())
    nowhere = {"folder": str(run_file.parent / "nowhere")} if code == "E-TOKENS-MISSING" else {}
    with refused(code, **facts, **nowhere):
        launch_train.train(run_file, overrides=[override])
    assert not jobs


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (["parallel.cp=2"], "ranks 2: cp 2 (ulysses)"),
        (["parallel.cp=2", "parallel.context=ring", "parallel.dp_shard=2"], "ranks 4: dp_shard 2 x cp 2 (ring)"),
        (["parallel.cp=4", "parallel.context=usp"], "ranks 4: cp 4 (usp, ulysses 2)"),
    ],
    ids=str,
)
def test_the_opening_names_the_form_of_context_parallelism(run_file, jobs, settings, ranks):
    printed = []
    launch_train.train(run_file, overrides=settings, say=printed.append)
    assert any(line.endswith(ranks) for line in printed), printed


def test_more_ranks_than_cores_is_said(run_file, jobs, monkeypatch):
    monkeypatch.setattr("ingot.trainer.launch.checks.usable_cores", lambda: 1)
    printed = []
    launch_train.train(run_file, overrides=["parallel.dp_shard=2"], say=printed.append)
    assert any("2 ranks share 1 cores" in line for line in printed) and jobs[0].processes == 2


def test_threads_are_shared_by_the_quota_of_the_container(run_file, jobs, monkeypatch):
    monkeypatch.setattr("ingot.trainer.launch.train.usable_cores", lambda: 6)
    launch_train.train(run_file, overrides=["parallel.dp_shard=2"])
    assert jobs[0].env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.5", "9" * 5_000, ","])
def test_a_number_of_threads_that_is_none_is_refused_before_ranks_start(run_file, jobs, monkeypatch, text):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with refused("E-ENVIRONMENT-NUMBER", variable="OMP_NUM_THREADS", value=text[:100]):
        launch_train.train(run_file)
    assert not jobs


def test_gpus_are_counted(run_file, jobs, monkeypatch):
    monkeypatch.setattr("ingot.trainer.launch.checks.find_gpus", lambda: ("gpu",))
    with refused("E-GPU-COUNT"):
        launch_train.train(run_file, overrides=["parallel.dp_shard=2", "train.device=auto"])


def test_a_missing_part_is_named(run_file, jobs, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("E-PACKAGE-MISSING") as missing:
        launch_train.train(run_file)
    assert missing.value.fix == "pip install 'ingot[train]'"  # type: ignore[attr-defined]


def test_a_full_disk_is_noticed_first(run_file, jobs, monkeypatch):
    usage = storage_shutil._ntuple_diskusage(1 << 40, 1 << 40, 10)
    monkeypatch.setattr("ingot.storage.shutil.disk_usage", lambda path: usage)
    with refused("E-DISK-SPACE") as both:
        launch_train.train(run_file)
    with refused("E-DISK-SPACE", purpose="4 checkpoints") as full:
        launch_train.train(run_file, overrides=["checkpoint.weights_every=0 steps"])
    # A checkpoint has a parameter and AdamW's two moments of it.
    assert 3 * both.value.facts["needed_bytes"] == 4 * full.value.facts["needed_bytes"]
    assert "checkpoint.keep" in full.value.fix
    noted: list[str] = []
    never = ["checkpoint.every_steps=20", "checkpoint.weights_every=40 steps"]
    with refused("E-DISK-SPACE", purpose="4 checkpoints"):
        launch_train.train(run_file, overrides=never, say=noted.append)
    assert any("saves nothing alone: a full checkpoint, every 20 steps" in line for line in noted)


def test_each_disk_needs_room_for_the_files_of_its_ranks(run_file, jobs, monkeypatch, tmp_path):
    """Two ranks on two folders of one file system need the room of both; the run folder needs none for checkpoints."""
    usage = storage_shutil._ntuple_diskusage(1 << 40, 1 << 40, 10)
    monkeypatch.setattr("ingot.storage.shutil.disk_usage", lambda path: usage)
    alone = ["checkpoint.weights_every=0 steps", "parallel.dp_shard=2", "train.device=cpu"]
    with refused("E-DISK-SPACE", purpose="4 checkpoints") as full:
        launch_train.train(run_file, overrides=alone)
    disks = [tmp_path / "nvme0", tmp_path / "nvme1"]
    named = f"checkpoint.disks={[*map(str, disks)]}"
    with refused("E-DISK-MISSING", disk=str(disks[0]), node=0):
        launch_train.train(run_file, overrides=[*alone, named])
    for disk in disks:
        disk.mkdir()
    with refused("E-DISK-SPACE", purpose="the share of 4 checkpoints on this disk") as share:
        launch_train.train(run_file, overrides=[*alone, named])
    assert full.value.facts["needed_bytes"] - share.value.facts["needed_bytes"] in (0, 1)
    assert share.value.facts["path"] == str(disks[1])


def test_a_folder_without_a_run_is_refused(tmp_path, jobs):
    with refused("E-RUN-NOT-FOUND"):
        launch_train.train(tmp_path)
    with refused("E-CONFIG-MISSING"):
        launch_train.train(tmp_path / "nothing.toml")


def test_a_model_to_begin_with_is_looked_at_before_anything_starts(run_file, jobs, config, folder, tmp_path):
    there = tmp_path / "hf"
    with refused("E-HF-FOLDER"):
        launch_train.train(run_file, overrides=["init=hf"])
    there.mkdir()
    for layers, is_refused in ((3, True), (config.model.num_layers, False)):
        theirs = huggingface_config(replace(config.model, num_layers=layers), eot_id=0, dtype="float32")
        (there / "config.json").write_text(json.dumps(theirs))
        if is_refused:
            with refused("E-HF-INIT-DIFFERS"):
                launch_train.train(run_file, overrides=["init=hf"])
            assert not jobs
    assert launch_train.train(run_file, overrides=["init=hf"]).run == folder.root and jobs
    assert load_run(folder.config).init == "../../hf"
    (there / "config.json").unlink()
    begun = load_run(folder.config)
    write_checkpoint(folder, 3, begun, read_token_manifest(tmp_path / "tokens").fingerprint())
    launch_train.train(folder.root)  # it goes on from step 3
    assert len(jobs) == 2
