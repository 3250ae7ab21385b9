"""Each function gives what its verb prints with --json, for the same input."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.expect import refused

import ingot
from ingot.api.building import build_facts
from ingot.events import read_events


def plain(facts: dict) -> dict:
    """Return what --json prints of `facts`."""
    return json.loads(json.dumps(facts, default=str))


def test_plan(command, golden):
    code, printed = command("plan", "--model", "tiny", "--tokens", golden / "data", "--cluster", "8xh100", "--top", "2")
    found = plain(ingot.plan("tiny", tokens=golden / "data", cluster="8xh100", top=2).facts())
    assert code == 0 and printed["search"].pop("seconds") and found["search"].pop("seconds")
    assert found == printed


@pytest.mark.parametrize(
    ("settings", "cluster", "code"),
    [((), None, 0), (("train.steps=3", "optim.lr=0.5"), "8xh100", 0), (("parallel.tp=3",), "8xh100", 3)],
)
def test_check(command, golden, settings, cluster, code):
    run = golden / "dense-1-rank" / "run.toml"
    options = [word for setting in settings for word in ("--set", setting)] + (
        ["--cluster", cluster] if cluster else []
    )
    exit_code, printed = command("check", run, *options)
    found = ingot.check(run, overrides=settings, cluster=cluster)
    assert (exit_code, plain(found.facts())) == (code, printed)
    assert (found.exit_code, found.ok) == (code, not code) and found.code == printed.get("error", "")


def test_check_with_a_timeline(command, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    run, settings = golden / "dense-1-rank", ["parallel.pp=2", "train.device=auto"]
    code, printed = command("check", run, "--set", settings[0], "--set", settings[1], "--timeline", "gpipe")
    assert plain(ingot.check(run, overrides=settings, timeline="gpipe").facts()) == printed
    assert code == 0 and any("F" in line for line in printed["timeline"])
    with refused("E-PIPELINE-NONE"):
        ingot.check(run, timeline="")
    with refused("E-SIMULATE-ALONE", option="--patience"):
        ingot.check(run, patience=9.0)


def test_build_data(command, crawl_file, tmp_path):
    (tmp_path / "law.jsonl").write_text("".join(json.dumps({"body": f"the law {n}"}) + "\n" for n in range(3)))
    law = [f"{tmp_path}/law.jsonl", "text=body"]
    options = ["--vocab-size", 300, "--preset", "gopher", "--set", "quality.gopher.enabled=false", "--runner", "inline"]
    words = ["data", "build", crawl_file, "--source", "law", *law, "--out", tmp_path / "one", *options]
    code, printed = command(*words, "--set", "language.enabled=false")
    fractions: list[float] = []
    built = ingot.build_data(
        {"web": crawl_file, "law": law},
        tmp_path / "two",
        vocab_size=300,
        preset="gopher",
        overrides=["quality.gopher.enabled=false", "language.enabled=false"],
        runner="inline",
        progress=lambda fraction, text: fractions.append(fraction),
    )
    found = plain(build_facts(built))
    for facts, folder in ((printed, "one"), (found, "two")):
        assert facts.pop("tokenizer") == f"{tmp_path}/{folder}/tokens/tokenizer.json"
        for stage in facts["corpus"]["funnel"]:
            stage["seconds"] = 0.0
    assert code == 0 and found == printed and fractions and built.fresh
    assert set(found["corpus"]["sources"].values()) == {"web", "law"}


def test_train_and_resume(command, golden):
    """The run is past the step already, so no rank starts; test_train_from_the_start trains."""
    run, lines = golden / "dense-1-rank", []
    code, printed = command("train", run, "--until-step", 4)
    assert (code, printed["step"]) == (10, 4)
    assert plain(ingot.train(run, until_step=4, say=lines.append).facts()) == printed
    assert plain(ingot.resume(run, until_step=4).facts()) == printed
    assert any("already at step 4" in line for line in lines)


def test_evaluate_and_load_model(command, golden):
    code, printed = command("eval", golden / "dense-1-rank", "--device", "cpu", "--max-tokens", 200)
    model = ingot.load_model(golden / "dense-1-rank", device="cpu")
    assert code == 0 and plain({"step": model.step} | ingot.evaluate(model, max_tokens=200).facts()) == printed
    other = ingot.evaluate(ingot.load_run(golden / "dense-1-rank"), max_tokens=200, device="cpu")
    assert other.facts() == {name: value for name, value in printed.items() if name != "step"}
    prompts = ["Stone", "Iron"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    code, printed = command("sample", golden / "dense-1-rank", *words, "--max-tokens", 5, "--seed", 3)
    texts = model.generate(prompts, max_tokens=5, seed=3)
    assert code == 0 and [sample["text"] for sample in printed["samples"]] == texts
    assert model.generate("Stone", max_tokens=5, seed=3) == texts[:1]
    assert model.tokenizer is not None and model.module(model_input()).shape == (1, 3, 300)
    assert "step 4" in repr(model) and model.config.name == "dense-1-rank" and model.device.type == "cpu"


def model_input():
    import torch

    return torch.tensor([[1, 2, 3]])


def test_export(command, golden, tmp_path):
    run = golden / "dense-1-rank"
    code, printed = command("export", run, "--out", tmp_path / "one", "--dtype", "bfloat16")
    found = plain(ingot.export(ingot.Run(run), tmp_path / "two", dtype="bfloat16").facts())
    assert (printed.pop("path"), found.pop("path")) == (f"{tmp_path}/one", f"{tmp_path}/two")
    assert code == 0 and found == printed and found["dtype"] == "bfloat16"


def test_status_report_and_checkpoints(command, golden):
    run = ingot.load_run(golden / "dense-2-ranks" / "run.toml")
    assert plain(vars(run.status())) == command("status", run.path)[1]
    printed = command("report", run.path)[1]
    assert plain({"html": run.report().html, "markdown": run.report().markdown}) == {
        name: printed[name] for name in ("html", "markdown")
    }
    assert run.verify().as_dict() == command("ckpt", "verify", run.path)[1]


@pytest.mark.slow
def test_train_from_the_start(golden, tmp_path, command):
    """A run that the function starts and continues has the losses of one that the command trains."""
    config = golden / "dense-1-rank" / "run.toml"
    first = ingot.train(config, tmp_path / "one", until_step=4)
    assert (first.step, first.finished) == (4, False)
    last = ingot.resume(first.run)
    assert (last.step, last.finished) == (6, True)
    assert command("train", config, "--out", tmp_path / "two")[0] == 0

    def losses(folder: Path) -> list[float]:
        return [event["loss"] for event in read_events(folder / "events.jsonl", "step")]

    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert ingot.Run(tmp_path / "one").metrics()["step"] == [1, 2, 3, 4, 5, 6]
