"""The report shows what the guards of a run found and did, in order, and `ingot status` the last of it."""

import json
import re

import pytest

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.report.facts import gather
from ingot.report.readable import is_readable
from ingot.report.recovery import recovery_section
from ingot.report.timeline import KINDS, entry_of, timeline
from ingot.report.write import write_report
from ingot.schema.run_folder import RunFolder

NOTHING = {"lr_factor": 1.0, "clip_factor": 1.0, "lr_last": 0, "proven_to": 9}
WHY = "it is the newest without doubt"
SUSPECT = "the guard found trouble from step 19 on, and went back"
UNPROVEN = "only 3 steps of training followed before trouble from step 19 on"


def finding(clock, step, sigmas, kinds=("loss spike",)):
    return {"kind": "finding", "time": clock, "step": step, "found": list(kinds), "loss": 2 + sigmas / 10,
            "grad_norm": 1.5, "loss_sigmas": sigmas, "norm_sigmas": 1, "norm_factor": 1.5, "skipped": True}  # fmt: skip


def measure(clock, action, first, last, found=("loss spike",)):
    return {
        "kind": "guard",
        "time": clock,
        "action": action,
        "first": first,
        "last": last,
        "found": list(found),
    } | NOTHING


def back(clock, step, to, why=WHY, passed_over=()):
    others = [{"step": at, "reason": reason} for at, reason in passed_over]
    return {"kind": "rolled_back", "time": clock, "from_step": step, "to_step": to, "why": why, "passed_over": others}


def damage(clock, **changes):
    usual = {"kind": "state_damaged", "time": clock, "step": 55, "rank": 1, "host": "node-b", "sign": "own_hash",
             "tensor": "model.layers.1.mlp.down.weight", "element": 1234, "bit": 22}  # fmt: skip
    return usual | changes


def troubled(clock):
    """The events of a run with a bad document in three steps, a rate that was too high once, and a flipped bit."""
    return [
        finding(clock, 19, 12.0), {"kind": "skipped", "time": clock, "steps": [19]},
        finding(clock, 20, 31.5, ("loss spike", "gradient spike")), finding(clock, 21, 9.0),
        {"kind": "skipped", "time": clock, "steps": [20, 21]},
        measure(clock + 1, "again", 19, 21),
        back(clock + 2, 22, 10, passed_over=[(15, UNPROVEN)]),
        measure(clock + 3, "pass", 19, 21),
        back(clock + 4, 22, 10, passed_over=[(20, SUSPECT), (15, SUSPECT)]),
        {"kind": "passed", "time": clock + 5, "steps": [19, 20]}, {"kind": "passed", "time": clock + 5, "steps": [21]},
        {"kind": "sanity", "time": clock + 6, "step": 30, "loss": 2.5, "suspect": False},
        finding(clock + 7, 34, 7.0), {"kind": "skipped", "time": clock + 7, "steps": [33, 34]},
        damage(clock + 8), back(clock + 9, 55, 50, "it is the newest, and in no doubt; its state was compared"),
        {"kind": "state_replayed", "time": clock + 10, "step": 55, "ranks": [1], "named": True, "verdict": "transient"},
        {"kind": "sanity", "time": clock + 11, "step": 60, "loss": 3.25, "suspect": True},
    ]  # fmt: skip


def text_of(events):
    return [f"{one.step} {one.text}" for one in timeline(events)]


STORY = [
    "19 the guard found loss spike, gradient spike in steps 19-21; the largest in step 20: loss 5.15 (+31.5 deviations)"
    ", gradient norm 1.5 (+1.0); skipped the updates of steps 19-21",
    "21 guard: steps 19-21: loss spike; the run goes back and trains them again",
    f"22 rolled back to the checkpoint of step 10, because {WHY}; not step 15: {UNPROVEN}; 12 steps trained again",
    "21 guard: steps 19-21: loss spike; the run goes back and passes their data",
    f"22 rolled back to the checkpoint of step 10, because {WHY}; not steps 20, 15: {SUSPECT}; 12 steps trained again",
    "19 passed the data of steps 19-21",
    "34 the guard found loss spike; loss 2.7 (+7.0 deviations), gradient norm 1.5 (+1.0); skipped its update",
    "33 skipped the update of step 33",
    "55 the hashes of the state found damage of rank 1 on node-b: tensor model.layers.1.mlp.down.weight, bit 22 of "
    "element 1,234 flipped; its state changed between two updates",
    "55 rolled back to the checkpoint of step 50, because it is the newest, and in no doubt; its state was compared; 5 "
    "steps trained again",
    "55 the damage of rank 1 was transient: the same steps show none when trained again",
    "60 held-out text has a loss of 3.25: the checkpoint of this step is suspect",
]


def test_the_timeline_has_what_was_found_by_whom_and_what_was_decided():
    assert text_of(troubled(1.0)) == STORY
    assert text_of([damage(1.0, element=None, bit=None, sign="undecided", tensor="")]) == [
        "55 the hashes of the state found damage of rank 1 on node-b; its copy differs from another one: one of the "
        "ranks with such an entry is damaged"
    ]
    assert text_of([finding(1.0, 3, 0.0, ("loss not finite",)) | {"loss": float("nan")}]) == [
        "3 the guard found loss not finite; loss nan, gradient norm 1.5; skipped its update"
    ]
    lists = {"kind": "listed", "time": 1.0, "step": 7, "path": "bad.jsonl", "documents": 2, "windows": 5}
    assert text_of([lists]) == ["7 left out 5 windows with 2 documents of bad.jsonl"]
    old = {"kind": "rolled_back", "time": 1.0, "from_step": 3, "to_step": 2}  # of a version that wrote no reason
    assert text_of([old]) == ["3 rolled back to the checkpoint of step 2; 1 step trained again"]
    wrong = damage(1.0, sign="recomputed", tensor="w", bit=None)
    assert text_of([wrong])[0].startswith("55 the hashes of the gradients found damage of rank 1 on node-b: tensor w; ")
    lost = {"kind": "metrics_lost", "time": 1.0, "rank": 3, "step": 8, "rows": 1200, "reason": "slow", "ended": False}
    assert text_of([lost]) == ["8 metrics of rank 3: 1,200 rows dropped, more may follow: slow"]
    back = {"kind": "rewound", "time": 1.0, "step": 8, "set_aside": [12, 16], "folder": "set-aside/0001"}
    assert "to the checkpoint of step 8; newer ones are set aside by the user: steps 12, 16" in text_of([back])[0]
    again = {"kind": "guard_replayed", "time": 1.0, "first": 8, "last": 10, "found": ["x"], "verdict": "hardware"}
    assert "steps 8-10: nothing was found when they were trained again" in text_of([again])[0]
    assert "of their data" in text_of([again | {"verdict": "data"}])[0]
    tried = {"kind": "retried", "time": 1.0, "step": 8, "found": ["loss spike"], "healthy": True, "same": False}
    assert "the fault was transient" in text_of([tried])[0]
    assert "it is the data or the weights" in text_of([tried | {"healthy": False, "same": True}])[0]
    assert "of the ranks 2, 3, one computed other bits" in text_of([tried | {"ranks": [2, 3]}])[0]
    assert is_readable(tried) and not is_readable(tried | {"ranks": 3})  # it has neither loss nor norm
    assert {event["kind"] for event in (*troubled(1.0), lists, lost, back, again, tried)} == KINDS - {
        "alert",
        "quarantined",
    }


def steps(clock, first, last, begin):
    for step in range(first, last + 1):
        yield {"kind": "step", "time": clock, "step": step, "loss": begin - step / 100, "grad_norm": 1.0, "lr": 1e-3}


@pytest.fixture
def run(logs, tmp_path):
    """A run folder with these events and the steps between them. The loss falls by 0.01 in each step, and by 0.5 when
    the run goes back."""
    events, clock = [logs.started(logs.START, 0, 0)], logs.START + 100
    trained = [*steps(logs.START, 1, 22, 4.0)]
    for event in troubled(clock):
        trained.append(event)
        backs = sum(one["kind"] == "rolled_back" for one in trained)
        if event["kind"] == "rolled_back":
            last = (22, 55, 72)[backs - 1]
            trained += [
                one
                for one in steps(event["time"], event["to_step"] + 1, last, 4 - backs / 2)
                if (backs, one["step"]) not in ((2, 19), (2, 20), (2, 21))
            ]  # passed
    events += trained
    ranges = {"layers": ["embedding", "layers.0"], "underflow": [0.0, 0.125], "saturation": [0.0, 0.02]}
    events.append({"kind": "gradient_range", "time": clock, "step": 72, "loss_scale": 1024.0} | ranges)
    damaged = [damage(clock, sign="guess"), damage(clock, rank="one"), {"kind": "sanity", "time": clock, "step": 3}]
    damaged.append(
        {"kind": "gradient_range", "time": clock, "step": 80, "loss_scale": 1.0} | ranges | {"layers": ["a"]}
    )
    folder = logs.write_events(tmp_path / "run", [*events, *damaged[1:], damaged[0]])
    RunFolder(folder).config.write_text(to_toml(logs.run_config()))
    return folder


def test_the_report_shows_it_in_order_with_what_was_lost(run):
    markdown = write_report(run).markdown.read_text().replace("\\", "")
    section = markdown.partition("## Faults and recovery")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[1:] for line in section.splitlines() if re.match(r"\| \d\d:\d\d:\d\d \| ", line)]
    shown = [f"{step} {text.rstrip(' |')}" for step, text in rows]
    assert [line[: len(wanted)] for line, wanted in zip(shown, STORY, strict=True)] == STORY
    lost = [text for _, text in rows if "rolled back" in text]
    assert "(49.2k tokens); the loss was 3.9 at step 10, and then 3.28 at step 22" in lost[0]
    assert "(49.2k tokens); the loss was 3.9 at step 10, and then 2.78 at step 22" in lost[1]
    assert "(20.5k tokens); the loss was 2.5 at step 50, and then 1.95 at step 55" in lost[2]
    assert "| 60 | 3.2500 | suspect |" in section and "| 30 | 2.5000 |  |" in section
    assert "| layers.0 | 12.50% | 2.00% |" in section and "at step 72, loss scale 1024" in section
    assert "4 events could not be read" in markdown


def test_a_live_run_that_forgot_older_events_gives_each_roll_back_its_own_losses(run):
    data = gather(run)
    first = next(at for at, event in enumerate(data.timeline) if event["kind"] == "rolled_back")
    for lists in ((data.timeline[first + 1 :], data.roll_backs), (data.timeline[first + 1 :], data.roll_backs[2:])):
        data.timeline, data.roll_backs = lists
        lost = [text for _, _, text in _rows(data) if "rolled back" in text]
        assert [text.rpartition("then ")[2] for text in lost] == ["2.78 at step 22", "1.95 at step 55"]
        first = -1


def test_a_roll_back_from_which_the_run_did_not_come_back_has_no_loss_after_it(run, logs):
    """The log still has the loss of the bad step from before."""
    events = run / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    first = next(at for at, line in enumerate(lines) if "rolled_back" in line)
    events.write_text("".join(lines[: first + 4]))
    (lost,) = [text for _, _, text in _rows(gather(run)) if "rolled back" in text]
    assert lost.endswith("12 steps trained again (49.2k tokens)")


def _rows(data):
    section = recovery_section(data)
    (table,) = [block for block in section.blocks if getattr(block, "caption", "").startswith("What was found")]
    return table.rows


def test_status_shows_the_last_of_it(run, capsys):
    assert main(["status", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "last   step 60: held-out text has a loss of 3.25: the checkpoint of this step is suspect" in lines
    (policy,) = [line for line in lines if line.startswith("policy")]
    assert "roll-backs 3 (last: step 55 to 50), damage found (rank 1)" in policy
    assert main(["status", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["happened"]["step"], found["happened"]["kind"], found["damaged_ranks"]) == (60, "sanity", [1])


def test_an_event_that_is_no_part_of_it_has_no_entry():
    assert entry_of({"kind": "step", "time": 1.0, "step": 3}) is None
