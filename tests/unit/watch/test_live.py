"""A run folder that is read as it grows: cut, mixed, of other versions, with clocks that jump."""

import errno
import json
from collections import Counter
from pathlib import Path

import pytest
from tests.own_time import own_time
from tests.watched import START, WatchedRun

from ingot.config import to_toml
from ingot.report.render.page import HeatMap
from ingot.schema.run_folder import RunFolder
from ingot.watch import growing, live
from ingot.watch.chapters import chapters, head
from ingot.watch.live import LiveRun


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [json.dumps(event) + "\n" for event in WatchedRun().events()]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def append(folder: RunFolder, text: str | bytes) -> None:
    with folder.events.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def test_what_is_added_is_found_and_nothing_is_read_twice(folder, lines):
    append(folder, "".join(lines[:100]))
    run = LiveRun(folder.root).read_all()
    version, rows = run.version, len(run.steps)
    assert not run.refresh() and run.version == version
    append(folder, "".join(lines[100:]))
    assert run.refresh()
    again = LiveRun(folder.root).read_all()
    assert rows < len(run.steps) == len(again.steps)
    assert run.steps.points("loss").values.tolist() == again.steps.points("loss").values.tolist()
    assert [one.text for one in run.data.incidents] == [one.text for one in again.data.incidents]


def test_small_looks_read_the_same(folder, lines, monkeypatch):
    append(folder, "".join(lines))
    whole = LiveRun(folder.root).read_all()
    monkeypatch.setattr(live, "_READ_BYTES", 3000)
    parts = LiveRun(folder.root).read_all()
    assert parts.version > whole.version
    assert parts.unread == 0
    assert parts.steps.points("loss").steps.tolist() == whole.steps.points("loss").steps.tolist()


def test_the_figures_of_a_long_log_are_of_its_end_while_the_rest_is_read(folder, lines, monkeypatch):
    append(folder, "".join(lines) + json.dumps({"kind": "finished", "time": START + 60, "step": 400, "tokens": 1,
                                                "seconds": 1.0}) + "\n")  # fmt: skip
    whole = head(LiveRun(folder.root).read_all(), now=START + 100)
    monkeypatch.setattr(live, "_READ_BYTES", 3000)
    monkeypatch.setattr(live, "_TAIL_BYTES", 3000)
    run = LiveRun(folder.root)
    run.refresh()
    early = head(run, now=START + 100)
    assert 0 < run.last_step < 30 and run.state == "interrupted"  # by what is read so far
    assert (early.step, early.state, early.last_event) == (400, "finished", START + 60)
    assert early.note == f"reading its record: {1 - run.unread:.0%}"
    shown = {figure.label: figure.value for figure in whole.figures}
    assert {figure.label for figure in early.figures} >= {"Loss", "Tokens/s", "MFU", "Cost"}
    assert all(shown[figure.label] == figure.value for figure in early.figures)
    assert "Faults" in shown and "Faults" not in {figure.label for figure in early.figures}
    for own in chapters(run):
        assert own.section.blocks[0].text.startswith("The record is still being read")
    assert head(run.read_all(), now=START + 100) == whole
    assert not any("still being read" in str(own.section.blocks[0]) for own in chapters(run))


def test_a_long_log_whose_end_has_no_step_has_the_figures_of_its_begin(folder, lines, monkeypatch):
    sample = {"kind": "sample", "time": START + 59, "step": 400, "prompt": "", "text": "x" * 1000}
    stopped = {"kind": "stopped", "time": START + 60, "step": 400, "reason": "SIGTERM"}
    append(folder, "".join(lines) + (json.dumps(sample) + "\n") * 5 + json.dumps(stopped) + "\n")
    folder.config.write_text(to_toml(WatchedRun().config()))
    monkeypatch.setattr(live, "_READ_BYTES", 20_000)
    monkeypatch.setattr(live, "_TAIL_BYTES", 3000)
    run = LiveRun(folder.root)
    run.refresh()
    early = head(run, now=START + 5000)
    assert run.unread > 0 and run.tail.last_step == 0 and run.tail.data.samples
    assert early.step == run.last_step > 0
    assert (early.state, early.last_event) == ("stopped", START + 60)
    assert "Loss" in [figure.label for figure in early.figures]
    monkeypatch.setattr(live, "is_locked", lambda path: True)
    run.refresh()
    early = head(run, now=START + 5000)
    assert early.state == "running" and early.note.startswith("reading its record")  # its lines are old, not late
    assert not {"Time left", "Tokens/s", "Checkpoint"} & {figure.label for figure in early.figures}


def test_the_end_of_a_long_log_is_read_for_screens_alone_and_without_other_files(tmp_path, monkeypatch):
    folder = RunFolder(WatchedRun().write(tmp_path / "run"))
    monkeypatch.setattr(live, "_READ_BYTES", 20_000)
    opened, plain_open = Counter(), Path.open

    def counted(path, *args, **options):
        opened[path.name] += 1
        return plain_open(path, *args, **options)

    made, growing_file = [], live.GrowingFile
    with monkeypatch.context() as patch:
        patch.setattr(live, "GrowingFile", lambda *own: made.append(own) or growing_file(*own))
        assert LiveRun(folder.root).read_all().unread == 0 and len(made) == 2
    run = LiveRun(folder.root)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", counted)
        run.refresh()
    assert run.tail and (opened[folder.events.name], opened[folder.alerts.name]) == (2, 1)
    assert run.tail.total_steps == run.total_steps > 0 and run.tail.ranks == run.ranks != {}


def test_many_alerts_are_read_at_once_and_before_that_the_run_says_so(folder, lines, monkeypatch):
    monkeypatch.setattr(live, "_READ_BYTES", 20_000)
    append(folder, lines[0])
    (alert, *_) = WatchedRun().alerts()
    with folder.alerts.open("w") as file:
        file.writelines(json.dumps(alert.as_dict() | {"id": f"a{number}"}) + "\n" for number in range(200))
    run = LiveRun(folder.root)
    run.refresh()
    early = head(run)
    assert 0 < run.unread < 1 and early.note.count("reading its record") == 1
    assert "Alerts" not in [figure.label for figure in early.figures]
    assert len(run.read_all().alerts) == 200 and head(run).note == ""
    assert ("Alerts", "200 open", "") in [(one.label, one.value, one.note) for one in head(run).figures]


def test_a_restart_makes_steps_void_and_a_page_asks_again(folder, lines):
    append(folder, "".join(lines))
    run = LiveRun(folder.root).read_all()
    (void,) = run.steps.void_points("loss")
    assert void.steps.tolist() == list(range(201, 251))
    assert run.last_step == 400
    generation = run.generation
    append(folder, json.dumps({"kind": "rolled_back", "time": START + 60, "from_step": 400, "to_step": 300,
                               "reason": "guard", "why": "", "passed_over": []}) + "\n")  # fmt: skip
    run.refresh()
    assert run.generation > generation
    assert run.last_step == 300
    assert [part.steps[-1] for part in run.steps.void_points("loss")] == [250, 400]
    assert run.data.incidents[-1].text.startswith("rolled back to the checkpoint of step 300")


def test_steps_that_go_back_within_one_look_are_asked_again(folder, lines):
    append(folder, "".join(lines))
    run = LiveRun(folder.root).read_all()
    generation, step = run.generation, json.loads(next(line for line in lines if '"step"' in line[:20]))
    append(folder, "".join(json.dumps({**step, "step": own}) + "\n" for own in (401, 402, 403, 402, 403, 404)))
    run.refresh()
    assert run.last_step == 404
    assert run.generation > generation


def test_a_torn_line_waits_for_its_rest(folder, lines):
    append(folder, "".join(lines[:50]) + lines[50][:20])
    run = LiveRun(folder.root).read_all()
    assert run.unread == 0
    seen = len(run.steps) + len(run.lines)
    append(folder, lines[50][20:] + lines[51])
    run.refresh()
    assert len(run.steps) + len(run.lines) > seen
    assert run.data.unreadable_events == 0


def test_a_line_longer_than_a_look_is_read_and_one_beyond_every_limit_is_counted(folder, lines, monkeypatch):
    sample = {"kind": "sample", "time": START, "step": 2, "prompt": "", "text": "x" * 600_000}
    append(folder, "".join(lines[:50]) + json.dumps(sample) + "\n" + "".join(lines[50:]))
    run = LiveRun(folder.root).read_all()
    assert (run.unread, run.last_step, run.data.unreadable_events) == (0, 400, 0)
    assert any(own["text"].startswith("xxx") for own in run.data.samples)
    monkeypatch.setattr(growing, "LONGEST_BYTES", 500_000, raising=False)
    run = LiveRun(folder.root).read_all()
    assert (run.unread, run.last_step, run.data.unreadable_events) == (0, 400, 1)
    assert not any(own["text"].startswith("xxx") for own in run.data.samples)


def test_the_rest_of_a_line_that_is_left_out_is_no_line(folder, lines, monkeypatch):
    monkeypatch.setattr(growing, "LONGEST_BYTES", 500_000, raising=False)
    append(folder, "".join(lines[:50]) + " " * 600_000)
    run = LiveRun(folder.root).read_all()
    step = run.last_step
    append(folder, " " * 300_000)
    run.read_all()
    append(folder, "3\n" + "".join(lines[50:]))
    assert 0 < step < run.read_all().last_step == 400
    assert run.data.unreadable_events == 1


def test_a_log_that_was_cut_or_replaced_is_read_anew(folder, lines):
    append(folder, "".join(lines))
    run = LiveRun(folder.root).read_all()
    generation = run.generation
    folder.events.write_text("".join(lines[:120]))
    run.read_all()
    assert run.generation > generation
    assert 0 < run.last_step < 250 and not run.data.faults
    other = folder.root / "other"
    other.write_text("".join(lines))
    other.replace(folder.events)
    run.read_all()
    assert run.last_step == 400 and len(run.data.faults) == 1


def test_damaged_lines_and_other_versions_are_left_out(folder, lines):
    junk = [b"\xff\xfe\x00junk\n", b"[1, 2\n", b"3\n", b"{}\n", b"null\n", b"\n", b'{"kind": "step", "time": 1e400}\n',
            b'{"kind": 7, "time": 1}\n', b'{"kind": "progress", "time": 1780000001, "step": 5}\n',
            b'{"kind": "of_the_future", "time": 1780000001, "step": 5}\n', b"[" * 100_000 + b"\n",
            b'{"kind": "waits", "time": 1780000001, "step": 9, "steps": 1, "data": 3}\n',
            b'{"kind": "restart", "time": 1780000001}\n',
            b'{"kind": "metrics", "time": 1780000001, "step": 9, "by": "x", "values": {"v": 1e999}}\n',
            b'{"kind": "step", "time": 1780000001, "step": 3, "loss": ' + b"9" * 400 + b', "grad_norm": 1, "lr": 1}\n',
            b'{"kind": "run_started", "time": 1780000001, "from_step": 99999999999999999999, "world_size": 1}\n',
            ]  # fmt: skip
    append(folder, b"".join(junk) + "".join(lines).encode())
    run = LiveRun(folder.root).read_all()
    assert run.last_step == 400
    assert run.data.unreadable_events >= 6
    record = next(one for one in chapters(run) if one.section.anchor == "record")
    assert "cannot be read" in record.section.blocks[0].text


def test_values_that_are_not_finite_are_values(folder):
    for step, loss in enumerate(("1.5", "NaN", "Infinity", "2.5"), 1):
        append(
            folder, f'{{"kind": "step", "time": {START}, "step": {step}, "loss": {loss}, "grad_norm": 1, "lr": 0}}\n'
        )
    run = LiveRun(folder.root).read_all()
    assert [str(value) for value in run.steps.points("loss").values] == ["1.5", "nan", "inf", "2.5"]
    assert head(run).figures[0].value == "2.5000"


def test_two_runs_in_one_folder_are_named(folder):
    first, second = WatchedRun(name="a"), WatchedRun(name="b", ended=300, back=None)
    mixed = [event for pair in zip(first.events(), second.events(), strict=False) for event in pair]
    append(folder, "".join(json.dumps(event) + "\n" for event in mixed))
    run = LiveRun(folder.root).read_all()
    steps = run.steps.points("loss").steps.tolist()
    assert steps == sorted(set(steps))
    texts = [block.text for one in chapters(run) if one.section.anchor == "record" for block in one.section.blocks]
    assert any("events of 2 runs: a, b" in text for text in texts)


def test_a_clock_that_jumps_is_mentioned_and_moves_no_step(folder, lines):
    jumped = [json.loads(line) for line in lines]
    for event in jumped[300:]:
        event["time"] -= 7200
    append(folder, "".join(json.dumps(event) + "\n" for event in jumped))
    run = LiveRun(folder.root).read_all()
    assert run.clock_jumps == 1
    assert run.steps.points("loss").steps.tolist() == list(range(1, 401))
    assert run.still_seconds(now=START) is None


def test_lines_that_were_kept_until_they_could_be_written_are_no_jump_of_the_clock(folder, lines):
    append(folder, "".join(lines))
    last = LiveRun(folder.root).read_all().last_event
    for event in (json.loads(line) for line in lines[-30:]):
        append(folder, json.dumps({**event, "time": event["time"] - 300, "late": True}) + "\n")
    run = LiveRun(folder.root).read_all()
    assert (run.clock_jumps, run.last_event) == (0, last)
    append(folder, json.dumps({**json.loads(lines[-1]), "time": last - 300}) + "\n")
    run.read_all()
    assert (run.clock_jumps, run.last_event) == (1, last - 300)


def test_many_incidents_and_alerts_stay_bounded(folder, monkeypatch):
    for name, most in (("_MOST_EVENTS", 50), ("_MOST_ALERTS", 20), ("_MOST_STEPS", 100)):
        monkeypatch.setattr(live, name, most)
    event = {"kind": "health", "time": START, "node": "n", "device": "0", "report": "xid", "code": 79, "count": 1,
             "words": "fell off the bus", "verdict": "warn"}  # fmt: skip
    append(folder, "".join(json.dumps(event) + "\n" for _ in range(6000)))
    (alert, *_) = WatchedRun().alerts()
    with folder.alerts.open("w") as file:
        file.writelines(json.dumps(alert.as_dict() | {"id": f"a{number}"}) + "\n" for number in range(500))
    run = LiveRun(folder.root).read_all()
    assert len(run.data.incidents) == 5000 and run.data.incident_counts["health"] == 6000
    assert len(run.data.health) <= 100
    assert len(run.alerts) <= 40
    assert len(run.alerts) + run.alerts_left_out == 500
    figure = next(one for one in head(run).figures if one.label == "Alerts")
    assert figure.note == f"of the newest {len(run.alerts):,}"
    sections = {one.section.anchor: one.section for one in chapters(run)}
    assert "6,000" in sections["incidents"].blocks[0].caption
    assert "500 open" not in sections["alerts"].blocks[0].text and "500 alerts" in sections["alerts"].blocks[0].text


def test_figures_of_the_newest_events_say_so(folder, monkeypatch):
    whole = LiveRun(WatchedRun().write(folder.root / "whole")).read_all()
    assert "newest events" not in str(chapters(whole))
    monkeypatch.setattr(live, "_MOST_EVENTS", 20)
    started, events = WatchedRun().started(START, 1, 0), list(WatchedRun(back=None).events())
    save = next(event for event in events if event["kind"] == "checkpoint")
    fault = {"kind": "fault", "time": START, "rank": 1, "failure": "killed", "cause": "was killed", "step": 9}
    found = [event for event in events if event["kind"] in ("run_started", "step", "progress")]
    found += [own for _ in range(100) for own in (save, fault, started)]
    append(folder, "".join(json.dumps(event) + "\n" for event in found))
    run = LiveRun(folder.root).read_all()
    assert len(run.data.faults) < 100 and len(run.data.checkpoints) < 100
    sections = {one.section.anchor: one.section for one in chapters(run)}
    for anchor, words in (("cost", "80 checkpoints, 80 faults"), ("checkpoints", "80 checkpoints"),
                          ("recovery", "80 faults")):  # fmt: skip
        assert words in sections[anchor].blocks[0].text
    figures = {figure.label: figure for figure in head(run).figures}
    assert (figures["Faults"].value, figures["Faults"].note) == ("100", "100 recovered")


def test_a_run_without_its_artifacts_is_still_shown(folder, lines):
    append(folder, "".join(lines))
    folder.config.write_text("not toml [")
    run = LiveRun(folder.root).read_all()
    assert (run.name, run.total_steps, run.state) == ("run", 0, "interrupted")
    assert "run.toml" in run.problems
    assert head(run).step == 400


def test_a_late_run_says_so(folder, lines, monkeypatch):
    WatchedRun().write(folder.root / "own")
    run = LiveRun(folder.root / "own").read_all()
    run.running = True
    assert run.still_seconds(now=START + 50) is None
    assert run.still_seconds(now=START + 5000) > 4000
    shown = head(run, now=START + 5000)
    assert shown.note.startswith("no step for")
    assert "Time left" not in [figure.label for figure in shown.figures]
    version = run.version
    monkeypatch.setattr(live, "is_locked", lambda path: True)
    for now in (5000, 5001, 5001.5, 5015):
        own_time(monkeypatch, live, time=lambda own=now: START + own)
        run.refresh()
    assert run.version - version == 2  # each ten seconds pages count on, not each look


@pytest.mark.parametrize("eta", ["NaN", "Infinity", "1e300"])
def test_a_time_left_that_is_no_time_is_not_shown(folder, lines, eta):
    event = json.loads(next(line for line in lines if '"progress"' in line)) | {"eta_seconds": "ETA"}
    append(folder, json.dumps(event).replace('"ETA"', eta) + "\n")
    run = LiveRun(folder.root).read_all()
    run.running = True
    labels = [figure.label for figure in head(run, now=event["time"]).figures]
    assert "Tokens/s" in labels and "Time left" not in labels


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_log_that_cannot_be_read_is_mentioned_and_read_again(folder, lines, monkeypatch, number):
    append(folder, "".join(lines))
    monkeypatch.setattr(live, "_READ_BYTES", 3000)
    run = LiveRun(folder.root)
    run.refresh()
    assert run.unread > 0
    version, opened = run.version, Path.open

    def failing(path, *args, **options):
        if path == folder.events:
            raise OSError(number, "it is stale")
        return opened(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing)
        assert run.refresh() and not run.refresh()
    assert run.version == version + 1
    assert run.unread == 0  # or a reader would look again at once, for as long as it fails
    assert "its event log cannot be read (it is stale)" in head(run).note
    run.read_all()
    assert run.last_step == 400
    assert "cannot be read" not in head(run).note


def test_runs_of_one_name_show_their_folders(tmp_path):
    runs = [LiveRun(WatchedRun(name=name).write(tmp_path / folder)).read_all() for name, folder in NAMED]
    live.distinguish(runs)
    assert head(runs[0]).name == runs[0].name
    assert [run.name for run in runs] == [f"try ({tmp_path / 'a'})", f"try ({tmp_path / 'b'})", "other"]
    live.distinguish(runs[1:])
    assert runs[1].name == "try"


NAMED = (("try", "a"), ("try", "b"), ("other", "c"))


def test_a_run_that_was_just_started_again_is_not_late(tmp_path, monkeypatch):
    folder = RunFolder(WatchedRun().write(tmp_path / "run"))
    monkeypatch.setattr(live, "is_locked", lambda path: True)
    run = LiveRun(folder.root).read_all()
    later = run.last_event + 400
    assert run.data.end == "run_started" and run.still_seconds(later) > 300
    append(folder, json.dumps(WatchedRun().started(later, 0, run.last_step)) + "\n")
    run.read_all()
    assert run.state == "running" and run.still_seconds(later + 0.02) is None
    limit = run.data.run.launch.watchdog_other_seconds
    assert run.still_seconds(later + limit + 1) == pytest.approx(limit + 1)  # it hangs before its first line
    append(folder, json.dumps({"kind": "finished", "time": later, "step": 1, "tokens": 1, "seconds": 1.0}) + "\n")
    run.read_all()
    assert run.still_seconds(later + limit + 1) is None  # it uploads what it saved


def test_the_loads_of_experts_are_a_map_of_their_layers(folder, lines):
    event = {"kind": "experts", "time": START + 40, "step": 400, "steps": 10, "layers": [1], "load_cv": [0.4],
             "max_load": [1.5], "min_load": [0.5], "entropy": [1.2], "dropped": None, "fallback": None,
             "loads": [[1.5, 0.5]]}  # fmt: skip
    append(folder, "".join(lines) + json.dumps(event) + "\n")
    (found,) = [own.section for own in chapters(LiveRun(folder.root).read_all()) if own.section.anchor == "experts"]
    (heat,) = [block for block in found.blocks if isinstance(block, HeatMap)]
    assert [(row.label, row.values) for row in heat.rows] == [("1", ("1.50", "0.50"))]
    assert not any("Loads of the 2 experts" in getattr(block, "caption", "") for block in found.blocks)
