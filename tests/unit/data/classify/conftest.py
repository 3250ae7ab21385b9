"""A small classifier of two kinds of made-up text."""

import random

import pytest

from ingot.data.classify.model import write_model
from ingot.data.classify.train import ClassifierSettings, Labelled, train

SETTINGS = ClassifierSettings(dim=8, buckets=1 << 12, min_count=2, epochs=5, batch=8, rate=0.5)
_GOOD = ["theorem", "proof", "lemma", "follows", "therefore", "integral", "der", "größte", "μέγα", "数学", "given"]
_BAD = ["buy", "cheap", "now", "click", "discount", "offer", "бесплатно", "☃", "viagra", "win"]
_BOTH = ["the", "of", "and", "to", "in", "is", "it", "that", "for", "with"]


def example(number: int) -> Labelled:
    pick = random.Random(number)
    own, label = ((_GOOD, "good"), (_BAD, "bad"))[number % 2]
    return Labelled(" ".join(pick.choices(own + _BOTH, k=pick.randint(5, 60))), (label,))


@pytest.fixture(scope="session")
def examples() -> list[Labelled]:
    return [example(number) for number in range(400)]


@pytest.fixture(scope="session")
def model(examples):
    return train(examples, SETTINGS)


@pytest.fixture(scope="session")
def model_file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.bin"
    write_model(path, model)
    return path
