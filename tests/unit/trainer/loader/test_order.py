"""The samples of a step: a pure function, the same for everybody, with exact shares."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import refused

from ingot.trainer.loader.order import CYCLE, Order

NAN = float("nan")  # one object: it equals itself inside a container

SHARDS = [("web", 16 * 500 + 1), ("books", 16 * 120 + 5), ("web", 16 * 333 + 2), ("code", 16 * 61 + 1)]


def sources_of(order, ids):
    shards, _ = order.locate(ids)
    return np.array([order.manifest.shards[s].source for s in shards])


def test_every_window_once_per_epoch(make_manifest):
    order = Order(make_manifest(SHARDS), 16, seed=5)
    n = order.epoch_windows
    assert n == 500 + 120 + 333 + 61
    for epoch in range(3):
        assert np.array_equal(np.sort(order.samples(epoch * n, n)), np.arange(n))


@settings(max_examples=40, deadline=None)
@given(first=st.integers(0, 20_000), count=st.integers(1, 5000), cut=st.floats(0, 1), weighted=st.booleans())
def test_samples_do_not_depend_on_how_they_are_asked_for(make_manifest_once, first, count, cut, weighted):
    weights = {"web": 0.5, "books": 0.3, "code": 0.2} if weighted else None
    whole = Order(make_manifest_once, 16, 1, weights).samples(first, count)
    order, middle = Order(make_manifest_once, 16, 1, weights), int(count * cut)
    late = order.samples(first + middle, count - middle)  # the later part first
    assert np.array_equal(np.concatenate([order.samples(first, middle), late]), whole)


@pytest.fixture(scope="module")
def make_manifest_once():
    from ingot.schema.tokens import Shard, TokenManifest

    shards = tuple(
        Shard(name=f"{s}-{i}", source=s, tokens=t, documents=1, text_bytes=1, blocks_sha256="", documents_sha256="")
        for i, (s, t) in enumerate(SHARDS)
    )
    return TokenManifest(
        dtype="uint16", vocab_size=9, eot_id=0, tokenizer_sha256="", corpus_sha256="", split="train", block_bytes=4096,
        seed=0, shards=shards,
    )  # fmt: skip


def test_steps_are_slices_of_the_stream_and_ranks_cover_them(make_manifest):
    order = Order(make_manifest(SHARDS), 16, seed=5)
    assert np.array_equal(np.concatenate([order.step(s, 24) for s in (1, 2, 3)]), order.samples(0, 72))


def test_seed_and_data_and_length_change_the_order(make_manifest):
    base = Order(make_manifest(SHARDS), 16, 5).step(1, 200)
    assert not np.array_equal(Order(make_manifest(SHARDS), 16, 6).step(1, 200), base)
    other = make_manifest([("web", 16 * 500 + 2), *SHARDS[1:]])  # one token more, the same windows
    assert not np.array_equal(Order(other, 16, 5).step(1, 200), base)
    assert np.array_equal(Order(make_manifest(SHARDS), 16, 5).step(1, 200), base)


def test_the_order_is_pinned(make_manifest):
    # A change here changes what every run trains on after a restart: never by accident.
    order = Order(make_manifest(SHARDS), 16, seed=1234)
    assert order.step(1, 8).tolist() == PINNED
    weighted = Order(make_manifest(SHARDS), 16, seed=1234, weights={"web": 1, "books": 1})
    assert weighted.step(1, 8).tolist() == PINNED_WEIGHTED


PINNED = [188, 687, 886, 653, 470, 571, 931, 765]
PINNED_WEIGHTED = [523, 515, 348, 139, 588, 164, 468, 42]


def test_quotas_are_exact_in_every_cycle(make_manifest):
    weights = {"web": 0.5, "books": 0.333, "code": 0.167}
    order = Order(make_manifest(SHARDS), 16, 3, weights)
    for cycle in range(4):
        names, counts = np.unique(sources_of(order, order.samples(cycle * CYCLE, CYCLE)), return_counts=True)
        found = dict(zip(names.tolist(), counts.tolist(), strict=True))
        assert sum(found.values()) == CYCLE
        assert all(abs(found[name] - share * CYCLE) < 1 for name, share in weights.items())


def test_weighted_sources_go_through_their_own_epochs(make_manifest):
    order = Order(make_manifest(SHARDS), 16, 3, {"web": 3, "code": 1})
    samples = order.samples(0, 4 * CYCLE)
    code = samples[sources_of(order, samples) == "code"]
    for epoch in range(len(code) // 61):
        assert len(set(code[61 * epoch : 61 * epoch + 61].tolist())) == 61
    assert "books" not in sources_of(order, samples)


def test_epochs_say_what_is_repeated(make_manifest):
    assert Order(make_manifest(SHARDS), 16, 3).epochs(2028) == {"books": 2.0, "code": 2.0, "web": 2.0}
    epochs = Order(make_manifest(SHARDS), 16, 3, {"web": 1, "code": 1}).epochs(2 * 833)
    assert epochs == {"web": pytest.approx(1.0), "code": pytest.approx(833 / 61)}


def test_one_weighted_source(make_manifest):
    order = Order(make_manifest(SHARDS), 16, 3, {"code": 0.2})
    assert len(set(order.samples(0, 61).tolist())) == 61
    assert set(sources_of(order, order.samples(0, 61))) == {"code"}
    assert order.epochs(122) == {"code": 2.0}


@pytest.mark.parametrize(
    ("weights", "code", "facts"),
    [
        ({"web": 1, "boks": 1}, "E-SOURCE-UNKNOWN", {"source": "boks", "close": ["books"]}),
        ({"web": 1, "books": 0}, "E-WEIGHTS-VALUE", {"weights": {"web": 1, "books": 0}}),
        ({"web": 1, "books": NAN}, "E-WEIGHTS-VALUE", {"weights": {"web": 1, "books": NAN}}),
        ({"web": 5000, "books": 1}, "E-WEIGHT-TOO-SMALL", {"source": "books", "share": 1 / 5001}),
    ],
)
def test_weights_that_make_no_sense_are_refused(make_manifest, weights, code, facts):
    with refused(code, **facts):
        Order(make_manifest(SHARDS), 16, 3, weights)


def test_a_weighted_source_without_a_window_is_an_error(make_manifest):
    with refused("E-TOKENS-TOO-FEW"):
        Order(make_manifest([("web", 100), ("code", 16)]), 16, 3, {"web": 1, "code": 1})


def test_working_set_of_shards_is_bounded(make_manifest):
    order = Order(make_manifest([("web", 2048 * 300 + 1)] * 400), 2048, 0)  # shards of a little more than a block
    shards, _ = order.locate(order.samples(0, 60_000))
    group = 256 * 32
    assert max(len(set(shards[i : i + group].tolist())) for i in range(0, 50_000, 500)) <= 2 * 2 * 33
    assert len(set(shards.tolist())) > 200
