"""The copy that a profile works in, which leaves the run alone, and its ranks, whose end is noticed at once."""

import json
import os
from pathlib import Path

import pytest
from tests.e2e.conftest import RUN_FILE, write_tokens
from tests.expect import refused

from ingot.rehearse.profile.copied import RESULT, ProfilePlan, open_copy
from ingot.rehearse.profile.job import run_ranks
from ingot.theory.rules import load_run
from ingot.trainer.resilience.lock import RunLock

OWN = '\n[launch]\nstop_after = "4h"\nspares = 1\n[evaluate]\nevery_steps = 10\n'


@pytest.fixture
def run_file(tmp_path) -> Path:
    write_tokens(tmp_path / "tokens", tokens=6000)
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def test_the_copy_trains_the_same_steps_and_saves_nowhere_else(run_file, tmp_path):
    run_file.write_text(RUN_FILE.replace("every_steps = 20", 'every_steps = 20\ndisks = ["/disk"]') + OWN)
    copy = open_copy(run_file, steps=60, warmup=5, overrides=["train.micro_batch=4"])
    assert copy.plan == ProfilePlan(tmp_path / "runs" / "tiny-profile", 60, 5)
    assert ProfilePlan.of_words(copy.plan.words()) == copy.plan
    config = load_run(copy.plan.run_file)
    assert (config.checkpoint.disks, config.launch.stop_after, config.launch.spares) == ((), "", 0)
    assert (config.evaluate.every_steps, config.watch.log_every, config.train.micro_batch) == (0, 2, 4)
    assert config.train.steps == copy.plan.all_steps + 1 > 120  # none of them is the last one, which is saved
    assert (copy.plan.root / config.data.tokens).resolve() == tmp_path / "tokens"
    assert "evaluate.every_steps = 0" in copy.changes and not any("micro_batch" in one for one in copy.changes)
    assert json.loads((copy.plan.root / RESULT).read_text()) == {"complete": False}


def test_a_run_that_cannot_be_profiled_is_refused_before_anything_is_written(run_file, tmp_path):
    def refuse(code: str, *overrides: str, **more) -> None:
        with refused(code):
            open_copy(run_file, steps=1, warmup=1, overrides=overrides, **more)

    refuse("E-PROFILE-NODES", "launch.nodes=2")
    refuse("E-PROFILE-NVTX", nvtx=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own").touch()
    refuse("E-PROFILE-FOLDER", out=tmp_path / "other")
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    refuse("E-PROFILE-FOLDER", out=tmp_path / "runs" / "tiny")
    with RunLock(tmp_path / "runs" / "tiny" / "lock"):
        refuse("E-PROFILE-RUNNING")
    assert not (tmp_path / "runs" / "tiny-profile").exists() and (tmp_path / "other" / "own").exists()
    open_copy(run_file, steps=1, warmup=1)
    (tmp_path / "runs" / "tiny-profile" / "old").touch()
    open_copy(run_file, steps=1, warmup=1)  # of an earlier profile
    assert not (tmp_path / "runs" / "tiny-profile" / "old").exists()


def program(text: str) -> tuple[str, str]:
    """Return the arguments of an interpreter that plays a rank."""
    return "-c", f"import os, sys, time\nrank = os.environ['RANK']\n{text}"


def test_a_rank_that_dies_ends_the_profile_with_its_last_words(run_file):
    copy = open_copy(run_file, steps=1, warmup=1)
    dies = "if rank == '1': sys.exit('no memory for this')\ntime.sleep(8)\nopen(sys.argv[1] + '/late', 'w')"
    with refused("E-PROFILE-RANK", rank=1, exit_code=1) as caught:
        run_ranks(copy, lambda *_: None, program=program(dies))
    assert "no memory for this" in str(caught.value) and not (copy.plan.root / "late").exists()
    copy = open_copy(run_file, steps=1, warmup=1)
    with refused("E-PROFILE-RANK", rank=0, exit_code=-9) as caught:
        run_ranks(copy, lambda *_: None, program=program("os.kill(os.getpid(), 9) if rank == '0' else time.sleep(600)"))
    assert "SIGKILL" in str(caught.value)


def test_silent_ranks_are_ended(run_file):
    copy = open_copy(run_file, steps=1, warmup=1)
    writes = "open(sys.argv[1] + '/pid' + rank, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    with refused("E-PROFILE-SILENT"):
        run_ranks(copy, lambda *_: None, silent_seconds=0.5, program=program(writes))
    for path in copy.plan.root.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
