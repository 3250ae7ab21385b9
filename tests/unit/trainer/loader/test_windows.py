import numpy as np
import pytest
from tests.expect import refused

from ingot.trainer.loader.reader import Windows


def test_windows_tile_every_shard(make_manifest):
    windows = Windows(make_manifest([("a", 33), ("a", 16), ("b", 17), ("b", 100)]), 16)
    assert windows.counts.tolist() == [2, 0, 1, 6]
    shards, starts = windows.locate(np.arange(windows.count))
    assert shards.tolist() == [0, 0, 2, 3, 3, 3, 3, 3, 3]
    assert starts.tolist() == [0, 16, 0, 0, 16, 32, 48, 64, 80]


@pytest.mark.parametrize("ids", [[9], [-1, 3]])
def test_a_window_that_does_not_exist_is_an_error(make_manifest, ids):
    with refused("E-WINDOW-UNKNOWN"):
        Windows(make_manifest([("a", 16 * 9 + 1)]), 16).locate(np.array(ids))


@pytest.mark.parametrize("shards", [[], [("a", 16)], [("a", 0), ("b", 10)]])
def test_no_window_at_all_is_an_error(make_manifest, shards):
    with refused("E-TOKENS-TOO-FEW"):
        Windows(make_manifest(shards), 16)


def test_a_length_below_one_is_refused(make_manifest):
    with refused("E-SEQ-LEN"):
        Windows(make_manifest([("a", 100)]), 0)
