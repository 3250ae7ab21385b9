"""Faults in the record of the numbers of a run: its files, its readers, its thread."""

from .mutant import Mutant

_FILES = "tests/unit/schema/test_metrics.py"
_RECORDER = "tests/unit/trainer/telemetry/test_recorder.py"
_RUNS = "tests/unit/trainer/test_record.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="computed-nan-is-missing",
        what="a loss that is NaN counts as not measured",
        file="schema/metric_files.py",
        before='return np.ascontiguousarray(values, "<f8").view("<u8") == _MISSING_BITS',
        after="return np.isnan(values)",
        tests=(f"{_FILES}::test_a_computed_nan_is_a_value_and_a_missing_one_is_not",),
    ),
    Mutant(
        name="means-without-numbers",
        what="buckets of buckets have the mean of means, whatever they count",
        file="schema/metric_files.py",
        before="np.where(there, mean * number, 0.0).sum(0) / np.maximum(total, 1)",
        after="np.where(there, mean, 0.0).sum(0) / np.maximum(there.sum(0), 1)",
        tests=(f"{_FILES}::test_buckets_have_the_mean_and_the_range_of_all_rows",),
    ),
    Mutant(
        name="unfinished-buckets-not-read",
        what="the newest steps, whose bucket is not complete, are not shown",
        file="schema/metrics.py",
        before="for lower in reversed(range(level)):",
        after="for lower in ():",
        tests=(f"{_FILES}::test_buckets_have_the_mean_and_the_range_of_all_rows",),
    ),
    Mutant(
        name="void-steps-not-shown",
        what="steps that a roll-back made void disappear",
        file="schema/metrics.py",
        before="            parts.append((lineage, False, max(begin, int(border)), end))",
        after="            pass",
        tests=(f"{_FILES}::test_attempts_and_roll_backs_keep_their_steps",),
    ),
    Mutant(
        name="roll-back-in-the-same-lineage",
        what="steps after a roll-back continue the lineage before it",
        file="trainer/telemetry/recorder.py",
        before="self._lineage = self._lineage[0] + 1, first_step",
        after="pass",
        tests=(f"{_RUNS}::test_a_roll_back_keeps_the_void_steps",),
    ),
    Mutant(
        name="all-segments-read",
        what="a million steps are read as a million rows",
        file="schema/metrics.py",
        before="while level + 1 < LEVELS and",
        after="while False and",
        tests=(f"{_FILES}::test_a_million_steps_open_with_a_few_rows",),
    ),
    Mutant(
        name="last-segment-removed",
        what="thinning removes a segment whose buckets are not complete",
        file="schema/metric_files.py",
        before="for segment, following in pairwise(segments):",
        after="for segment, following in zip(segments, segments, strict=True):",
        tests=(f"{_FILES}::test_old_rows_are_removed_and_their_buckets_stay",),
    ),
    Mutant(
        name="removed-files-written",
        what="rows go on into files that were removed",
        file="schema/metric_files.py",
        before="if not os.fstat(self._fd).st_nlink:",
        after="if False:",
        tests=(
            f"{_FILES}::test_a_writer_refuses_what_it_cannot_keep",
            f"{_RECORDER}::test_a_folder_that_is_gone_ends_the_record_with_one_event",
        ),
    ),
    Mutant(
        name="partly-written-rows",
        what="a row of which a full disk took a part counts as written",
        file="schema/metric_files.py",
        before="if (written := os.write(self._fd, data)) < len(data):",
        after="if (written := os.write(self._fd, data)) < 0:",
        tests=(f"{_RECORDER}::test_a_full_disk_ends_the_record_with_one_event",),
    ),
    Mutant(
        name="queue-without-end",
        what="rows for a disk that hangs fill the memory",
        file="trainer/telemetry/recorder.py",
        before="if len(self._queue) >= QUEUE_ROWS:",
        after="if False:",
        tests=(f"{_RECORDER}::test_a_full_queue_drops_rows_and_counts_them",),
    ),
    Mutant(
        name="rows-after-the-end",
        what="rows fill the queue of a record that ended",
        file="trainer/telemetry/recorder.py",
        before="if not self._ended:",
        after="if True:",
        tests=(f"{_RECORDER}::test_a_full_disk_ends_the_record_with_one_event",),
    ),
    Mutant(
        name="rows-written-at-the-end",
        what="the rows are written when the run ends, and a killed one has none",
        file="trainer/telemetry/recorder.py",
        before="while not self._ends.wait(_FLUSH_SECONDS):",
        after="while not self._ends.wait():",
        tests=(f"{_RECORDER}::test_a_killed_process_loses_the_last_second_at_most",),
    ),
    Mutant(
        name="end-waits-for-a-disk",
        what="a disk that hangs keeps a finished run",
        file="trainer/telemetry/recorder.py",
        before="self._thread.join(_CLOSE_SECONDS)",
        after="self._thread.join()",
        tests=(f"{_RECORDER}::test_a_disk_that_hangs_does_not_keep_the_run_from_its_end",),
    ),
]
