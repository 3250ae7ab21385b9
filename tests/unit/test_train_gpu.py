"""benchmarks/train_gpu.py without a GPU: which parts are played again, what becomes of failures, the written page, the
comparison of layouts, the pictures, and with --smoke the programs of the parts."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import train_gpu
    from gpu_parts import page, runs
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

GPU = "NVIDIA H200"


def run_parts(folder, parts, **options):
    """Play made-up parts and return the lines by name afterwards, and the exit code."""
    defaults = {"results": folder / "lines.json", "again": False, "minutes": 0.0, "smoke": False, "rounds": 1}
    made = [train_gpu.Part(name, gpus, "", play) for name, (gpus, play) in parts.items()]
    code = train_gpu.play_all(made, argparse.Namespace(**defaults | options), GPU, 1)
    return {line["part"]: line for line in train_gpu.read_lines(folder / "lines.json")}, code


def test_a_part_with_a_line_is_not_played_again_and_a_failure_stops_no_other(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    played = []

    def good(session):
        played.append("good")
        return {"passed": 1, "skipped": 0}

    def bad(session):
        played.append("bad")
        raise RuntimeError("out of memory")

    def late(session):
        played.append("late")
        raise train_gpu.OutOfTime([])

    parts = {"bad": (1, bad), "late": (1, late), "good": (1, good), "two": (2, good)}
    lines, code = run_parts(tmp_path, parts)
    assert played == ["bad", "late", "good"] and code == 1
    assert {name: line["status"] for name, line in lines.items()} == {
        "bad": "failed",
        "late": "failed",
        "good": "measured",
    }
    assert "out of memory" in lines["bad"]["error"] and lines["good"]["device"] == GPU
    _, code = run_parts(tmp_path, parts)
    assert played == ["bad", "late", "good"] and code == 0
    run_parts(tmp_path, {"good": parts["good"]}, again=True)
    monkeypatch.setattr(train_gpu, "source_hash", lambda: "another state of the source")
    assert len(run_parts(tmp_path, {"good": parts["good"]})[0]) == 3
    assert played == ["bad", "late", "good", "good", "good"]
    # A part that the end of the call cuts off has no line.
    assert "late" not in run_parts(tmp_path / "cut", {"late": parts["late"]}, minutes=1)[0]


def test_a_stress_goes_on_where_it_was(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    asked = []

    def play(self, *words, text=""):
        asked.append(json.loads(text))
        if len(asked) == 1:
            raise train_gpu.OutOfTime(['{"left": 3}', '{"a": {}}', '{"b": {"error": "hangs"}}', '{"c": {'])
        return ['{"left": 1}', '{"c": {}}']

    monkeypatch.setattr(train_gpu.Session, "play", play)
    stress = {"stress-1": (1, lambda session: train_gpu.play_stress(session, 1))}
    lines, code = run_parts(tmp_path, stress)
    assert (lines["stress-1"]["status"], lines["stress-1"]["results"]["left"], code) == ("unfinished", 1, 0)
    lines, code = run_parts(tmp_path, stress)
    results = lines["stress-1"]["results"]
    assert asked == [[], ["a", "b"]] and code == 1 and lines["stress-1"]["status"] == "failed"
    assert list(results["layouts"]) == ["a", "b", "c"] and (results["left"], results["failed"]) == (0, 1)


def test_a_contestant_that_fails_has_an_error_and_the_others_figures(monkeypatch):
    step = {"step_seconds": 2.0, "warm_up_seconds": 9.0, "peak_memory_bytes": 2**30, "last_loss": 1.0}

    def play(self, role, kind, case, name, tokens):
        if name == "torchtitan":
            raise RuntimeError("No module named 'torchtitan'")
        return ["printed by a library", json.dumps(step | {"step_seconds": 2.0 if name == "ingot" else 4.0})]

    monkeypatch.setattr(train_gpu.Session, "play", play)
    session = train_gpu.Session(GPU, False, 2, float("inf"), {})
    found = train_gpu.play_steps(session, "0.5b")["contestants"]
    assert found["ingot"]["tokens_per_second"] == 8 * 4096 / 2 == 2 * found["transformers"]["tokens_per_second"]
    assert found["ingot"]["turns"] == 2 and "torchtitan" in found["torchtitan"]["error"]
    # 6 FLOP for each matmul parameter and the causal half of attention, over 989 TFLOP/s
    matmul = 22 * (2 * 1280**2 + 2 * 1280 * 640 + 3 * 1280 * 3584) + 32000 * 1280
    flops = 6 * matmul + 6 * 22 * 1280 * 4096
    assert found["ingot"]["mfu_norm"] == pytest.approx(8 * 4096 / 2 * flops / 989e12, rel=1e-3)
    assert set(train_gpu.play_steps(session, "documents")["contestants"]) == {"ingot", "ingot, no borders"}

    def play_late(self, role, kind, case, name, tokens):
        if name != "ingot":
            raise train_gpu.OutOfTime([])
        return [json.dumps(step)]

    monkeypatch.setattr(train_gpu.Session, "play", play_late)
    late = train_gpu.play_steps(session, "0.5b")["contestants"]
    assert late["ingot"]["turns"] == 2 and "out of time" in late["transformers"]["error"]
    with pytest.raises(train_gpu.OutOfTime):  # the next call has the whole time
        train_gpu.play_steps(replace(session, cut=True), "0.5b")


def test_the_page_has_what_was_measured_and_says_what_was_not():
    parts, pictures = list(train_gpu.parts()), {name: ["picture"] for name in page._KINDS}
    empty = page.page_text([], parts, pictures)
    for name in parts:
        assert any(f"`{name}`" in row and page.EMPTY in row for row in empty.splitlines())
    figures = {"tokens_per_second": 12345.0, "mfu_norm": 0.5, "peak_memory_bytes": 2**30}
    about = {"device": GPU, "torch": "2.11.0", "commit": "abc", "source": "def", "date": "2026-01-01"}
    steps = {"contestants": {"ingot": figures, "transformers": {"error": "no room"}}}
    lines = [{"part": "3b", "status": "measured", "results": steps} | about]
    lines += [{"part": "tests-hang", "status": "failed", "error": "1 of 2 tests failed: test_it"} | about]
    full = page.page_text(lines, parts, pictures)
    (row,) = [row for row in full.splitlines() if row.startswith("| `3b`")]
    assert (
        "12,345, 50.0%, 1.0 GiB | no result: no room | not measured |" in row
        and "NVIDIA H200, torch 2.11.0, abc" in row
    )
    assert "1 of 2 tests failed: test_it" in full
    assert len(set(empty.splitlines()) - set(full.splitlines())) == 2


def test_the_page_of_the_project_names_every_part():
    text = page.PAGE.read_text(encoding="utf-8")
    assert [name for name in train_gpu.parts() if f"`{name}`" not in text] == []
    assert all(f"### {title}\n" in text for title, _ in page._KINDS.values())


def test_a_report_of_pytest_is_counted(tmp_path):
    report = tmp_path / "report.xml"
    cases = '<testcase name="a"/><testcase name="b"><skipped/></testcase>'
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert train_gpu.read_report(report) == {"passed": 1, "skipped": 1}
    for wrong in (f'{cases}<testcase name="c"><failure/></testcase>', ""):
        report.write_text(f"<testsuites><testsuite>{wrong}</testsuite></testsuites>")
        with pytest.raises(RuntimeError, match="tests failed"):
            train_gpu.read_report(report)


def test_layouts_are_legal_and_have_every_schedule():
    found = list(runs.layouts(2))
    assert {settings["schedule"] for _, _, settings in found if settings["pp"] > 1} == set(runs.SCHEDULES)
    assert len({name for name, _, _ in found}) == len(found)


def test_a_layout_with_another_loss_or_norm_is_wrong():
    stress = pytest.importorskip("gpu_parts.stress")
    right = {p: {"loss": [4.0, 3.0], "gradient norm": [2.0, 1.0]} for p in ("fp32", "bf16")} | {"step_seconds": 0.1}
    assert "error" not in stress.compare(right, right)
    for precision, what, off in (
        ("fp32", "loss", 1.002),
        ("bf16", "gradient norm", 1.06),
        ("fp32", "loss", float("nan")),
    ):
        wrong = right | {precision: right[precision] | {what: [n * off for n in right[precision][what]]}}
        assert f"{what} in {precision}" in stress.compare(wrong, right)["error"]


def test_exchanges_are_drawn_from_their_start_to_the_wait():
    pytest.importorskip("torch")
    from gpu_parts.streams import Picture

    picture = Picture()
    picture.compute("F0")
    picture.begin("dp", "G", "gather")
    picture.compute("F1")
    picture.compute("L")
    picture.end("gather")
    picture.begin("tp", "R", "sum")
    picture.end("sum")
    picture.compute("B1")
    picture.end("gather")  # nothing is in flight
    assert picture.text() == "computes F0 F1 L . B1\ndp       .. G. G . ..\ntp       .. .. . R .."


def test_a_machine_without_a_gpu_measures_nothing(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["train_gpu.py", *words])
        return train_gpu.main()

    with pytest.raises(SystemExit, match="nothing was measured"):  # as text: exit code 1
        main()
    with pytest.raises(SystemExit, match="2"):
        main("--part", "8b")
    assert "no part is called 8b; the parts are: 0.5b," in capsys.readouterr().err
    assert main("--list") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("3b ")]
    assert "needs 1 GPU " in line and "MFU" in line


def smoke(*parts):
    command = [sys.executable, str(ROOT / "benchmarks" / "train_gpu.py"), "--smoke", "--part", *parts]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_programs_of_a_few_parts_run_on_a_cpu():
    found = smoke("documents", "tests-step-times", "stress-2")
    assert found.returncode == 0, found.stdout + found.stderr
    assert [line.split()[:2] for line in found.stdout.splitlines()] == [
        ["documents", "measured"], ["tests-step-times", "measured"], ["stress-2", "measured"]
    ]  # fmt: skip


@pytest.mark.nightly
def test_the_programs_of_all_parts_run_on_a_cpu():
    names = list(train_gpu.parts())
    found = smoke(*names)
    assert found.returncode == 0, found.stdout + found.stderr
    assert [line.split()[:2] for line in found.stdout.splitlines()] == [[name, "measured"] for name in names]


@pytest.mark.slow
def test_the_pictures_of_the_page_are_those_of_the_program():
    text = page.PAGE.read_text(encoding="utf-8")
    for pictures in page.traced_pictures().values():
        assert all(picture in text for picture in pictures)
