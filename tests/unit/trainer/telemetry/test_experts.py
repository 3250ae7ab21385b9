import json
from dataclasses import asdict

import numpy as np
import pytest

from ingot.trainer.telemetry.progress import expert_load


def table(*rows) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


def found(rows, **changes):
    usual = {"step": 20, "steps": 10, "overflow": "drop", "with_loads": True}
    return expert_load(table(*rows), range(1, 1 + len(rows)), **(usual | changes))


def test_loads_by_hand():
    """12 assignments of 6 tokens to 4 experts: 3 each is even. Three are dropped; 4.2 nats are 0.7 a token."""
    load = found([(6, 3, 3, 0, 3, 4.2, 6), (3, 3, 3, 3, 0, 0.0, 6)])
    assert load.loads == [[2.0, 1.0, 1.0, 0.0], [1.0] * 4]
    assert load.max_load == [2.0, 1.0] and load.min_load == [0.0, 1.0]
    assert load.load_cv == pytest.approx([0.5**0.5, 0.0], abs=1e-3)
    assert load.dropped == [0.25, 0.0]
    assert load.entropy == [0.7, 0.0]
    assert (load.step, load.steps, load.layers) == (20, 10, [1, 2])


def test_what_cannot_happen_is_not_told():
    load = found([(6, 3, 3, 0, 0, 4.2, 6)], overflow="", with_loads=False)
    assert load.dropped is None and load.fallback is None and load.loads is None
    taken = found([(6, 3, 3, 0, 3, 4.2, 6)], overflow="fallback")
    assert taken.dropped is None and taken.fallback == [0.25]


def test_an_event_of_the_largest_model_is_small():
    """58 layers of 256 experts: 2.4 kB at a log line, the load of every expert only now and then."""
    rows = np.random.default_rng(0).random((58, 259)) * 1e6
    assert len(json.dumps(asdict(found(rows, with_loads=False)))) < 2500
    assert len(json.dumps(asdict(found(rows)))) < 140_000
