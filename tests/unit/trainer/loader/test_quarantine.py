"""The order of samples with tokens in quarantine: other windows of the same source, and nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
from tests.expect import refused

from ingot.schema.quarantine_record import Quarantined
from ingot.trainer.loader.order import Order, quarantine_from

SHARDS = [("web", 10_000), ("books", 5_000), ("web", 7_777)]
SEQ_LEN, BATCH, STEPS = 64, 16, 100  # more than four epochs


def record(shard, begin, end, step):
    return Quarantined(step=step, shard=shard, blocks_sha256="", begin=begin, end=end, code="E-SHARD-HASH")


@pytest.mark.parametrize("weights", [{}, {"web": 0.5, "books": 0.5}])
def test_windows_are_replaced_by_others_of_their_source_from_a_step_on(make_manifest, weights):
    manifest = make_manifest(SHARDS)
    records = [record("web-00000", 2048, 4096, 30), record("books-00001", 0, 700, 45)]
    plain = Order(manifest, SEQ_LEN, 7, weights)
    order = Order(manifest, SEQ_LEN, 7, weights, quarantine=quarantine_from(records, BATCH))
    before, after = (one.samples(0, STEPS * BATCH) for one in (plain, order))
    shards, starts = order.locate(before)
    steps = 1 + np.arange(STEPS * BATCH) // BATCH
    hit = (shards == 0) & (starts < 4096) & (starts + SEQ_LEN >= 2048) & (steps >= 30)
    hit |= (shards == 1) & (starts < 700) & (steps >= 45)
    assert hit.sum() > 50 and np.array_equal(before[~hit], after[~hit])
    sources = np.array([shard.source for shard in manifest.shards])
    assert np.array_equal(sources[order.locate(after)[0]], sources[shards])
    found, places = order.locate(after[hit])
    here = steps[hit]
    assert not ((found == 0) & (places < 4096) & (places + SEQ_LEN >= 2048)).any()
    assert not ((found == 1) & (places < 700) & (here >= 45)).any()
    assert len(set(after[hit].tolist())) > hit.sum() / 2  # not one window for all
    parts = [order.samples(first, 7) for first in range(0, 700, 7)]
    assert np.array_equal(np.concatenate(parts), after[:700])
    ids, replaced = order.replaced(45, BATCH)
    assert np.array_equal(ids, before[44 * BATCH : 45 * BATCH])
    assert np.array_equal(replaced, hit[44 * BATCH : 45 * BATCH])
    assert order.quarantine.shares() == {"web": (33, 156 + 121), "books": (11, 78)}


def test_a_record_of_other_tokens_has_no_effect_and_a_source_needs_a_window(make_manifest):
    manifest = make_manifest(SHARDS)
    other = Quarantined(step=1, shard="web-00000", blocks_sha256="other", begin=0, end=10_000, code="E-SHARD-SIZE")
    order = Order(manifest, SEQ_LEN, 7, quarantine=[(0, other)])
    assert not order.quarantine
    assert np.array_equal(order.samples(0, 500), Order(manifest, SEQ_LEN, 7).samples(0, 500))
    whole = record("books-00001", 0, 5_000, 1)
    with refused("E-QUARANTINE-LIMIT", source="books") as damaged:
        Order(manifest, SEQ_LEN, 7, quarantine=[(0, whole)])
    with refused("E-QUARANTINE-LIMIT", source="books") as listed:
        Order(manifest, SEQ_LEN, 7, quarantine=[(0, replace(whole, code="E-DOCUMENT-LISTED"))])
    ways = [("ingot data purge" in one.value.fix, "copy the damaged" in one.value.fix) for one in (damaged, listed)]
    assert ways == [(False, True), (True, False)]
