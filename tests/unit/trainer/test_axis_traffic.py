"""Real runs on four forked ranks show in which axis of the mesh the others wait for late ranks."""

import time
from statistics import median

import pytest

from ingot.events import read_events
from ingot.observe.scalars import scalars_of
from ingot.schema import events
from ingot.schema.metrics import newest_rows, read_series
from ingot.trainer.loader.loader import Loader

from .test_loop import run_rank

LATE_SECONDS = 0.2


def seconds(folder, rank, name):
    (found,) = read_series(folder.metrics, rank, f"perf/{name}_seconds")
    return found.mean[1:]  # the first step connects


# With dp_shard = 2, tp = 2: ranks 0 and 1, and 2 and 3, divide matrices; 0 and 2, and 1 and 3, the state.
@pytest.mark.parametrize("axis, other, late, peer", [("tp", "dp_shard", (1, 3), 1), ("dp_shard", "tp", (2, 3), 2)])
def test_late_ranks_show_in_the_axis_that_waits_for_them(fork_ranks, make_run, axis, other, late, peer):
    folder = make_run(dp_shard=2, tp=2, zero=3, steps=8, log_every=1, every_steps=0)

    def rank_of_run(rank, ranks):
        get = Loader._get

        def slowly(self):
            time.sleep(LATE_SECONDS)
            return get(self)

        if rank in late:
            Loader._get = slowly
        run_rank(rank, ranks, folder)

    fork_ranks(rank_of_run, 4)
    for rank in {0, 1, 2, 3} - set(late):
        excess = seconds(folder, rank, f"{axis}/exposed") - seconds(folder, rank ^ peer, f"{axis}/exposed")
        assert median(excess.tolist()) > LATE_SECONDS / 2
        apart = seconds(folder, rank, f"{axis}/exposed") + seconds(folder, rank, f"{other}/exposed")
        assert (apart <= seconds(folder, rank, "wait") + 1e-6).all()  # no wait counts twice
    lines = [event for event in read_events(folder.events, events.WAITS) if event["step"] > 1]
    assert all(event["axes"].keys() == {"dp_shard", "tp", "world"} for event in lines)
    assert all(event["axes"][axis]["exposed"]["rank"] not in late for event in lines)
    names = {f"perf/{name}/{part}_seconds" for name in (axis, other) for part in ("exposed", "hidden")}
    assert names <= scalars_of(lines[-1]).keys() and names <= newest_rows(folder.metrics)[3].values.keys()
