import argparse
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.cli.data import classifier
from ingot.cli.terminal import Terminal
from ingot.data.classify.make import Source, load_card, make_classifier, read_labelled, read_texts
from ingot.data.classify.model import Scorer
from ingot.data.classify.train import Labelled
from ingot.storage import sha256_file

from .conftest import SETTINGS

pytest.importorskip("fasttext")


@pytest.fixture
def sources(tmp_path, examples):
    good, bad = tmp_path / "good.jsonl.gz", tmp_path / "bad.txt"
    with gzip.open(good, "wt") as file:
        file.writelines(json.dumps({"text": one.text}) + "\n" for one in examples if "good" in one.labels)
    bad.write_text("\n\n".join(one.text for one in examples if "bad" in one.labels))
    return [Source(good, "good"), Source(bad, "bad")]


def test_one_call_trains_measures_and_writes_a_card(sources, tmp_path, examples):
    out = tmp_path / "model.bin"
    card = make_classifier(sources, out, licence="own texts", settings=SETTINGS)
    assert card.trained + card.heldout == len(examples) and 20 < card.heldout < 60
    assert card.accuracy > 0.95 and all(metrics.auc > 0.95 for metrics in card.metrics)
    middle = next(one for one in card.metrics[0].thresholds if one.threshold == 0.5)
    assert middle.precision > 0.9 < middle.recall and 0.3 < middle.taken < 0.7
    assert Scorer(out).scores("theorem proof")["good"] > 0.9
    written = load_card(out)
    assert written["model_sha256"] == sha256_file(out) and written["licence"] == "own texts"
    assert written["files"] == {str(source.path): sha256_file(source.path) for source in sources}
    assert written["settings"]["dim"] == SETTINGS.dim


def test_a_card_of_another_model_is_refused(sources, tmp_path):
    out = tmp_path / "model.bin"
    make_classifier(sources, out, licence="own", settings=SETTINGS)
    out.write_bytes(out.read_bytes()[:-1] + b"x")
    with refused("E-CARD-OTHER-MODEL", model=str(out)):
        load_card(out)


def test_texts_that_begin_alike_are_on_one_side(tmp_path):
    """A model that looks at 20 characters would be measured on what it has learned."""
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("".join(f"twenty good characters {n}\n" for n in range(200)))
    bad.write_text("".join(f"{n:03d} bad ones that differ {n}\n" for n in range(200)))
    card = make_classifier(
        [Source(good, "positive"), Source(bad, "negative")],
        tmp_path / "model.bin",
        licence="own",
        settings=replace(SETTINGS, characters=20),
    )
    assert card.labels["positive"] == 200  # else held out, all of them


def test_recall_falls_as_the_threshold_rises(sources, tmp_path):
    card = make_classifier(sources, tmp_path / "model.bin", licence="own texts", settings=SETTINGS)
    for metrics in card.metrics:
        recalls = [one.recall for one in metrics.thresholds]
        assert recalls == sorted(recalls, reverse=True)


def test_a_licence_is_asked_for_and_nothing_overwritten(sources, tmp_path):
    out = tmp_path / "model.bin"
    with refused("E-CLASSIFIER-LICENSE"):
        make_classifier(sources, out, licence=" ", settings=SETTINGS)
    out.write_text("mine")
    with refused("E-CLASSIFIER-EXISTS", path=str(out)):
        make_classifier(sources, out, licence="x", settings=SETTINGS)
    assert out.read_text() == "mine"


def test_labelled_files_of_both_kinds(tmp_path):
    lines, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("__label__x one two\n__label__x __label__y three\n")
    rows.write_text('{"text": "one two", "label": "x"}\n{"text": "three", "label": ["x", "y"]}\n')
    wanted = [Labelled("one two", ("x",)), Labelled("three", ("x", "y"))]
    assert list(read_labelled(lines)) == list(read_labelled(rows)) == wanted


@pytest.mark.parametrize(
    ("name", "content", "code", "line"),
    [
        ("a.txt", "no label here", "E-EXAMPLE-LABEL", 1),
        ("a.jsonl", '{"text": "x"}', "E-EXAMPLE-LABEL", 1),
        ("a.jsonl", '{"text": "x", "label": "two words"}', "E-EXAMPLE-LABEL", 1),
        ("a.jsonl", '{"label": "x"}', "E-EXAMPLE-FIELD", 1),
        ("a.jsonl", '{"text": 3, "label": "x"}', "E-EXAMPLE-FIELD", 1),
        ("a.txt", b"__label__x \xff", "E-EXAMPLES-UNREADABLE", 1),
    ],
)
def test_bad_lines_are_named(tmp_path, name, content, code, line):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(code, path=str(path), line=line):
        list(read_labelled(path))


def test_missing_files_are_named(tmp_path):
    with refused("E-EXAMPLES-MISSING", path=str(tmp_path / "none.txt")):
        list(read_texts(tmp_path / "none.txt"))


def parsed(verb, *words):
    parser = argparse.ArgumentParser()
    verb.configure_classifier(parser)
    return parser.parse_args([str(word) for word in words])


def test_the_verb_from_end_to_end(sources, tmp_path, capsys):
    def run(*words: object) -> dict:
        capsys.readouterr()
        classifier.run_classifier(parsed(classifier, *words), Terminal(json_mode=True))
        return json.loads(capsys.readouterr().out)

    good, bad, out = sources[0].path, sources[1].path, tmp_path / "model.bin"
    small = ("--set", "dim=8", "--set", "buckets=4096", "--set", "min_count=2", "--set", "batch=16")
    learn = ("train", "--positive", good, "--negative", bad, "--licence", "own", "--out", out)
    trained = run(*learn, *small)
    assert trained["accuracy"] > 0.95 and run("show", out) == trained
    scored = run("score", out, good, "-n", 3)
    assert [row["scores"]["positive"] > 0.5 for row in scored["texts"]] == [True] * 3
    with refused("E-CONFIG-SETTINGS", keys=["dims"], meant={"dims": ["dim"]}):
        run(*learn, "--set", "dims=8")
    classifier.run_classifier(parsed(classifier, "show", out), Terminal())
    assert "precision" in capsys.readouterr().out


def test_a_folder_has_no_card():
    with refused("E-CARD-MISSING", path=".json"):
        load_card(Path())
