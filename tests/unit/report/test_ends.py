"""The end of a run by a fault: what `ingot status` and `ingot guard` say of it, and the command that comes next."""

import json
import time

import pytest

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.events import EventLog
from ingot.planner.request.presets import load_model
from ingot.report.status import read_status
from ingot.schema import events
from ingot.schema.guard_answer import write_question
from ingot.schema.guard_record import STOP, Measure, write_measures
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.lock import RunLock


@pytest.fixture
def folder(tmp_path):
    train = Train(steps=100, seq_len=8, global_batch=2, micro_batch=2)
    run = RunConfig(name="demo", model=load_model("tiny").arch, data=Data(tokens="t"), train=train)
    folder = RunFolder(tmp_path)
    folder.config.write_text(to_toml(run))
    return folder


@pytest.mark.parametrize(
    ("failure", "code", "command"),
    [
        ("numerics", "E-LOSS-EXPLODED", "explain nan"),
        ("numerics", "E-GUARD-STOPPED", "train"),  # it asks nothing: its record is gone, or the run went on
        ("numerics", "E-ROLLBACK-LIMIT", "train"),
        ("disk", "E-DISK-FULL", "train"),
    ],
)
def test_after_a_fault_the_next_command_is_that_of_its_code_and_the_guard_names_it(
    folder, capsys, failure, code, command
):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    log.write(events.FAULT, rank=0, failure=failure, code=code, cause="loss 672.9 at step 82", step=82)
    next_line = f"ingot {command} {folder.root}"
    assert main(["status", str(folder.root)]) == 0
    assert capsys.readouterr().out.split()[-len(next_line.split()) :] == next_line.split()
    assert main(["guard", str(folder.root)]) == 0
    shown = capsys.readouterr().out
    assert f"at step 82 with {code}: loss 672.9 at step 82" in shown and next_line in shown
    log.write(events.RUN_STARTED, from_step=0)
    assert read_status(folder.root).fault is None


def test_a_guard_without_measures_shows_the_updates_that_it_skipped(folder, capsys):
    assert main(["guard", str(folder.root)]) == 0
    assert "the run has not started" in capsys.readouterr().out
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    assert main(["guard", str(folder.root)]) == 0
    assert "took no measure, and skipped no update" in capsys.readouterr().out
    log.write(events.SKIPPED, steps=[*range(101, 111)])
    assert main(["guard", str(folder.root)]) == 0
    assert "it skipped the updates of 10 steps: .., 103, 104, 105, 106, 107, 108, 109, 110" in capsys.readouterr().out


@pytest.mark.parametrize("code", [{"code": "E-GUARD-STOPPED"}, {}])  # logs of earlier versions have no code
def test_a_guard_that_stopped_the_run_is_named_until_it_is_answered(folder, capsys, code):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    log.write(events.FAULT, rank=0, failure="numerics", cause="6 updates had to be skipped", step=82, **code)
    write_measures(folder.guard, [Measure(action=STOP, first=82, last=84, found=("loss spike",))])

    def next_of(*command):
        assert main([*command, str(folder.root)]) == 0
        return " ".join(capsys.readouterr().out.rpartition("Next:")[2].split()).removeprefix("ingot explain ")

    ask, train = f"ingot guard {folder.root}", f"ingot train {folder.root}"
    assert next_of("status").endswith(ask) and next_of("guard") == f"{ask} --take lower"
    assert main(["guard", str(folder.root), "--take", "pass", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == "pass"
    assert next_of("status").endswith(train)
    assert next_of("guard") == train and folder.guard_answer.exists()
    assert main(["guard", str(folder.root)]) == 0
    assert "answered  steps 82-84: pass at the next start" in capsys.readouterr().out


def test_a_run_that_has_stopped_takes_no_stop_and_withdraws_an_answer(folder, capsys):
    write_measures(folder.guard, [Measure(action=STOP, first=82, last=84, found=("loss spike",))])
    stop = ["guard", str(folder.root), "--take", "stop"]
    assert main(stop) == 2 and "E-GUARD-HAS-STOPPED" in capsys.readouterr().err
    assert not folder.guard_answer.exists()  # which the next start would not heed
    assert main([*stop[:-1], "lower"]) == 0 and folder.guard_answer.exists()
    assert main(stop) == 0 and not folder.guard_answer.exists()
    assert f"ingot guard {folder.root} --take lower" in capsys.readouterr().out.splitlines()[-1]
    until = time.time() + 60  # while the run waits
    write_question(folder.guard_question, Measure(action=STOP, first=90, last=92, found=("loss spike",)), until)
    with RunLock(folder.lock):
        assert main(stop) == 0 and folder.guard_answer.exists()
        assert "stop at once" in capsys.readouterr().out
    folder.guard_answer.unlink()
    assert main(stop) == 2 and "E-GUARD-HAS-STOPPED" in capsys.readouterr().err  # it was killed meanwhile
