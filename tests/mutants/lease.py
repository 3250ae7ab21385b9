"""Faults in the lease of a run and in its fence: who may publish checkpoints, and which ones came too late."""

from .mutant import Mutant

_LEASE = "tests/unit/trainer/test_lease.py"
_HELD = "tests/unit/trainer/launch/test_held.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="lost-run-keeps-saves",
        what="a launcher that lost its run leaves the unfinished saves of its ranks",
        file="trainer/launch/supervise.py",
        before="remove_saves_of(folder, lease.epoch)",
        after="pass",
        tests=(
            "tests/unit/trainer/launch/test_supervise.py::"
            "test_a_launcher_that_lost_its_run_takes_its_unfinished_saves_away_and_no_others",
        ),
    ),
    Mutant(
        name="fence-off",
        what="an attempt publishes checkpoints although another one has taken over",
        file="trainer/checkpoint/fence.py",
        before="newest is not None and newest.epoch > epoch",
        after="False",
        tests=(f"{_LEASE}::test_a_save_is_refused_before_it_changes_anything",),
    ),
    Mutant(
        name="late-admitted",
        what="readers take a checkpoint that was published too late",
        file="trainer/checkpoint/fence.py",
        before="return step > max(map(int, adopted), default=0)",
        after="return False",
        tests=(f"{_LEASE}::test_a_checkpoint_that_comes_too_late_is_nobodys",),
    ),
    Mutant(
        name="late-replaces",
        what="readers take a checkpoint that a late commit has put in place of another one",
        file="trainer/checkpoint/fence.py",
        before='return known not in ("", sha256)',
        after="return False",
        tests=(f"{_LEASE}::test_a_replaced_checkpoint_is_late_and_a_restored_one_is_not",),
    ),
    Mutant(
        name="restored-refused",
        what="a checkpoint that was restored from a copy counts as late",
        file="trainer/checkpoint/fence.py",
        before="return step > max(map(int, adopted), default=0)",
        after="return True",
        tests=(f"{_LEASE}::test_a_replaced_checkpoint_is_late_and_a_restored_one_is_not",),
    ),
    Mutant(
        name="record-replaced",
        what="two launchers get the same number",
        file="trainer/lease.py",
        before="[to_bytes(record)], new=True)",
        after="[to_bytes(record)])",
        tests=(f"{_LEASE}::test_of_two_launchers_one_takes_the_run",),
    ),
    Mutant(
        name="lease-of-the-living",
        what="a launcher that gives signs of life loses the run",
        file="trainer/lease.py",
        before="if sign != before:",
        after="if False:",
        tests=(f"{_LEASE}::test_a_launcher_that_gives_signs_of_life_keeps_the_run",),
    ),
    Mutant(
        name="lease-lost-unseen",
        what="a launcher does not look whether it was replaced",
        file="trainer/lease.py",
        before="newest.epoch >= self.epoch and newest.holder != self._record.holder",
        after="False",
        tests=(f"{_LEASE}::test_a_holder_that_was_replaced_hears_of_it",),
    ),
    Mutant(
        name="late-record-adopts-nothing",
        what="a record that a store gets later makes its checkpoints late",
        file="trainer/lease.py",
        before='return {kind: dict.fromkeys(map(str, found), "") for kind, found in steps.items()}',
        after="return {kind: {} for kind in steps}",
        tests=(f"{_LEASE}::test_a_store_that_does_not_answer_gets_its_record_later",),
    ),
    Mutant(
        name="late-store-of-another-run",
        what="a store that answers late is used although it belongs to another run",
        file="trainer/lease.py",
        before="if any(steps.values()) and before and before.run",
        after="if False and before and before.run",
        tests=(f"{_LEASE}::test_a_store_that_answers_late_may_be_of_another_run",),
    ),
    Mutant(
        name="end-believed",
        what="a launcher takes the end of the job that replaced its own for the end of its own",
        file="trainer/launch/supervise.py",
        before="                    lease.require()  # before",
        after="                    pass  # before",
        tests=("tests/board/test_rows.py::test_a_row[RS30 zombie]",),
    ),
    Mutant(
        name="upload-unfenced",
        what="an attempt uploads checkpoints although another one has taken over",
        file="trainer/checkpoint/remote.py",
        before="            raise lease_lost(self.url, newest)",
        after="            pass",
        tests=(f"{_LEASE}::test_an_upload_is_refused_and_a_late_one_is_replaced",),
    ),
    Mutant(
        name="late-upload-stays",
        what="a late manifest in the store keeps the checkpoint of the newer attempt out",
        file="trainer/checkpoint/remote.py",
        before="        if replaces:  # superseded",
        after="        if False:  # superseded",
        tests=(f"{_LEASE}::test_an_upload_is_refused_and_a_late_one_is_replaced",),
    ),
    Mutant(
        name="command-beside-another-machine",
        what="a command changes a run that another machine trains",
        file="trainer/launch/stored.py",
        before="        lease.wait(say)\n",
        after="",
        tests=(f"{_HELD}::test_a_run_that_another_machine_trains_is_left_alone",),
    ),
    Mutant(
        name="fetched-is-late",
        what="a checkpoint that a command fetched counts as published too late",
        file="trainer/lease.py",
        before="self._adopting = {kind: adopting}",
        after="self._adopting = {}",
        tests=(f"{_HELD}::test_a_fetched_checkpoint_counts_although_an_earlier_attempt_saved_it",),
    ),
]
