"""A run whose mixture changes: the past stays as it was, and no source skips or repeats a window of its epoch."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.trainer.loader.order import Order

SHARDS = [("web", 16 * 900 + 1), ("code", 16 * 61 + 1), ("books", 16 * 53 + 1)]
BEFORE, AFTER = {"web": 3, "code": 1}, {"web": 1, "books": 1}
WEIGHTS = st.sampled_from([{}, {"web": 1.0}, BEFORE, AFTER, {"web": 1, "code": 1, "books": 2}])


def of_source(order: Order, ids: np.ndarray, source: str) -> list[int]:
    shards, _ = order.locate(ids)
    return ids[[order.manifest.shards[n].source == source for n in shards]].tolist()


def test_before_the_change_nothing_is_different(make_manifest):
    changed = Order(make_manifest(SHARDS), 16, 3, AFTER, earlier=[(5000, BEFORE)])
    plain = Order(make_manifest(SHARDS), 16, 3, BEFORE)
    assert np.array_equal(changed.samples(0, 5000), plain.samples(0, 5000))
    assert not np.array_equal(changed.samples(5000, 100), plain.samples(5000, 100))


def test_every_source_goes_on_where_it_was(make_manifest):
    order = Order(make_manifest(SHARDS), 16, 3, AFTER, earlier=[(300, BEFORE)])
    web = of_source(order, order.samples(0, 1200), "web")
    assert len(web) > 500 and len(set(web)) == len(web)  # of 900: no window twice in the first epoch
    assert web == of_source(order, Order(make_manifest(SHARDS), 16, 3, {"web": 1}).samples(0, len(web)), "web")
    later = order.samples(300, 900)
    assert not of_source(order, later, "code") and 420 < len(of_source(order, later, "books")) < 480


def test_a_mixture_that_comes_back_goes_on_as_well(make_manifest):
    order = Order(make_manifest(SHARDS), 16, 3, BEFORE, earlier=[(120, BEFORE), (200, AFTER)])
    for source, least in (("code", 35), ("web", 180)):  # web is in all three mixtures, code in the first and the last
        own = of_source(order, order.samples(0, 300), source)
        alone = Order(make_manifest(SHARDS), 16, 3, {source: 1})
        assert len(own) > least and own == of_source(alone, alone.samples(0, len(own)), source)


def test_the_quotas_hold_from_the_change_on(make_manifest):
    order = Order(make_manifest(SHARDS), 16, 3, AFTER, earlier=[(777, BEFORE)])
    assert len(of_source(order, order.samples(777, 4096), "web")) == 2048


@given(st.integers(1, 9000), st.integers(0, 9000), WEIGHTS, WEIGHTS, WEIGHTS, st.integers(0, 9000), st.integers(0, 500))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it makes equal manifests
def test_pieces_give_what_the_whole_gives(make_manifest, first, more, one, two, three, start, count):
    def order():
        return Order(make_manifest(SHARDS), 16, 1, three, earlier=[(first, one), (first + more, two)])

    whole = order().samples(start, count)
    middle = count // 3
    again = order()
    assert np.array_equal(again.samples(start + middle, count - middle), whole[middle:])
    assert np.array_equal(again.samples(start, middle), whole[:middle])


def test_a_mixture_that_never_held_changes_nothing(make_manifest):
    plain = Order(make_manifest(SHARDS), 16, 3, BEFORE)
    for earlier in ([(0, AFTER)], [(0, AFTER), (0, {})]):
        assert np.array_equal(
            Order(make_manifest(SHARDS), 16, 3, BEFORE, earlier=earlier).samples(0, 99), plain.samples(0, 99)
        )


def test_epochs_add_up_over_mixtures(make_manifest):
    order = Order(make_manifest(SHARDS), 16, 3, {"code": 1}, earlier=[(1014, {}), (1014 + 61, {"code": 1})])
    assert order.epochs(1014) == {"books": 1.0, "code": 1.0, "web": 1.0}
    assert order.epochs(1014 + 122)["code"] == pytest.approx(3.0)


def test_earlier_sources_that_are_gone_do_not_stop_a_run(make_manifest):
    """The run changes to other tokens and another mixture at once."""
    for gone in ({"news": 1.0}, {"news": 1.0, "web": 1.0}):
        order = Order(make_manifest(SHARDS), 16, 3, {"web": 1.0}, earlier=[(100, gone)])
        web = order.samples(0, 300)
        assert len(set(web.tolist())) == 300 and np.array_equal(
            web, Order(make_manifest(SHARDS), 16, 3, {"web": 1}).samples(0, 300)
        )
