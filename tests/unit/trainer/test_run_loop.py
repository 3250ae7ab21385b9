"""The loop between two steps, beyond the whole runs of test_loop.py."""

import pytest

from ingot.events import read_events
from ingot.plugins.callback import StepCallback, Verdict
from ingot.schema import events

from .test_loop import Scripted, run_rank


class Seen(StepCallback):
    """Records the steps of all lines."""

    def __init__(self, run, options):
        self.steps = []

    def on_line(self, steps):
        self.steps += [one.step for one in steps]
        return {"seen": len(self.steps)}

    def record(self):
        return self.steps

    def restore(self, record):
        self.steps = list(record)


def test_callbacks_see_every_step_of_a_run_that_stops_between_lines(fork_ranks, make_run, register):
    register(Seen)
    folder = make_run(dp_shard=2)
    folder.config.write_text(folder.config.read_text() + "\n[callbacks.probe]\n")

    def stop(rank, ranks):
        return run_rank(rank, ranks, folder, make_policy=lambda folder: Scripted(folder, {4: Verdict.STOP}))[0]

    assert fork_ranks(stop, 2) == [(4, True)] * 2
    assert [e for e, _ in fork_ranks(run_rank, 2, folder)] == [(12, False)] * 2
    seen = {e["step"]: e["values"]["seen"] for e in read_events(folder.events, events.METRICS)}
    assert seen == {step: step for step in (3, 4, 5, 6, 9, 10, 12)}
    # The time of each start: the first one stopped at its second line, the other one trained on.
    first, second = read_events(folder.events, events.START_TIMES)
    for found in (first["seconds"], second["seconds"]):
        assert min(found[phase] for phase in ("groups", "build", "load")) > 0 and found["warm_up"] is not None
        assert found["kill"] is found["schedule"] is None  # nobody ordered it
    assert second["total_seconds"] == pytest.approx(sum(filter(None, second["seconds"].values())), abs=1e-3)
