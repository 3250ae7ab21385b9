"""The report of a whole run, of parts of runs, and of hostile and damaged ones."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoints import write_checkpoint
from tests.expect import calls_of, refused

from ingot.config import to_toml
from ingot.report.facts import gather
from ingot.report.render.markup import render_html, render_markdown
from ingot.report.write import build_page, write_report
from ingot.schema.run_folder import RunFolder

VOID = {"meta", "br", "line", "circle", "polyline"}


class Structure(HTMLParser):
    """Checks that tags nest, and collects them with their attributes and the text."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        self.text.append(data)


LINE = '{"kind":"step","time":%f,"step":%d,"loss":%f,"grad_norm":1.0,"lr":0.001}\n'


def parse(html: str) -> Structure:
    structure = Structure()
    structure.feed(html)
    structure.close()
    assert not structure.open
    return structure


@pytest.fixture
def report(drilled_run, tmp_path):
    return write_report(
        drilled_run, out=tmp_path, stages=drilled_run.parent / "events.jsonl", command="ingot quickstart"
    )


def test_html_and_markdown_have_the_same_facts(report):
    html, markdown = report.html.read_text(), report.markdown.read_text()
    text = " ".join("".join(parse(html).text).split())
    for fact in (
        "2.070", "27% lower", "3.6M", "5,412", "44.3%", "1,702", "Noticed after", "210.0 ms", "4.4 s",
        "30, all with the same bits", "2.9700", "98.1 ms", "104.0 ms", "406.0 MiB", "412.0 MiB", "ingot quickstart",
        "7" * 64, "9a1f" * 16, "crawl", "14.8 s", "lid.176.ftz", "AMD EPYC", "on purpose", "2 attempts",
    ):  # fmt: skip
        assert fact in text, fact
        assert fact in markdown, fact
    assert [value for label, value, _ in report.headline if label == "Recovered in"] == ["4.4 s"]


def test_html_is_self_contained_and_accessible(report):
    html = report.html.read_text()
    structure = parse(html)
    names = {tag for tag, _ in structure.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not any(name.startswith("on") or name == "src" for _, attrs in structure.tags for name in attrs)
    assert all(attrs["href"].startswith("#") for tag, attrs in structure.tags if tag == "a")
    assert not re.search(r"url\(|@import|https?:", html)
    policy = next(a["content"] for t, a in structure.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    anchors = {attrs["id"] for _, attrs in structure.tags if "id" in attrs}
    assert {a["href"][1:] for t, a in structure.tags if t == "a"} <= anchors
    assert all(a.get("aria-label") and a.get("role") == "img" for t, a in structure.tags if t == "svg")
    assert all(a.get("scope") in ("col", "row") for t, a in structure.tags if t == "th")
    assert "prefers-color-scheme:dark" in html
    assert "@media print" in html


def test_hostile_text_stays_text(report, logs):
    html, markdown = report.html.read_text(), report.markdown.read_text()
    assert logs.HOSTILE in "".join(parse(html).text)
    assert logs.HOSTILE not in html
    outside_fences = re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", markdown)
    assert "<script" not in outside_fences


def test_hostile_names_stay_text(tmp_path, logs):
    attack = '"><img src=x onerror=alert(1)><!--'
    start = logs.started(logs.START, 0, 0) | {
        "versions": {attack: attack},
        "hardware": {attack: attack},
        "device": attack,
    }
    evaluation = {"kind": "evaluation", "time": logs.START + 1, "step": 1, "bpb": 2.0, "loss": 4.0, "tokens": 9,
                  "unigram_bpb": 3.0, "by_source": {attack: {"bpb": 2, "unigram_bpb": 3, "tokens": 9}}}  # fmt: skip
    stage = {"kind": "stage", "time": logs.START, "name": attack, "seconds": 1, "summary": attack}
    fault = {"kind": "fault", "time": logs.START + 2, "rank": attack, "cause": attack, "step": 3}
    own = [
        {"kind": "metrics", "time": logs.START + 1, "step": n, "by": attack, "values": {attack: n}} for n in range(3)
    ]
    run = logs.write_events(tmp_path, [start, evaluation, stage, fault, *own])
    RunFolder(run).config.write_text(to_toml(logs.run_config()).replace('"quickstart"', json.dumps(attack)))
    html = write_report(run, command=attack).html.read_text()
    assert "img" not in {tag for tag, _ in parse(html).tags}
    assert "<img" not in (tmp_path / "report.md").read_text().replace("```\n" + attack, "")


def test_parts_that_are_missing_are_left_out(tmp_path, logs):
    run = logs.write_events(tmp_path, [logs.started(logs.START, 0, 0)])
    report = write_report(run)
    titles = re.findall(r"^## (.*)", report.markdown.read_text(), re.MULTILINE)
    assert titles == ["Machine and versions", "Provenance"]
    assert "no step logged yet" in report.markdown.read_text()
    parse(report.html.read_text())


@pytest.mark.parametrize("gone", ["run.toml", "plan.json", "twin.json", "step", "progress", "evaluation", "sample",
                                  "checkpoint", "fault", "run_started", "finished", "drill"])  # fmt: skip
def test_any_one_part_may_be_missing(gone, drilled_run, tmp_path, logs):
    run = logs.write_events(tmp_path / "run", [e for e in logs.drilled_events() if e["kind"] != gone])
    for name in {"run.toml", "plan.json", "twin.json"} - {gone}:
        (run / name).write_bytes((drilled_run / name).read_bytes())
    report = write_report(run)
    parse(report.html.read_text())
    assert report.markdown.stat().st_size > 1000


def test_a_corpus_that_is_not_the_runs_own_is_not_shown(drilled_run, tmp_path):
    corpus = drilled_run.parent / "data" / "corpus" / "corpus.json"
    whole = corpus.read_text()
    try:
        corpus.write_text(whole + " ")
        assert "## Data" not in write_report(drilled_run, out=tmp_path).markdown.read_text()
        named = write_report(drilled_run, out=tmp_path, corpus=corpus.parent)
        assert "## Data" in named.markdown.read_text()
    finally:
        corpus.write_text(whole)


def test_changed_tokens_are_reported(drilled_run, report):
    assert "not the one that was trained on" in report.markdown.read_text()


def test_a_chapter_entered_twice_is_one_row(tmp_path, logs):
    stage = {"kind": "stage", "time": logs.START, "name": "data", "seconds": 40.0, "summary": "first"}
    again = stage | {"seconds": 2.0, "summary": "second"}
    run = logs.write_events(tmp_path, [logs.started(logs.START, 0, 0), stage, again])
    assert "| data | second | 42 s |" in write_report(run).markdown.read_text()


def test_a_different_twin_is_called_different(drilled_run, tmp_path):
    twin = json.loads((drilled_run / "twin.json").read_text()) | {"equal": False, "max_difference": 3e-7}
    (tmp_path / "t.json").write_text(json.dumps(twin))
    report = write_report(drilled_run, out=tmp_path, twin=tmp_path / "t.json")
    assert "losses differ from the undisturbed run" in report.markdown.read_text()
    assert "3e-07" in report.markdown.read_text()


def test_a_fault_that_ended_the_run_is_not_called_recovered(tmp_path, logs):
    events = logs.drilled_events()
    end = next(i for i, e in enumerate(events) if e["kind"] == "fault") + 1
    report = write_report(logs.write_events(tmp_path, events[:end]))
    assert "0 of 1" in report.markdown.read_text()
    assert "did not go on" in report.markdown.read_text()
    assert f"at step {logs.KILL - 1}" in report.markdown.read_text()


def test_evaluations_are_in_the_order_of_steps_and_void_ones_are_left_out(tmp_path, logs):
    """Evaluations in the background come late, and the run went back from step 30."""

    def at(step, bpb, **fields):
        return {"kind": "evaluation", "time": logs.START + 1, "step": step, "bpb": bpb, "loss": 4.0, "tokens": 9,
                "unigram_bpb": 3.0, "by_source": {}, "seconds": 2.0, **fields}  # fmt: skip

    def scores(step, value):
        return {"kind": "task_scores", "time": logs.START, "step": step, "scores": {"arc": {"acc": value,
                "acc_stderr": 0.0125}}, "lower_is_better": [], "examples": {"arc": 40}, "background": True}  # fmt: skip

    events = [
        logs.started(logs.START, 0, 0),
        at(30, 1.0101, background=True),
        scores(30, 0.9),
        {"kind": "sample", "time": logs.START, "step": 30, "prompt": "p", "text": "void"},
        {"kind": "rolled_back", "time": logs.START, "from_step": 31, "to_step": 20},
        at(25, 1.2525),
        {"kind": "sample", "time": logs.START, "step": 25, "prompt": "p", "text": "holds"},
        {"kind": "sample", "time": logs.START, "step": 25, "prompt": "p", "text": "holds", "background": True},
        at(20, 1.2020, background=True),
        scores(20, 0.25),
        {"kind": "background_evaluation", "time": logs.START, "step": 22, "what": "full", "seconds": 1.0,
         "reason": "it was killed"},
    ]  # fmt: skip
    text = write_report(logs.write_events(tmp_path, events)).markdown.read_text()
    assert "At step 25" in text and text.index("1.2020") < text.rindex("1.2525") and "1.0101" not in text
    assert "| arc | acc | 0.2500 | 0.0125 | 40 |" in text and "0.9000" not in text
    assert "1 of 1 evaluation in the background failed, the last one at step 22: it was killed." in text
    assert text.count("holds") == 1 and "void" not in text


def test_not_a_number_is_left_out_of_lines(tmp_path, logs):
    events = logs.drilled_events()
    for event in events:
        if event["kind"] == "step" and event["step"] % 7 == 0:
            event |= {"loss": float("nan"), "grad_norm": float("inf")}
    report = write_report(logs.write_events(tmp_path, events))
    points = re.findall(r'points="([^"]*)"', report.html.read_text())
    assert points
    assert not any("nan" in p or "inf" in p for p in points)


@pytest.mark.parametrize(
    "line",
    ["[]", "7", '"x"', "{}", '{"kind": "step", "time": 1}', '{"kind": "step", "time": 1, "step": "9", "loss": 1}',
     '{"kind": "evaluation", "time": 1, "step": 1, "bpb": null}', '{"kind": ["step"], "time": 1}',
     '{"kind": "step", "time": "x", "step": 1, "loss": 1, "grad_norm": 1, "lr": 1}',
     '{"kind": "fault", "time": 1, "step": 1' + "0" * 400 + "}", '{"kind": "fault", "time": 1e17, "step": 1}',
     '{"kind": "metrics", "time": 1, "step": 1, "by": "x", "values": {"a": "b"}}',
     '{"kind": "metrics", "time": 1, "step": 1, "by": "x", "values": {"a": 1' + "0" * 400 + "}}",
     '{"kind": "metrics", "time": 1, "step": 1, "by": "x"}',
     '{"kind": "sample", "time": 1}', '{"kind": "stage", "time": 1, "name": "x"}'],
)  # fmt: skip
def test_unreadable_events_are_counted_not_used(line, tmp_path, logs):
    run = logs.write_events(tmp_path, [logs.started(logs.START, 0, 0)])
    with RunFolder(run).events.open("a") as file:
        file.write(line + "\n")
    assert "1 event could not be read" in write_report(run).markdown.read_text()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def test_no_value_of_any_field_breaks_the_report(tmp_path, logs):
    body = [e for e in logs.drilled_events() if e.get("step", 0) not in range(30, 400)]
    few = [e for e in body if e["kind"] != "step" or e["step"] % 40 == 1]

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def check(data):
        events = json.loads(json.dumps(few))
        event = events[data.draw(st.integers(0, len(events) - 1))]
        event[data.draw(st.sampled_from(sorted(event)))] = data.draw(json_values)
        page = build_page(gather(logs.write_events(tmp_path, events)), "ingot train")
        parse(render_html(page))
        assert render_markdown(page)

    check()


def test_a_setting_changed_on_the_way_is_reported(tmp_path, logs):
    start = logs.started(logs.START, 0, 0)
    change = {"kind": "setting_changed", "time": logs.START, "key": "optim.lr", "old": 0.003, "new": 0.001, "step": 400}
    report = write_report(logs.write_events(tmp_path, [start, change]))
    for text in (report.markdown.read_text(), report.html.read_text()):
        assert "Changed settings" in text and "optim.lr" in text and "0.003" in text and "0.001" in text
    assert "Changed settings" not in write_report(logs.write_events(tmp_path, [start])).markdown.read_text()


def test_a_checkpoint_that_cannot_be_used_is_reported(tmp_path, logs):
    saved = {"kind": "checkpoint", "time": logs.START, "step": 40, "bytes": 1000, "stall_seconds": 0.1}
    run = logs.write_events(tmp_path, [logs.started(logs.START, 0, 0), saved])
    write_checkpoint(RunFolder(run), 40)
    assert "its folder is missing" not in write_report(run).markdown.read_text()
    shutil.rmtree(RunFolder(run).checkpoint(40))
    assert (
        "The checkpoint of step 40: its folder is missing. No usable checkpoint is left."
        in write_report(run).markdown.read_text()
    )


def test_saves_that_failed_or_were_left_out_are_reported(tmp_path, logs):
    failed = {
        "kind": "checkpoint_failed",
        "time": logs.START,
        "step": 40,
        "code": "E-CKPT-WRITE",
        "reason": "disk full",
    }
    left_out = {"kind": "checkpoint_skipped", "time": logs.START, "step": 60, "in_flight": 50}
    saved = {"kind": "checkpoint", "time": logs.START, "step": 80, "bytes": 1000, "stall_seconds": 0.1}
    weights = saved | {"kind": "weights_saved", "step": 70}
    begin = [logs.started(logs.START, 0, 0), failed, left_out]
    for name, events, none in (("some", [*begin, weights, weights, saved], False), ("none", begin, True)):
        (tmp_path / name).mkdir()
        text = write_report(logs.write_events(tmp_path / name, events)).markdown.read_text()
        assert "disk full" in text and "the save of step 50 was still being written" in text
        assert ("None was saved" in text) == none
        assert ("saved 2 times: 200.0 ms of pauses" in text) != none


def test_the_table_of_checkpoints_has_the_seconds_that_the_log_has(tmp_path, logs):
    saved = {"kind": "checkpoint", "time": logs.START, "step": 40, "bytes": 1000, "stall_seconds": 0.25}
    timed = saved | {"step": 80, "snapshot_seconds": 0.125, "write_seconds": 2.0, "verify_seconds": 1.5}
    stored = {"kind": "checkpoint_stored", "time": logs.START, "step": 80, "what": "full", "bytes": 9, "seconds": 7.0}
    weights = stored | {"step": 40, "what": "weights"}
    events = [logs.started(logs.START, 0, 0), saved]
    assert "| Step | Size | Stall |\n" in write_report(logs.write_events(tmp_path, events)).markdown.read_text()
    text = write_report(logs.write_events(tmp_path, [*events, timed, stored, weights])).markdown.read_text()
    assert "| Step | Size | Stall | Snapshot | Write | Verify | Upload |" in text
    rows = [line.split(" | ")[2:] for line in text.splitlines() if line.startswith(("| 40 |", "| 80 |"))]
    assert rows[-2:] == [["250.0 ms", "", "", "", " |"], ["250.0 ms", "125.0 ms", "2.0 s", "1.5 s", "7.0 s |"]]


@pytest.mark.parametrize("log", ["", "\x00 what?\n", '{"kind": "step"}\n'])
def test_a_log_without_events_makes_no_report(tmp_path, log):
    RunFolder(tmp_path).events.write_text(log)
    with refused("E-LOG-NO-EVENTS", path=str(RunFolder(tmp_path).events)):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_what_is_no_run_is_refused(tmp_path, drilled_run, logs):
    with refused("E-RUN-NO-LOG", run=str(tmp_path)):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    run = logs.write_events(tmp_path, [logs.started(logs.START, 0, 0)])
    with refused("E-ARTIFACT-UNREADABLE", path=str(tmp_path / "nowhere/corpus.json")):
        write_report(run, corpus=tmp_path / "nowhere")
    (run / "twin.json").write_text("[1]")
    with refused("E-ARTIFACT-UNREADABLE", path=str(run / "twin.json")):
        write_report(run)
    (run / "twin.json").write_text('{"steps": 60}')
    with refused("E-CONFIG-SETTINGS") as caught:
        write_report(run)
    assert "kill_step" in caught.value.facts["keys"]


def test_a_report_takes_time_in_proportion_to_the_run(tmp_path, logs):
    def calls(steps: int) -> int:
        run = logs.write_events(tmp_path / str(steps), [logs.started(logs.START, 0, 0)])
        with RunFolder(run).events.open("a") as file:
            file.writelines(LINE % (logs.START + n, n, 4 + (n % 97) / 50) for n in range(1, steps + 1))
        return calls_of(lambda: write_report(run))

    assert calls(20_000) < 12 * calls(2_000)


def test_a_long_run_stays_small(tmp_path, logs):
    run = logs.write_events(tmp_path, [logs.started(logs.START, 0, 0)])
    with RunFolder(run).events.open("a") as file:
        file.writelines(LINE % (logs.START + n, n, 4 + (n % 97) / 50) for n in range(1, 50_001))
    report = write_report(run)
    assert report.html.stat().st_size < 200_000


def test_no_torch_is_needed(drilled_run, tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from ingot.report.write import build_page, write_report\n"
        f"write_report(Path({str(drilled_run)!r}), out=Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_redone_steps_that_differ_are_reported(tmp_path, logs):
    events = logs.drilled_events()
    again = [e for e in events if e["kind"] == "step" and e["step"] == logs.RESUMED + 5]
    assert len(again) == 2
    again[1]["loss"] += 1e-15 * again[1]["loss"]
    markdown = write_report(logs.write_events(tmp_path, events)).markdown.read_text()
    assert "30, not all with the same bits" in markdown
    assert f"finished at step {logs.STEPS}" in markdown


def test_skipped_updates_and_roll_backs_are_in_the_report_in_order(logs, tmp_path):
    body, clock = logs.steps_events(1, 40, logs.START)
    vetoes = [
        {"kind": "skipped", "time": clock, "steps": [21, 22]},
        {"kind": "skipped", "time": clock + 9, "steps": list(range(1, 12))},
        {"kind": "skipped", "time": clock, "steps": "none"},
    ]
    rolled = {"kind": "rolled_back", "time": clock + 1, "from_step": 31, "to_step": 20}
    alert = {"alert": "uniform guess", "step": 35, "since": 5, "value": 1.01, "limit": 0.99, "places": [], "cause": ""}
    vetoes.append({"kind": "alert", "time": clock + 2} | alert)
    vetoes.append({"kind": "alert", "time": clock + 2} | alert | {"alert": "mood"})
    run = logs.write_events(tmp_path / "run", [logs.started(logs.START, 0, 0), *body, *vetoes, rolled])
    text = " ".join(" ".join(parse(write_report(run).html.read_text()).text).split())
    facts = (
        "skipped the updates of steps 21-22", "31 rolled back to the checkpoint of step 20; 11 steps trained again",
        "alert: step 35: since step 5, the loss is 1.010 times that of a uniform guess (limit 0.99)",
        "skipped the updates of steps 1-11", "2 events could not be read",
    )  # fmt: skip
    places = [text.index(fact) for fact in facts]
    assert places == sorted(places)


def test_own_metrics_are_in_the_report(report, logs):
    markdown = report.markdown.read_text()
    section = markdown.partition("## Own metrics")[2].partition("\n## ")[0].replace("\\_", "_")
    rows = {cells[1]: cells[2:-1] for line in section.splitlines() if len(cells := line.split("|")) == 10}
    rows = {name.strip(): [cell.strip() for cell in cells] for name, cells in rows.items()}
    lines, first, lowest, highest, last, step = rows["noise_scale_tokens"][1:]
    assert rows["noise_scale_tokens"][0] == "noise_scale" and rows["z"][0] == "loss" and int(lines) > 1
    assert step == f"{logs.STEPS:,}" and last == highest == f"{2 * logs.STEPS:,.4g}" and first == lowest
    assert rows["odd"][1:] == [lines, "nan", "nan", "nan", "nan", step]
    html = report.html.read_text()
    labels = [attrs["aria-label"] for tag, attrs in parse(html).tags if tag == "svg"]
    assert any(label.startswith("noise_scale_tokens (noise_scale): ") for label in labels)
    assert not any(label.startswith("odd") for label in labels), "a metric without finite values has no chart"


def test_a_repeated_line_replaces_the_metrics_of_its_step(tmp_path, logs):
    def own(step, value):
        return {"kind": "metrics", "time": logs.START + step, "step": step, "by": "x", "values": {"a": value}}

    start = logs.started(logs.START, 0, 0)
    run = logs.write_events(tmp_path, [start, own(10, 1.0), own(20, 2.0), own(10, 3.0)])
    assert gather(run).metrics == {("x", "a"): {10: 3.0, 20: 2.0}}


def test_the_loss_comes_first_then_other_curves_and_idle_stages_are_folded(logs, drilled_run, tmp_path):
    log = (json.loads(line) for line in RunFolder(drilled_run).events.read_text().splitlines())
    measured = [event | ({"mfu": 0.41} if event["kind"] == "progress" else {}) for event in log]
    run = logs.write_events(tmp_path / "run", measured)
    html = write_report(run, corpus=drilled_run.parent / "data/corpus").html.read_text()
    titles = (
        'id="training-title"', "Training loss in", "MFU: 88 points", "Peak memory of rank 0", "Tokens per second",
        "Gradient norm", 'id="data-title"',
    )  # fmt: skip
    places = [html.index(title) for title in titles]
    assert places == sorted(places)
    assert "MFU: 88 points, from 41.0% to 41.0%" in html and "from 0.40 to 0.40" in html
    corpus = write_report(drilled_run, out=tmp_path).html.read_text()
    assert "that dropped nothing" not in corpus
    manifest = json.loads((drilled_run.parent / "data/corpus/corpus.json").read_text())
    quiet = {"name": "quiet", "ran": "changed nothing", "documents_in": 2400, "documents_out": 2400, "dropped": {}}
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle/corpus.json").write_text(json.dumps(manifest | {"funnel": [*manifest["funnel"], quiet]}))
    folded = write_report(run, corpus=tmp_path / "idle").html.read_text().partition("1 stage that dropped nothing")
    assert folded[0].rstrip().endswith("<summary>") and "changed nothing" in folded[2]


def test_the_time_of_a_restart_is_shown_by_phase(drilled_run):
    page = render_markdown(build_page(gather(drilled_run), "ingot train"))
    assert "Seconds of each start by phase" in page
    (row,) = [line for line in page.splitlines() if "| 4.41 |" in line]
    assert row.count("|") == 14 and "| 1 | 4.41 | 0.21 | 0.10 | 0.01 |  | 0.20 | 2.00 | 0.10 | 0.70 | 0.90 |" in row
