import pickle

import pytest
from tests.expect import refused

from ingot.config import load
from ingot.data.classify.stage import ClassifierRules, Classify, ModelRule, fingerprint
from ingot.schema.corpus import Document

pytest.importorskip("fasttext")


def document(text: str) -> Document:
    return Document(id="", url="", source="", file="", record_id="", text=text)


def rules(model_file, **changes) -> ClassifierRules:
    values = {"name": "quality", "model": str(model_file), "label": "good"} | changes
    return ClassifierRules(enabled=True, models=(ModelRule(**values),))


def test_it_keeps_one_side_and_writes_the_score_down(model_file):
    stage, good, bad = Classify(rules(model_file)), document("theorem proof lemma"), document("buy cheap now click")
    assert stage(good) is None and good.notes["classifier.quality"] > 0.9
    drop = stage(bad)
    assert drop is not None and drop.rule == "classifier.quality" and drop.value.endswith("< 0.5")
    assert bad.notes["classifier.quality"] < 0.1
    other_way = Classify(rules(model_file, keep="below"))
    assert other_way(document(bad.text)) is None and other_way(document(good.text)) is not None


def test_no_document_makes_it_raise(model_file):
    stage = Classify(rules(model_file))
    for text in ("", "\0", "\ud800", "x" * 100_000, "</s>"):
        stage(document(text))


def test_only_the_beginning_is_looked_at(model_file):
    text = "theorem proof lemma " + "buy cheap now click " * 50
    assert Classify(rules(model_file, characters=19))(document(text)) is None
    assert Classify(rules(model_file, characters=0))(document(text)) is not None


def test_it_travels_to_workers_without_its_weights(model_file):
    packed = pickle.dumps(Classify(rules(model_file)))
    assert len(packed) < 2000
    assert pickle.loads(packed)(document("theorem proof lemma")) is None


def test_two_models_are_asked_in_turn(model_file):
    first, second = rules(model_file).models[0], rules(model_file, name="spam", label="bad", keep="below").models[0]
    one = document("theorem proof")
    assert Classify(ClassifierRules(enabled=True, models=(first, second)))(one) is None
    assert set(one.notes) == {"classifier.quality", "classifier.spam"}


def test_what_ran_and_the_fingerprint_name_the_model(model_file, tmp_path):
    stage = Classify(rules(model_file))
    assert stage.ran.startswith("quality: keeps good above 0.5 by model.bin (")
    copy = tmp_path / "copy.bin"
    copy.write_bytes(model_file.read_bytes())
    assert fingerprint(rules(copy)) == fingerprint(rules(model_file))
    copy.write_bytes(b"other")
    assert fingerprint(rules(copy)) != fingerprint(rules(model_file))
    assert fingerprint(ClassifierRules()) == ""


def test_what_is_wrong_is_said(model_file, tmp_path):
    with refused("E-CLASSIFIER-MISSING", path=str(tmp_path / "missing.bin")):
        Classify(rules(tmp_path / "missing.bin"))
    with refused("E-CLASSIFIER-LABEL", label="goood", close=["good"]):
        Classify(rules(model_file, label="goood"))(document("a"))
    (tmp_path / "text.bin").write_text("no model")
    with refused("E-CLASSIFIER-FORMAT", path=str(tmp_path / "text.bin")):
        Classify(rules(tmp_path / "text.bin"))(document("a"))


def test_rules_come_out_of_a_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('enabled = true\n[[models]]\nname = "q"\nmodel = "m.bin"\nlabel = "hq"\nthreshold = 0.3\n')
    assert load(ClassifierRules, path).models[0] == ModelRule(name="q", model="m.bin", label="hq", threshold=0.3)
    with refused("E-CONFIG-SETTINGS", keys=["models"]):
        load(ClassifierRules, None, ["enabled=true"])
    path.write_text('[[models]]\nname = "q"\nmodel = ""\nlabel = "hq"\nthreshold = 3\n')
    with refused("E-CONFIG-SETTINGS", keys=["models[0].threshold", "models[0].model"]):
        load(ClassifierRules, path)
