"""The server: what it answers, refuses, and never lets through."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import ingot.planner.web
from ingot import plan
from ingot.planner.show.plans import plan_lines
from ingot.planner.web.views import _duration_tiles
from ingot.theory.rules import run_from_dict
from ingot.web.design import STATIC as SHARED

STATIC = Path(ingot.planner.web.__file__).parent / "static"
SMALL = "model=llama3-8b&cluster=8xh100&batch=64"
PIPELINE = f"{SMALL}&pp=4&zero=1"


def test_a_plan_comes_with_its_settings_and_its_numbers(client):
    found = client.get(f"/api/plan?{SMALL}&tp=8&recompute=full&moved=tp").json()
    assert found["state"]["tp"] == 8
    assert found["problems"] == []
    plan = found["plan"]
    assert plan["verdict"]["fits"] is True
    assert plan["memory"]["used"].endswith("GiB")
    assert sum(part["share"] for part in plan["memory"]["parts"]) == pytest.approx(
        plan["memory"]["capacity_share"] * _percent(plan["memory"]["of_capacity"]), rel=0.02
    )
    assert {tile["key"] for tile in plan["tiles"]} >= {"step", "mfu", "days", "cost", "goodput"}
    assert any(line["line"] == "tp" and line["exposed_share"] > 0 for line in plan["communication"])
    assert sum(part["share"] for part in plan["step"]) == pytest.approx(1)


def _percent(text):
    return float(text.removesuffix("%")) / 100


def test_the_page_and_the_command_line_say_the_same(client):
    from ingot.planner.request.planning import plan

    ours = plan(
        "llama3-8b", cluster="8xh100", tokens="100B", batch=512, seq=4096, steps=47684,
        pinned={"tp": 2, "dp_shard": 4, "micro_batch": 1, "zero": 3, "recompute": "selective", "pp": 1, "cp": 1},
    )  # fmt: skip
    query = "model=llama3-8b&cluster=8xh100&tokens=100B&batch=512&seq=4096&tp=2&recompute=selective"
    theirs = client.get(f"/api/plan?{query}").json()
    from ingot.units import format_bytes, format_seconds

    assert theirs["plan"]["memory"]["used"] == format_bytes(ours.best.plan.total_memory_bytes)
    assert theirs["plan"]["tiles"][0]["value"] == format_seconds(ours.best.plan.step_seconds)


def test_a_link_that_leaves_things_open_stays_open(client):
    link = client.get("/api/plan?model=llama3-70b&cluster=128x8xh100&tp=8").json()["link"]
    assert link == "model=llama3-70b&cluster=128x8xh100&tp=8"


def test_an_illegal_layout_says_why_and_has_no_plan(client):
    found = client.get(f"/api/plan?{SMALL}&tp=3&moved=tp").json()
    assert found["plan"] is None
    assert "does not divide 8 devices" in found["problems"][0]["message"]
    assert client.get(f"/api/run.toml?{SMALL}&cluster=x").status_code == 400


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/api/plan?nonsense=1", "there is no setting"),
        ("/api/plan?model=gpt-17", "no model preset"),
        ("/api/plan?cluster=8xh1000", "no device"),
        ("/api/plan?cluster=99999x8xh100", "has 799,992 devices"),
        ("/api/plan?tp=1.5", "tp is '1.5'"),
        ("/api/plan?moved=everything", "is not a setting"),
        ("/api/timeline?window=all", "there is no window"),
        ("/api/timeline?pp=1", "no pipeline"),
        ("/api/compare?a=tp%3D2", "keys of this comparison"),
        ("/api/compare?a=tp%3D2&b=tp%3D2%26tp%3D4", "tp is given twice"),
        ("/api/run.toml?cluster=v5p-256", "v5p-256"),
        ("/api/run.toml?recipe=mxfp8", "recipe mxfp8"),
    ],
)
def test_errors_are_json_with_a_fix(client, path, sentence):
    answer = client.get(path)
    assert answer.status_code == 400
    error = answer.json()
    assert set(error) == {"found", "rule", "fix"}
    assert sentence in error["found"]
    assert error["rule"] or error["fix"]


def test_unknown_paths_and_other_methods(client):
    assert client.get("/api/secrets").status_code == 404
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404
    assert client.post("/api/plan").status_code == 405
    assert client.get("/api/secrets").json()["found"] == "Not Found"


def test_a_failure_of_the_planner_is_told_without_its_traceback(client, monkeypatch, capsys):
    from ingot.planner.web import answers

    def broken(state):
        raise RuntimeError("a secret of the machine")

    monkeypatch.setattr(answers, "answer", broken)
    answer = client.get(f"/api/plan?{SMALL}")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "a secret of the machine" in capsys.readouterr().err


def test_pages_of_others_are_kept_out(client):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    answer = client.get("/api/options", headers={"origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    for path in ("/", "/static/main.js", "/api/options", "/api/secrets"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"


def test_nothing_that_is_served_points_elsewhere_or_writes_markup():
    files = [*STATIC.iterdir(), *SHARED.iterdir()]
    assert {file.name for file in files} >= {"index.html", "main.js", "page.css"}
    for file in files:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z]", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)), file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file
        assert not re.search(r"<[^>]+\son\w+=|<style|style=", text), file


def test_every_script_and_style_is_there(client):
    page = client.get("/").text
    wanted = re.findall(r'(?:src|href)="(/(?:static|shared)/[^"]+)"', page)
    for script in STATIC.glob("*.js"):
        wanted += [f"/static/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())]
        wanted += re.findall(r'from "(/shared/[^"]+)"', script.read_text())
    assert len(wanted) > 10
    for path in wanted:
        assert client.get(path).status_code == 200, path


def test_the_run_file_is_one_that_check_accepts(client, tmp_path):
    answer = client.get(f"/api/run.toml?{PIPELINE}&recompute=full&tokens=1B")
    assert answer.status_code == 200
    assert answer.headers["content-disposition"] == 'attachment; filename="run.toml"'
    run = tomllib.loads(answer.text)
    assert (run["parallel"]["pp"], run["parallel"]["zero"], run["train"]["global_batch"]) == (4, 1, 64)

    from ingot.planner.request.clusters import load_cluster
    from ingot.planner.run.check import check_run

    (tmp_path / "run.toml").write_text(answer.text, encoding="utf-8")
    findings = check_run(tmp_path / "run.toml", load_cluster("8xh100"), cores=64)
    assert not [found for found in findings if found.severity == "error" and not found.missing_here]


def test_fixes_are_settings_with_which_it_fits(client):
    query = "model=llama3-8b&cluster=8xh100&batch=64&micro_batch=8"
    assert client.get(f"/api/plan?{query}").json()["plan"]["verdict"]["fits"] is False
    fixes = client.get(f"/api/fixes?{query}").json()
    assert fixes
    for fix in fixes:
        assert client.get("/api/plan", params=fix["words"]).json()["plan"]["verdict"]["fits"] is True, fix


def test_nothing_is_proposed_where_no_single_change_helps(client):
    assert client.get("/api/fixes?model=llama3-405b&cluster=8xh100&batch=64").json() == []


def test_two_plans_side_by_side(client):
    a, b = f"{SMALL}&recompute=full", f"{SMALL}&recompute=full&tp=8"
    found = client.get("/api/compare", params={"a": a, "b": b}).json()
    rows = {row["label"]: row for row in found["rows"]}
    assert rows["layout"]["a"] == "dp_shard 8"
    assert rows["layout"]["b"] == "tp 8"
    assert "recompute" not in rows
    step = rows["step"]
    ours = [client.get(f"/api/plan?{query}").json()["plan"]["tiles"][0]["value"] for query in (a, b)]
    assert [step["a"], step["b"]] == ours
    assert (step["change"].startswith("+"), step["judged"]) in ((True, -1), (False, 1))


def test_a_comparison_with_an_illegal_plan_says_so(client):
    found = client.get("/api/compare", params={"a": SMALL, "b": "model=llama3-8b&batch=1"}).json()
    assert "for 8 data-parallel ranks" in found["problems"]["b"][0]


def test_what_can_be_picked_can_be_planned(client):
    options = client.get("/api/options").json()
    assert len(options["models"]) > 10
    assert len(options["devices"]) > 20
    for cluster in options["clusters"]:
        found = client.get("/api/plan", params={"model": "llama3-70b", "cluster": cluster["name"]}).json()
        assert found["state"]["cluster"] == cluster["name"]
        parts = found["cluster"]
        again = client.get(
            "/api/plan", params={"cluster": f"{parts['groups']}x{parts['each']}x{parts['device']}"}
        ).json()
        assert again["cluster"]["size"] == parts["size"]


def test_tpus_are_planned_and_not_trained_on(client):
    found = client.get("/api/plan?model=llama3-8b&cluster=v5p-256&batch=1024").json()
    assert found["plan"] is not None
    assert found["trains"] is False
    assert client.get("/api/plan?recipe=mxfp8").json()["trains"] is False
    assert client.get("/api/plan").json()["trains"] is True


def test_the_run_file_is_the_one_of_the_command_line(client):
    """The same steps, learning rate and checkpoints, by the same rules."""
    asked = {"model": "llama3-8b", "cluster": "8x8xh100", "tokens": "1T", "batch": "512", "recompute": "full"}
    pins = {"tp": 1, "pp": 1, "cp": 1, "dp_replicate": 1, "zero": 3, "micro_batch": 1, "recompute": "full"}
    mine = plan("llama3-8b", cluster="8x8xh100", tokens="1T", batch=512, pinned=pins).best
    served = run_from_dict(tomllib.loads(client.get("/api/run.toml", params=asked).text), where=str)
    assert served == mine.run


def test_a_picture_of_a_predicted_step_says_so_beside_a_given_mfu(client):
    asked = "model=llama3-8b&cluster=8xh100&batch=64&pp=2"
    assert "as predicted" in client.get(f"/api/timeline?{asked}&mfu=0.4").json()["step"]
    assert "as predicted" not in client.get(f"/api/timeline?{asked}").json()["step"]


@pytest.mark.parametrize(("model", "cluster"), [("llama3-8b", "8x8xh100"), ("qwen3-0.6b", "8xh100")])
def test_what_is_left_open_is_chosen_as_by_the_command_line(client, model, cluster):
    state = client.get(f"/api/plan?model={model}&cluster={cluster}&tokens=1T").json()["state"]
    train = plan(model, tokens="1T", cluster=cluster, top=1).best.run.train
    assert (state["seq"], state["batch"]) == (train.seq_len, train.global_batch)


@pytest.mark.parametrize(("days", "text"), [(0.5, "12 h"), (1.2, "1.2 d"), (1.9, "1.9 d"), (2.5, "2.5 d")])
def test_the_page_and_the_command_line_write_a_duration_in_the_same_way(days, text):
    best = plan("llama3-8b", tokens="1B", cluster="h200", seq=2048, batch=8).best
    outlook = replace(best.plan.outlook, days=days, productive_days=days)
    planned = replace(best, plan=replace(best.plan, outlook=outlook))
    (line,) = (line for line in plan_lines(planned) if line.startswith("days"))
    tile = next(tile for tile in _duration_tiles(planned.plan) if tile and tile["key"] == "days")
    assert f"{text} wall-clock" in line and tile["value"] == text and tile["note"].endswith(f"{text} without failures")
