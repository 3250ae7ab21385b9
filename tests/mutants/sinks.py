"""Faults in the feeding of sinks: calls that are lost or repeated, hangs that are not seen, processes that are left."""

from .mutant import Mutant

_PROMETHEUS = "tests/unit/observe/test_prometheus.py"
_PROCESS, _FEED = "tests/unit/observe/test_sink_process.py", "tests/unit/observe/test_feed.py"

MUTANTS = [
    Mutant(
        name="sink-call-repeated",
        what="the process of a sink records how far it has read only after the calls, so a killed one repeats them",
        file="observe/sink_process.py",
        before="        self._states.write(state)\n        for call in calls:",
        after="        for call in calls:",
        tests=(f"{_PROCESS}::test_a_call_that_did_not_return_is_counted_and_not_repeated",),
    ),
    Mutant(
        name="sink-event-lost-by-open",
        what="an event counts as given before its attempt is opened, so a tracker that is away at the start loses it",
        file="observe/sink_process.py",
        before='        self._answer({"alive": True})\n        if attempt',
        after="        state.position = position\n        self._states.write(state)\n        if attempt",
        tests=(f"{_PROCESS}::test_an_open_that_raises_loses_no_event",),
    ),
    Mutant(
        name="sink-attempt-of-roll-backs",
        what="a roll-back begins no attempt, so trackers drop the steps after it",
        file="observe/sink_process.py",
        before="_BEGINS = (events.RUN_STARTED, events.ROLLED_BACK)",
        after="_BEGINS = (events.RUN_STARTED,)",
        tests=(f"{_PROCESS}::test_each_start_and_each_roll_back_begins_an_attempt",),
    ),
    Mutant(
        name="sink-hang-unseen",
        what="a sink whose call hangs is left alone for ever",
        file="observe/feed.py",
        before="        elif now >= self._hung_at():",
        after="        elif now >= self._hung_at() + 1e9:",
        tests=(f"{_FEED}::test_bad_sinks_cost_their_own_data_and_are_reported_once",),
    ),
    Mutant(
        name="sink-trouble-repeated",
        what="every trouble of a sink is a line and an event",
        file="observe/feed.py",
        before="        if not self._reported:\n            self._reported = True",
        after="        if not self._reported:",
        tests=("tests/e2e/test_sinks.py::test_bad_sinks_cost_the_run_no_bit",),
    ),
    Mutant(
        name="sinks-left",
        what="the feed goes on after its supervisor was killed, while it is stopped",
        file="observe/feed.py",
        before="    die_with_parent()\n",
        after="",
        tests=(f"{_FEED}::test_nothing_is_left_after_the_supervisor_is_killed",),
    ),
    Mutant(
        name="row-of-json-cut",
        what="a full disk leaves a part of a row in the file",
        file="observe/sinks/jsonl.py",
        before="            self._file.truncate(self._file.seek(0, 2) - written)\n",
        after="",
        tests=(f"{_PROCESS}::test_a_full_disk_leaves_no_part_of_a_row",),
    ),
    Mutant(
        name="sink-end-unseen",
        what="the sink for Prometheus closes its port before the end of the run was scraped",
        file="observe/sinks/prometheus.py",
        before="            self._scraped.wait(max(deadline - 1.0, 0.0))\n",
        after="",
        tests=(f"{_PROMETHEUS}::test_ranks_sources_callbacks_and_counts_are_scraped",),
    ),
    Mutant(
        name="ranks-of-an-attempt-lost",
        what="the start of an attempt forgets the machines of its ranks, which were reported before it",
        file="observe/sinks/prometheus.py",
        before='if rank < facts["world_size"]',
        after='if rank >= facts["world_size"]',
        tests=(f"{_PROMETHEUS}::test_ranks_sources_callbacks_and_counts_are_scraped",),
    ),
    Mutant(
        name="sink-never-started",
        what="a run that ends before its feed looks starts no sink",
        file="observe/feed.py",
        before="        sink.look(time.monotonic())  # also for a run that has ended already",
        after="        pass",
        tests=(f"{_FEED}::test_a_run_that_ended_at_once_is_sent",),
    ),
]
