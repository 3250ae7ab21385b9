"""Faults in what a run does about damaged token shards."""

from .mutant import Mutant

_ORDER = "tests/unit/trainer/loader/test_quarantine.py"
_TESTS = "tests/unit/trainer/test_damaged_data.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="filter-of-single-tokens",
        what="the filter counts tokens that come again, not n-grams",
        file="trainer/loader/window_filter.py",
        before="tokens[:, at : at + width]",
        after="tokens[:, 0:width]",
        tests=(f"{_TESTS}::test_windows_that_fail_the_filter_are_replaced",),
    ),
    Mutant(
        name="filter-takes-neighbors",
        what="the windows beside one that fails the filter are left out, too",
        file="trainer/loader/window_filter.py",
        before="DamagedTokens(number, start + 1, start + length, error)",
        after="DamagedTokens(number, start, start + length + 1, error)",
        tests=(f"{_TESTS}::test_windows_that_fail_the_filter_are_replaced",),
    ),
    Mutant(
        name="replacement-of-any-source",
        what="a damaged window is replaced by one of another source",
        file="trainer/loader/quarantine.py",
        before="own = [shard.source == source for shard in self._manifest.shards]",
        after="own = [True for shard in self._manifest.shards]",
        tests=(_ORDER,),
    ),
    Mutant(
        name="replacement-left-out",
        what="a window in the place of a damaged one may be damaged",
        file="trainer/loader/quarantine.py",
        before="if not any(one.first <= found < one.last and sample >= one.sample for one in self._spans):",
        after="if found >= 0:",
        tests=(_ORDER,),
    ),
    Mutant(
        name="quarantine-from-the-start",
        what="a quarantine changes the order of steps that were trained before it",
        file="trainer/loader/quarantine.py",
        before="& (samples >= span.sample)",
        after="",
        tests=(_ORDER,),
    ),
    Mutant(
        name="window-at-the-border",
        what="the window that ends with the first damaged token is used",
        file="trainer/loader/quarantine.py",
        before="max(-(-begin // length) - 1, 0)",
        after="begin // length",
        tests=(_ORDER,),
    ),
    Mutant(
        name="written-shard-stays-checked",
        what="a block that was checked is used although its file was written to since",
        file="trainer/loader/reader.py",
        before="(stamp := (status.st_mtime_ns, status.st_size)) != shard.checked.stamp",
        after="(stamp := (status.st_mtime_ns, status.st_size)) != shard.checked.stamp == (0, 0)",
        tests=(f"{_TESTS}::test_each_damage_is_found_before_its_tokens_are_used",),
    ),
    Mutant(
        name="token-beyond-the-vocabulary",
        what="the first id beyond the vocabulary is taken for a token",
        file="trainer/loader/reader.py",
        before="if int(ids.max()) >= self.manifest.vocab_size:",
        after="if int(ids.max()) > self.manifest.vocab_size:",
        tests=(f"{_TESTS}::test_each_damage_is_found_before_its_tokens_are_used",),
    ),
    Mutant(
        name="checkpoint-without-quarantine",
        what="checkpoints have no copy of the quarantine",
        file="trainer/save.py",
        before="        quarantine=trainer.quarantine,\n    )\n    require_unchanged",
        after="        quarantine=(),\n    )\n    require_unchanged",
        tests=(f"{_TESTS}::test_a_run_that_continues_has_the_same_order",),
    ),
    Mutant(
        name="quarantine-not-recorded",
        what="the quarantine is in effect, but not in the run folder",
        file="trainer/damaged_data.py",
        before="    write_quarantine(trainer.folder.quarantine, records)\n",
        after="",
        tests=(f"{_TESTS}::test_all_ranks_leave_the_same_windows_out",),
    ),
    Mutant(
        name="quarantine-without-limit",
        what="any share of the data may be left out",
        file="trainer/damaged_data.py",
        before="if out > most * among:",
        after="if out > among:",
        tests=(f"{_TESTS}::test_too_much_damage_stops_the_run",),
    ),
    Mutant(
        name="record-of-another-attempt",
        what="a record that a checkpoint lacks changes the order of its steps",
        file="schema/quarantine_record.py",
        before="max(one.step, saved_step + 1)",
        after="one.step",
        tests=(f"{_TESTS}::test_a_record_that_a_checkpoint_lacks_holds_for_later_steps",),
    ),
    Mutant(
        name="replaced-windows-counted",
        what="the proof counts the windows in the place of those left out",
        file="report/lineage/prove.py",
        before="np.where(replaced, whole, ids)",
        after="ids",
        tests=("tests/unit/trainer/test_prove.py::test_windows_in_quarantine_are_proven_with_those_in_their_place",),
    ),
]
