import numpy as np
from tests.expect import refused

from ingot.data.classify.train import ClassifierSettings, Labelled, train

from .conftest import SETTINGS, example


def test_it_tells_unseen_texts_apart(model):
    unseen = [example(number) for number in range(1000, 1200)]
    right = [max(model.scores(one.text).items(), key=lambda item: item[1])[0] in one.labels for one in unseen]
    assert np.mean(right) > 0.97


def test_the_same_seed_gives_the_same_bits(examples, model):
    again = train(examples, SETTINGS)
    assert np.array_equal(again.vectors, model.vectors) and np.array_equal(again.weights, model.weights)


def test_what_is_rare_adds_nothing(model):
    assert not np.any(model.vectors[np.abs(model.vectors).sum(axis=1) == 0])
    trained = np.any(model.vectors[len(model.words) :], axis=1).mean()
    assert 0 < trained < 1


def test_it_agrees_with_gradients_taken_by_hand():
    """One text per batch and one epoch: AdaGrad on softmax(W mean(E)), written out."""
    settings = ClassifierSettings(dim=3, ngrams=1, buckets=1, min_count=1, epochs=1, batch=1, rate=0.3)
    examples = [Labelled("a b a", ("x",)), Labelled("b c", ("y",))]
    model = train(examples, settings)
    from ingot.rng import derive

    random = np.random.default_rng(derive(settings.seed, "order"))
    weights = random.uniform(-1, 1, (2, 3))
    vectors = {word: np.zeros(3) for word in (b"a", b"b", b"c", b"</s>")}
    squares, weight_squares = dict.fromkeys(vectors, 1e-10), np.full((2, 3), 1e-10)
    texts = np.random.default_rng(derive(settings.seed, "texts")).permutation(2)
    for step, batch in enumerate(random.permutation(2)):
        one, rate = examples[texts[batch]], 0.3 * (1 - step / 2)
        words = [*one.text.encode().split(), b"</s>"]
        mean = sum(vectors[word] for word in words) / len(words)
        p = np.exp(weights @ mean)
        slope = p / p.sum() - [label in one.labels for label in model.labels]
        pull = slope @ weights / len(words)
        weight_squares += np.outer(slope, mean) ** 2
        new_weights = weights - rate * np.outer(slope, mean) / np.sqrt(weight_squares)
        for word in set(words):
            gradient = pull * words.count(word)
            squares[word] += gradient @ gradient
            vectors[word] = vectors[word] - rate * gradient / np.sqrt(squares[word])
        weights = new_weights
    assert np.allclose(model.weights, weights, atol=1e-5)
    for number, word in enumerate(model.words):
        assert np.allclose(model.vectors[number], vectors[word], atol=1e-5)


def test_what_cannot_be_trained_is_refused():
    with refused("E-CLASSIFIER-LABELS", labels=["x"]):
        train([Labelled("a", ("x",))], SETTINGS)
    with refused("E-CLASSIFIER-LABELS", labels=[]):
        train([], SETTINGS)
    with refused("E-CLASSIFIER-SOFTMAX"):
        train([Labelled("a", ("x", "y"))], SETTINGS)
    with refused("E-CLASSIFIER-SETTING", name="rate"):
        train([], ClassifierSettings(rate=0))
