"""Run and Corpus: folders as objects."""

import json
import shutil

import pytest
from tests.expect import refused

import ingot


@pytest.fixture
def run(golden, tmp_path) -> ingot.Run:
    return ingot.Run(shutil.copytree(golden / "dense-1-rank", tmp_path / "run"))


def log(run: ingot.Run, *events: dict) -> None:
    run.paths.events.write_text("".join(json.dumps({"time": 1.0} | event) + "\n" for event in events))


def test_a_run_has_what_is_in_its_folder(golden):
    run = ingot.load_run(golden / "dense-1-rank")
    assert (run.name, run.config.train.steps, run.status().state) == ("dense-1-rank", 6, "stopped")
    assert run.paths.checkpoints == run.path / "checkpoints" and repr(run) == f"Run({str(run.path)!r})"
    ((step, damage),) = [(checkpoint.step, checkpoint.damage) for checkpoint in run.checkpoints()]
    assert (step, damage) == (4, "") and run.verify().exit_code == 0
    metrics = run.metrics()
    assert metrics["step"] == [1, 2, 3, 4] and {len(column) for column in metrics.values()} == {4}
    assert metrics["loss"] == [event["loss"] for event in run.events("step")]
    assert ingot.load_run(run.paths.config).path == run.path


def test_steps_that_were_trained_again_have_their_last_values(run):
    def step(number: int, loss: float, **more) -> dict:
        return {"kind": "step", "step": number, "loss": loss, "grad_norm": 1.0, "lr": 0.1} | more

    history = [
        {"kind": "run_started", "from_step": 0},
        *(step(number, 9.0) for number in range(1, 6)),
        {"kind": "run_started", "from_step": 2},
        step(3, 8.0),
        step(4, 8.0),
        {"kind": "rolled_back", "from_step": 4, "to_step": 3},
    ]
    log(run, *history)
    assert run.metrics()["step"] == [1, 2, 3], "step 4 was undone"
    log(run, *history, step(4, 7.0, scale=2.0))
    metrics = run.metrics()
    assert (metrics["step"], metrics["loss"]) == ([1, 2, 3, 4], [9.0, 9.0, 8.0, 7.0])
    assert metrics["scale"] == [None, None, None, 2.0] and "kind" not in metrics
    log(run)
    assert run.metrics() == {"step": [], "loss": [], "grad_norm": [], "lr": []}


def test_a_report_is_written(run, tmp_path):
    report = run.report(tmp_path / "report")
    assert report.html.stat().st_size and report.markdown.parent == tmp_path / "report"


def test_tables_of_notebooks_are_escaped(run, golden):
    run.paths.config.write_text(run.paths.config.read_text().replace('"dense-1-rank"', '"<b>"'))
    html = ingot.Run(run.path)._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html and "4/6" in html and html.count("<tr>") == 2
    assert ingot.Corpus(golden / "data")._repr_html_().startswith("<table><tr><th>stage</th>")


def test_a_folder_without_a_run_is_refused(tmp_path):
    for function in (ingot.Run, ingot.load_run):
        with refused("E-RUN-FOLDER"):
            function(tmp_path)
    with refused("E-RESUME-NOTHING", run=str(tmp_path)):
        ingot.resume(tmp_path)


def test_a_corpus_has_what_is_in_its_folder(golden):
    corpus = ingot.Corpus(golden / "data")
    documents = list(corpus)
    assert len(corpus) == len(documents) == 60 and corpus.sources == {"web": 60}
    assert corpus.text_bytes == sum(len(document["text"].encode()) for document in documents)
    assert list(corpus.documents("web")) == documents and not list(corpus.documents("other"))
    assert corpus.funnel[0].name == "read" and not list(corpus.dropped())
    assert corpus.tokens["train"].tokens > corpus.tokens["heldout"].tokens > 0
    assert corpus.path == ingot.Corpus(golden / "data" / "corpus").path and repr(corpus).startswith("Corpus(")


def test_a_damaged_or_missing_corpus_is_refused(golden, tmp_path):
    with refused("E-CORPUS-MISSING"):
        ingot.Corpus(tmp_path / "nowhere")
    corpus = ingot.Corpus(shutil.copytree(golden / "data" / "corpus", tmp_path / "corpus"))
    (file,) = corpus.path.glob("web-*.jsonl.gz")
    file.write_bytes(file.read_bytes() + b"\0")
    with refused("E-CORPUS-HASH"):
        list(corpus)
    assert corpus.tokens == {}
