"""The ledger proves which samples were consumed, and every fault in it is found."""

import dataclasses

import numpy as np
import pytest
from tests.expect import refused

from ingot.trainer.loader.ledger import Ledger, prove, read_ledger, write_segment
from ingot.trainer.loader.order import Order

BATCH = 12


@pytest.fixture
def order(make_manifest):
    return Order(make_manifest([("web", 16 * 90 + 1)]), 16, seed=4)


def train(order, folder, ranks, first, last, every):
    """Ranks record their parts; at each checkpoint the parts are put side by side and written."""
    ledgers, segments, saved, per = [Ledger() for _ in range(ranks)], [], first - 1, BATCH // ranks
    for step in range(first, last + 1):
        ids = order.step(step, BATCH)
        for rank, ledger in enumerate(ledgers):
            ledger.record(step, ids[rank * per : (rank + 1) * per])
        if step % every == 0 or step == last:
            parts = [ledger.segment(saved + 1, step) for ledger in ledgers]
            segments.append(write_segment(folder, saved + 1, step, np.concatenate(parts, axis=1)))
            for ledger in ledgers:
                ledger.forget(step)
            saved = step
    return segments


def test_a_run_that_changes_its_ranks_is_proven(order, tmp_path):
    segments = [
        *train(order, tmp_path, 2, 1, 8, 4),
        *train(order, tmp_path, 1, 9, 13, 4),
        *train(order, tmp_path, 4, 14, 20, 3),
    ]
    steps = dict(read_ledger(tmp_path, segments))
    assert list(steps) == list(range(1, 21))
    assert np.array_equal(np.concatenate(list(steps.values())), order.samples(0, 20 * BATCH))
    prove(read_ledger(tmp_path, segments), order, BATCH)


def test_segments_are_plain_little_endian_numbers(order, tmp_path):
    (segment,) = train(order, tmp_path, 1, 1, 3, 3)
    data = np.fromfile(tmp_path / segment.file, "<i8")
    assert np.array_equal(data, order.samples(0, 3 * BATCH))
    assert (segment.first_step, segment.last_step) == (1, 3)


def steps_of(order, *steps):
    return [(step, order.step(step, BATCH).copy()) for step in steps]


def swapped(ledger):
    ledger[1][1][[3, 4]] = ledger[1][1][[4, 3]]
    return ledger


@pytest.mark.parametrize(
    ("consumed", "code", "facts"),
    [
        (lambda o: steps_of(o, 1, 2, 4), "E-LEDGER-STEP", {"step": 3, "found": 4}),  # missing
        (lambda o: steps_of(o, 2, 3), "E-LEDGER-STEP", {"step": 1, "found": 2}),
        (lambda o: steps_of(o, 1, 2, 2, 3), "E-LEDGER-STEP", {"step": 2, "found": 2}),  # consumed twice
        (lambda o: steps_of(o, 1, 2, 3, 1), "E-LEDGER-STEP", {"step": 1, "found": 1}),
        (lambda o: swapped(steps_of(o, 1, 2)), "E-LEDGER-SAMPLE", {"step": 2, "sample": 3, "differ": 2}),
        (lambda o: [(1, o.step(1, BATCH)[:6])], "E-LEDGER-BATCH", {"step": 1, "samples": 6, "expected": 12}),
        (lambda o: [(1, o.step(1, BATCH)), (2, o.step(1, BATCH))], "E-LEDGER-SAMPLE", {"step": 2, "sample": 0}),
    ],
)
def test_every_way_to_be_wrong_is_named(order, consumed, code, facts):
    with refused(code, **facts):
        prove(consumed(order), order, BATCH)


def test_another_seed_does_not_pass(order, make_manifest, tmp_path):
    segments = train(order, tmp_path, 2, 1, 4, 4)
    with refused("E-LEDGER-SAMPLE"):
        prove(read_ledger(tmp_path, segments), Order(make_manifest([("web", 16 * 90 + 1)]), 16, seed=5), BATCH)


@pytest.mark.parametrize(
    "change", [lambda d: d[:-8], lambda d: d[:-1], lambda d: b"", lambda d: bytes([d[0] ^ 1]) + d[1:]]
)
def test_a_damaged_segment_is_refused(order, tmp_path, change):
    (segment,) = train(order, tmp_path, 1, 1, 3, 3)
    path = tmp_path / segment.file
    path.write_bytes(change(path.read_bytes()))
    with refused("E-LEDGER-HASH"):
        list(read_ledger(tmp_path, [segment]))


def test_a_missing_segment_and_wrong_steps_are_refused(order, tmp_path):
    (segment,) = train(order, tmp_path, 1, 1, 3, 3)
    with refused("E-LEDGER-HASH"):
        list(read_ledger(tmp_path, [dataclasses.replace(segment, last_step=7)]))
    (tmp_path / segment.file).unlink()
    with refused("E-LEDGER-READ", path=str(tmp_path / segment.file)):
        list(read_ledger(tmp_path, [segment]))


def test_recording_goes_step_by_step(order):
    ledger = Ledger()
    ledger.record(5, np.array([1]))
    with refused("E-LEDGER-GAP"):
        ledger.record(7, np.array([1]))
    with refused("E-LEDGER-GAP"):
        ledger.segment(4, 5)
    with refused("E-LEDGER-GAP"):
        Ledger().segment(1, 2)
    ledger.forget(5)
    ledger.record(6, np.array([2]))
    assert ledger.segment(6, 6).tolist() == [[2]]


def test_a_segment_has_a_row_per_step(tmp_path):
    with refused("E-LEDGER-SHAPE"):
        write_segment(tmp_path, 1, 3, np.zeros((2, 4), np.int64))
