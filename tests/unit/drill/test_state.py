"""`ingot status` on the folder of a drill: what it is, its result, and where its runs are."""

import json

from tests.checkpoints import write_checkpoint

from ingot.cli.main import main
from ingot.drill.copied import RESULT, lock_of, open_copy, with_interval
from ingot.drill.state import is_drill, read_drill
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.lock import RunLock


def test_a_drill_is_no_run_and_names_its_runs(run_file, tmp_path, capsys):
    copy, _ = open_copy(run_file, tmp_path / "out")
    assert is_drill(copy.root) and not is_drill(tmp_path)
    assert read_drill(copy.root).state == "interrupted"
    run = RunFolder(copy.root / "RS01")
    run.root.mkdir()
    run.config.write_bytes(with_interval(copy, 24).run_file.read_bytes())
    log = EventLog(run.events)
    log.write(events.RUN_STARTED, from_step=0, world_size=2)
    log.write(events.STEP, step=7, loss=1.0)
    log.close()
    write_checkpoint(run, 4)
    with RunLock(lock_of(copy.root)):
        assert read_drill(copy.root).state == "running"
        assert main(["status", str(copy.root)]) == 0
    shown = capsys.readouterr().out
    assert f"drill  {copy.root}   running\n" in shown
    assert f"run    {run.root}   interrupted   step 7/120\n" in shown and f"ingot status {run.root}" in shown
    (copy.root / RESULT).write_text(json.dumps({"rows": [{"id": "RS01"}, {"id": "RS10"}], "red": ["RS01"]}))
    assert main(["status", str(copy.root)]) == 0
    shown = capsys.readouterr().out
    assert "finished, 2 faults, 1 red\n" in shown and "red    RS01\n" in shown
    assert main(["status", str(copy.root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["red"]) == ("finished", ["RS01"])
    assert facts["runs"][str(run.root)]["step"] == 7


def test_a_soak_counts_its_faults(run_file, tmp_path):
    copy, _ = open_copy(run_file, tmp_path / "out")
    line = {"id": "RS34", "faults": {"RS01": 3, "RS08": 2}}
    (copy.root / RESULT).write_text(json.dumps({"rows": [line], "red": []}))
    assert read_drill(copy.root).faults == 5
