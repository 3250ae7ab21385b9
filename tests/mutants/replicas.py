"""Faults in the snapshots that nodes keep in memory: which are whole, which are new, and whose bytes are right."""

from .mutant import Mutant

_REPLICAS = "tests/unit/trainer/test_replicas.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="memory-believed",
        what="a snapshot in memory is used without a comparison of its bytes",
        file="trainer/checkpoint/keeper.py",
        before="sha256_of(found, image.bytes) != image.sha256",
        after="False",
        tests=(f"{_REPLICAS}::test_a_snapshot_that_changed_in_memory_is_refused_and_the_checkpoint_is_used",),
    ),
    Mutant(
        name="transfer-believed",
        what="a copy that arrives with other bytes is kept",
        file="trainer/checkpoint/keeper.py",
        before="if connection.receive(1 << 10).decode() != found:",
        after="if connection.receive(1 << 10).decode() == found * 2:",
        tests=(f"{_REPLICAS}::test_a_copy_that_arrives_with_other_bytes_is_refused",),
    ),
    Mutant(
        name="snapshots-mixed",
        what="a run continues from images of two saves",
        file="trainer/checkpoint/replicas.py",
        before="found.setdefault(image.snapshot, {})",
        after='found.setdefault("", {})',
        tests=(f"{_REPLICAS}::test_only_whole_and_new_snapshots_are_chosen",),
    ),
    Mutant(
        name="memory-of-an-old-attempt",
        what="a run continues from snapshots of an attempt before the last one",
        file="trainer/checkpoint/replicas.py",
        before="image.epoch in epochs and image.step >= at_least",
        after="image.step >= at_least",
        tests=(f"{_REPLICAS}::test_only_whole_and_new_snapshots_are_chosen",),
    ),
    Mutant(
        name="memory-before-a-newer-checkpoint",
        what="a run continues from a snapshot although a checkpoint is newer",
        file="trainer/checkpoint/replicas.py",
        before="image.epoch in epochs and image.step >= at_least",
        after="image.epoch in epochs",
        tests=(f"{_REPLICAS}::test_only_whole_and_new_snapshots_are_chosen",),
    ),
    Mutant(
        name="weights-in-the-kept-snapshot",
        what="a save of the weights alone overwrites the full snapshot that the keeper has",
        file="trainer/checkpoint/background.py",
        before="Snapshot(device) if replicas else self._snapshot",
        after="self._snapshot",
        tests=(f"{_REPLICAS}::test_the_ranks_survive_in_the_memory_of_their_own_node",),
    ),
    Mutant(
        name="unfit-state-in-memory",
        what="a snapshot that is not fit to be saved stays in memory, and a start continues from it",
        file="trainer/checkpoint/background.py",
        before="        if self.is_fatal:\n            self._withdraw()",
        after="        if self.is_fatal:\n            pass",
        tests=(f"{_REPLICAS}::test_a_state_that_is_not_fit_to_be_saved_is_not_kept_in_memory_either",),
    ),
    Mutant(
        name="forgets-too-little",
        what="snapshots of steps that a run went back from stay in memory",
        file="trainer/checkpoint/keeper.py",
        before='image.step > request["after"]',
        after="image.step < 0",
        tests=(f"{_REPLICAS}::test_a_copy_that_arrives_with_other_bytes_is_refused",),
    ),
    Mutant(
        name="keeper-of-the-job",
        what="the supervisor ends the keeper together with the ranks",
        file="trainer/checkpoint/keeper.py",
        before='if key.startswith(("PYTHON", "LD_")) or key == "PATH"',
        after="",
        tests=("tests/e2e/test_recovery.py::test_a_killed_rank_continues_from_memory_and_nothing_is_left",),
    ),
    Mutant(
        name="keeper-left",
        what="the keeper of a run stays when its supervisor has ended the run and lives on",
        file="trainer/launch/supervise.py",
        before="end_keeper(os.getpid(), folder.root)",
        after="pass",
        tests=("tests/e2e/test_recovery.py::test_a_killed_rank_continues_from_memory_and_nothing_is_left",),
    ),
]
