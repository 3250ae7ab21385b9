"""Runs compared at equal tokens, FLOPs, steps or time; what is left out, and what is refused."""

import json
import math
import random
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from tests.expect import refused, reported

from ingot.cli.main import main
from ingot.config import to_dict, to_toml
from ingot.report.compare.align import compare_runs, noise_between_steps
from ingot.report.compare.page import write_page
from ingot.report.compare.texts import difference_text
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import Shard, TokenManifest
from ingot.storage import write_json

BATCH, HOSTILE = 4096, '"><script>alert(1)</script>'


@pytest.fixture
def make(tmp_path, logs):
    """Return a function that writes a run folder and returns its path."""

    def make(name: str, events: list[dict] | None = None, **options):
        folder = RunFolder(logs.write_events(tmp_path / name, trained(logs, **options) if events is None else events))
        config = replace(logs.run_config(), name=name)
        batch = options.get("batch", BATCH) // config.train.seq_len
        folder.config.write_text(to_toml(replace(config, train=replace(config.train, global_batch=batch))))
        return folder.root

    return make


def trained(logs, first=1, last=400, *, shift=0.0, every=10, batch=BATCH, seed=0, clock=None, attempt=0, seconds=0.1):
    """The events of an attempt. shift: added to the loss, which is a function of the tokens."""
    clock = logs.START if clock is None else clock
    flops = {"flops_per_token": 7.2e6 * batch / BATCH, "data_fingerprint": "5f2c" * 16}
    events = [logs.started(clock, attempt, first - 1) | flops]
    for step in range(first, last + 1):
        clock, tokens = clock + seconds, step * batch
        loss = 4 + 3 * math.exp(-tokens / 4e5) + shift + random.Random(step + 7919 * seed).gauss(0, 0.06)
        events.append({"kind": "step", "time": clock, "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3})
        if step % every == 0 or step == last:
            events.append({
                "kind": "progress", "time": clock, "step": step, "steps": 880, "loss": loss, "bpb": loss / 2.4,
                "tokens": tokens, "tokens_per_second": batch / seconds, "mfu": None, "data_wait_seconds": 0.001,
                "step_seconds": seconds, "cost_usd": None,
            })  # fmt: skip
    return events


def metric(found, name, point=-1):
    return found.points[point].metric(name)


def test_runs_of_other_batches_and_log_lines_are_compared_at_equal_tokens(make):
    found = compare_runs([make("a"), make("b", last=300, shift=-0.1, every=7, batch=2 * BATCH, seed=1)])
    assert (found.first, found.last) == (2 * BATCH, 400 * BATCH)
    assert [one.share for one in found.points] == [0.25, 0.5, 0.75, 1.0]
    assert metric(found, "train/step").values == [400, 200]
    loss = metric(found, "train/loss")
    assert loss.differences[0] is None and loss.differences[1] == pytest.approx(-0.1, abs=0.06)
    error = 0.06 * math.hypot(1 / math.sqrt(10), 1 / math.sqrt(8))  # of means over 10 and 8 steps
    assert loss.sigmas[1] == pytest.approx(loss.differences[1] / error, rel=0.5)
    assert metric(found, "train/bpb").values[0] == pytest.approx(loss.values[0] / 2.4)
    assert metric(found, "perf/mfu") is None  # of neither run
    assert metric(found, "run/goodput").values == pytest.approx([1.0, 1.0], abs=0.01)
    assert [(one.key, one.values) for one in found.settings] == [("train.global_batch", [16, 32])]
    assert found.same_tokens and found.notes == []


def test_noise_of_the_same_samples_is_in_both_runs_and_not_in_their_difference(make, logs):
    def events(shift, seed):
        found = trained(logs, shift=shift)
        return [one | {"loss": one["loss"] + random.Random(one["step"] + seed).gauss(0, 0.002)}
                if one["kind"] == "step" else one for one in found]  # fmt: skip

    a, b, c = make("a", events(0.0, 1000)), make("b", events(0.02, 2000)), make("c", events(0.02, 3000))
    other_seed = RunFolder(c).config
    other_seed.write_text(other_seed.read_text().replace("seed = 1234", "seed = 99"))
    loss = metric(compare_runs([a, b, c]), "train/loss")
    assert loss.paired == [False, True, False]
    assert loss.sigmas[1] == pytest.approx(0.02 / (0.002 * math.sqrt(2 / 10)), rel=0.5)
    assert 0 < loss.sigmas[2] < 1.5


@pytest.mark.parametrize(
    ("by", "last", "steps"),
    [("steps", 300, [300, 300]), ("flops", 400 * BATCH * 7.2e6, [400, 100]), ("time", 30.0, [300, 300])],
)
def test_other_axes(make, by, last, steps):
    found = compare_runs([make("a"), make("b", last=300, batch=2 * BATCH)], by)
    assert found.last == pytest.approx(last) and metric(found, "train/step").values == pytest.approx(steps, abs=0.01)


def test_void_steps_and_pauses_count_for_nothing(make, logs):
    events = trained(logs, last=200)
    bad = trained(logs, 201, 300, shift=50.0, clock=events[-1]["time"])[1:]
    back = {"kind": "rolled_back", "time": bad[-1]["time"], "from_step": 300, "to_step": 200}
    events += [*bad, back]
    went_back, whole = make("back", events), make("whole")
    found = compare_runs([whole, went_back])
    assert found.last == 200 * BATCH and metric(found, "train/loss").values[1] < 5
    assert metric(found, "run/roll_backs").values == [0, 0]  # it is after the last step that both have
    again = trained(logs, 201, 400, clock=back["time"] + 3600, attempt=1)
    found = compare_runs([whole, make("again", events + again)])
    assert metric(found, "train/loss").differences[1] == 0.0  # the steps that were trained again are those of `whole`
    assert metric(found, "run/roll_backs").values == [0, 1]
    assert metric(found, "run/train_seconds").values == pytest.approx([40, 50], abs=0.5)  # without the hour between
    assert difference_text(metric(found, "train/loss"), 1) == "equal"


def test_incidents_before_a_later_roll_back_still_count(make, logs):
    events = trained(logs, last=300)
    skip = {"kind": "skipped", "time": events[-1]["time"], "steps": [250], "reason": "finding"}
    back = {"kind": "rolled_back", "time": events[-1]["time"], "from_step": 300, "to_step": 200}
    again = trained(logs, 101, 150, clock=back["time"])[1:]
    run = make("b", [*events, skip, back, back | {"from_step": 200, "to_step": 100}, *again])
    found = compare_runs([make("a"), run])
    assert metric(found, "run/roll_backs").values == [0, 2]
    assert metric(found, "run/skipped_steps").values == [0, 1]
    assert metric(found, "run/goodput").values[1] == pytest.approx(150 / 350, abs=0.03)  # 200 of 350 steps are void


def test_a_log_without_its_head_counts_time_from_its_first_step(make, logs):
    whole = trained(logs, last=200)
    cut = [one for one in whole[1:] if one["step"] > 100]
    found = compare_runs([make("a", whole), make("cut", cut)])
    assert metric(found, "run/train_seconds").values == pytest.approx([20.0, 9.9])
    assert metric(found, "run/train_seconds", 0).values == pytest.approx([12.6, 2.5], abs=0.1)
    assert "The log of B lacks its start: its training time counts from step 101." in found.notes
    again = trained(logs, 201, 400, clock=whole[-1]["time"] + 3600, attempt=1)
    found = compare_runs([make("c"), make("cut-again", cut + again)], "time")
    assert found.last == pytest.approx(29.9) and metric(found, "train/step").values == pytest.approx([299, 400])


def test_means_are_over_equal_ranges_and_not_over_steps_before_a_loss_that_is_not_finite(make, logs):
    """Eight steps of the large batch are most of the range: as many small ones are later, where the loss is lower."""
    large = make("b", last=10, batch=8 * BATCH, seed=1)
    loss = metric(compare_runs([make("a"), large]), "train/loss")
    assert abs(loss.differences[1]) < 0.15 and abs(loss.sigmas[1]) < 3
    broken = [one | {"loss": math.nan} if one["kind"] == "step" and one["step"] > 300 else one for one in trained(logs)]
    found = compare_runs([make("c"), make("broken", broken)])
    assert metric(found, "train/loss", 1).values[1] == metric(found, "train/loss", 1).values[0]
    assert metric(found, "train/loss").values[1] is None and "100 steps whose loss is not finite" in found.notes[0]


def test_steps_between_log_lines_have_their_own_times(make, logs):
    """The steps of a log line are written at once, with the time of the line."""
    events, line = [], 0.0
    for event in reversed(trained(logs, last=400, every=50)):
        line = event["time"] if event["kind"] == "progress" else line
        events.insert(0, event | {"time": event["time"] if event["kind"] == "run_started" else line})
    found = compare_runs([make("a", events), make("b", last=325)], "time")
    assert metric(found, "train/step").values == pytest.approx([325, 325])


def test_runs_of_one_name_are_labeled_by_their_folders(make):
    runs = [make("a"), make("b")]
    assert compare_runs(runs).labels == ["a", "b"]
    config = RunFolder(runs[1]).config
    config.write_text(config.read_text().replace('name = "b"', 'name = "a"'))
    assert [run.name for run in compare_runs(runs).runs] == ["a", "a"]
    assert compare_runs(runs).labels == ["a", "b"]


def test_losses_of_other_tokenizers_are_not_compared(make, logs):
    runs = [make("a"), make("b", events=[one | {"data_fingerprint": ""} for one in trained(logs, shift=0.5)])]
    for run, letter in zip(runs, "ab", strict=True):
        tokens = RunFolder(run).config.parent / "tokens"
        shard = Shard(name="s-0", source="s", tokens=9, documents=1, text_bytes=9, blocks_sha256="5" * 64,
                      documents_sha256="6" * 64)  # fmt: skip
        manifest = TokenManifest(dtype="uint16", vocab_size=4096, eot_id=0, tokenizer_sha256=letter * 64,
                                 corpus_sha256="1" * 64, split="train", block_bytes=1 << 20, seed=1,
                                 shards=(shard,))  # fmt: skip
        write_json(tokens / "manifest.json", to_dict(manifest))
        text = RunFolder(run).config.read_text()
        RunFolder(run).config.write_text(text.replace('"../data/tokens/train"', '"tokens"'))
    found = compare_runs(runs)
    assert found.same_tokens is False and found.measure == "train/bpb" and "different tokenizers" in found.notes[0]
    assert metric(found, "train/loss").differences == [None, None]
    assert metric(found, "train/bpb").differences[1] == pytest.approx(0.5 / 2.4, abs=0.05)


def test_evaluations_are_compared_between_their_steps_and_not_beyond(make, logs):
    def scored(step, bpb):
        task = {
            "kind": "task_scores",
            "time": logs.START,
            "step": step,
            "scores": {"t": {"acc": bpb / 10, "acc_stderr": 0.03}},
        }
        return [logs.evaluation(logs.START, step, bpb), task]

    a = make("a", events=[*trained(logs), *scored(100, 2.0), *scored(300, 1.0), *scored(400, 0.9)])
    b = make("b", events=[*trained(logs), *scored(200, 1.2)])
    c = make("c", events=[*trained(logs), *scored(400, 1.5)])
    found = compare_runs([a, b], "steps")
    bits = [metric(found, "eval/bpb", point) for point in range(4)]
    assert [one.values[0] for one in bits] == pytest.approx([1.99875, 1.4975, 0.99975, 0.9], abs=0.01)
    assert bits[1].interpolated[0] and not bits[3].interpolated[0]
    assert [one.values[1] for one in bits] == [None, 1.2, None, None]
    assert metric(found, "eval/t/acc").values == [pytest.approx(0.09), None]
    assert metric(compare_runs([a, c]), "eval/t/acc").sigmas[1] == pytest.approx(0.06 / (0.03 * math.sqrt(2)))


def test_the_noise_has_no_part_from_a_slope_or_a_spike():
    chance = random.Random(1)
    values = np.linspace(9, 3, 400) + [chance.gauss(0, 0.06) for _ in range(400)]
    assert noise_between_steps(values) == pytest.approx(0.06, rel=0.15)
    values[200] = 90.0
    assert noise_between_steps(values) == pytest.approx(0.06, rel=0.15)
    assert noise_between_steps(values[:4]) is None


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_page_has_a_line_per_run_and_hostile_names_stay_text(make, tmp_path, logs):
    runs = [make("a"), make("b", shift=-0.3)]
    for run in runs:
        config = RunFolder(run).config
        config.write_text(
            config.read_text().replace(f'name = "{run.name}"', f"name = {json.dumps(HOSTILE + run.name)}")
        )
    events = [json.loads(line) for line in RunFolder(runs[1]).events.read_text().splitlines()]
    start = events[0] | {"versions": {HOSTILE: HOSTILE}}
    task = {"kind": "task_scores", "time": logs.START, "step": 100, "scores": {HOSTILE: {HOSTILE: 0.5}}}
    logs.write_events(runs[1], [start, *events[1:], task, task | {"step": 200}])
    write_page(compare_runs(runs), tmp_path / "out.html")
    page = Tags()
    page.feed((tmp_path / "out.html").read_text())
    names = {tag for tag, _ in page.found}
    assert not names & {"script", "img", "link", "iframe"} and HOSTILE in page.text
    kinds = [attrs["class"] for tag, attrs in page.found if tag == "polyline"]
    assert kinds.count("run-1") >= 4 and kinds.count("run-2") >= 4
    assert "train.global_batch" not in page.text and "-0.3" in page.text


def test_the_command_prints_80_columns_and_json_of_the_same_numbers(make, capsys, tmp_path):
    runs = [str(make(name, shift=shift)) for name, shift in (("a", 0.0), ("b", 0.2), ("c", -0.2))]
    assert main(["compare", *runs, "--out", str(tmp_path / "page.html")]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "page.html").exists() and "at 1.64M tokens" in text and "▁" in text
    assert [line for line in text.splitlines() if len(line) > 80 and "/" not in line] == []
    assert main(["compare", *runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["by"], len(found["runs"]), found["same_tokenizer"]) == (1, "tokens", 3, True)
    (loss,) = [one for one in found["points"][-1]["metrics"] if one["name"] == "train/loss"]
    assert [f"{value:.4f}" in text for value in loss["values"]] == [True] * 3
    assert loss["differences"] == [None, pytest.approx(0.2), pytest.approx(-0.2)]


def test_what_cannot_be_compared_is_refused(make, tmp_path, logs, capsys):
    one = str(make("a"))
    for line, code in (
        ([one], "E-COMPARE-RUNS"),
        ([one, f"{one}/../a"], "E-COMPARE-RUNS"),
        ([one, str(tmp_path)], "E-RUN-FOLDER"),
        ([one, str(make("empty", events=[logs.started(logs.START, 0, 0)]))], "E-COMPARE-NO-STEPS"),
    ):
        assert main(["compare", *line, "--json"]) == 2
        assert reported(capsys.readouterr().out, code)["fix"]
    restored = str(
        make("restored", events=[{"kind": "finished", "time": logs.START, "step": 9, "tokens": 9, "seconds": 0.0}])
    )
    assert main(["compare", one, restored, "--json"]) == 2
    fix = reported(capsys.readouterr().out, "E-COMPARE-NO-STEPS")["fix"]
    assert "finished" in fix and "wait" not in fix
    late = make("late", events=trained(logs, 500, 600))
    with refused("E-COMPARE-NO-OVERLAP"):
        compare_runs([late, make("b")], "steps")
