"""Back by hand, by the real commands: newer checkpoints are set aside on both tiers, and the run continues there."""

import json

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.guard_record import Measure, read_measures, write_measures
from ingot.trainer.checkpoint.manifest import verify_checkpoint
from ingot.trainer.checkpoint.resumable import find_resume_point

OPTIONS = ("train.steps=16", "checkpoint.every_steps=4", "checkpoint.keep=9", "parallel.dp_shard=1")


def test_a_run_goes_back_by_command_and_trains_on_from_there(project, tmp_path):
    (tmp_path / "store").mkdir()
    options = (*OPTIONS, f'checkpoint.remote.url="file://{tmp_path}/store"', 'checkpoint.weights_every="6 steps"')
    project.train("back", *(word for option in options for word in ("--set", option)))
    folder, facts = project.folder("back"), project.facts("back")
    stored = tmp_path / "store" / "checkpoints"
    assert (stored / "step-00000016" / "manifest.json").exists()
    # Trouble from step 8 on: the run would continue from an older checkpoint than the one that is asked for.
    write_measures(folder.guard, [Measure(action="pass", first=8, last=9, found=("loss spike",), proven_to=3)])
    refused = project.ingot("ckpt", "rewind", str(folder.root), "--to", "9", "--json", code=2)
    assert "E-CKPT-STEP-UNKNOWN" in refused and "4, 8, 12, 16" in refused
    shown = json.loads(project.ingot("ckpt", "rewind", str(folder.root), "--to", "8", "--json").splitlines()[0])
    assert (shown["step"], shown["set_aside"], shown["folder"]) == (8, [12, 16], "set-aside/0001")
    assert [path.name for path in folder.weights.checkpoints.glob("step-*")] == ["step-00000006"]
    assert sorted(path.name for path in folder.checkpoints.glob("step-*")) == ["step-00000004", "step-00000008"]
    for step in (12, 16):
        name = folder.checkpoint(step).name
        assert (folder.set_aside / "0001" / "checkpoints" / name / "manifest.json").exists()
        assert not (stored / name / "manifest.json").exists()
    assert (read_measures(folder.guard), len(read_measures(folder.set_aside / "0001" / "guard.json"))) == ([], 1)
    point = find_resume_point(folder)
    assert (point.step, point.problem) == (8, "")
    out = project.ingot("train", str(folder.root))
    assert "continue  after step 8 of 16" in out and "refused" not in out and "fetched" not in out, out
    assert [event["from_step"] for event in read_events(folder.events, events.RUN_STARTED)] == [0, 8]
    assert project.facts("back") == facts  # bit for bit
    verify_checkpoint(folder.checkpoint(16))
    assert (stored / "step-00000016" / "manifest.json").exists()
    (rewound,) = read_events(folder.events, events.REWOUND)
    assert (rewound["step"], rewound["set_aside"], rewound["reason"]) == (8, [12, 16], "set aside by the user")
    project.ingot("report", str(folder.root))
    assert "set aside by the user: steps 12, 16" in (folder.root / "report.html").read_text()
