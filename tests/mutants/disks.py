"""Faults in keeping the files of checkpoints on local disks of the nodes."""

from .mutant import Mutant

_TESTS = "tests/unit/trainer/test_disks.py"
_PLACES = "trainer/checkpoint/places.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="one-disk-takes-all",
        what="every rank of a node writes to its first disk",
        file=_PLACES,
        before="disks[number % len(disks)]",
        after="disks[0]",
        tests=(f"{_TESTS}::test_ranks_write_to_the_disks_of_their_node_and_continue_from_them_bit_for_bit",),
    ),
    Mutant(
        name="copy-sweeps-the-original",
        what="a copy of a run folder removes the files of the original from the disks",
        file=_PLACES,
        before="names[: not is_copy] if own else names",
        after="names[:1] if own else names",
        tests=(f"{_TESTS}::test_a_copy_of_a_run_reads_the_files_of_the_original_and_never_removes_them",),
    ),
    Mutant(
        name="displaced-files-stay",
        what="files of checkpoints that retention removed stay on the disks of nodes",
        file="trainer/checkpoint/nodes.py",
        before="    if local_rank() == 0:\n        sweep(",
        after="    if False:\n        sweep(",
        tests=(f"{_TESTS}::test_every_node_removes_what_is_no_longer_listed",),
    ),
    Mutant(
        name="failed-save-fills-the-disk",
        what="a save that failed leaves its files on the disks until the next start",
        file="trainer/checkpoint/nodes.py",
        before="files.discard_own(rank())",
        after="pass",
        tests=(f"{_TESTS}::test_a_save_that_failed_leaves_nothing_on_any_disk",),
    ),
    Mutant(
        name="unmounted-disk",
        what="a run starts although a disk is not mounted",
        file=_PLACES,
        before="if not disk.is_dir():",
        after="if False:",
        tests=(f"{_TESTS}::test_a_disk_that_is_missing_stops_the_start",),
    ),
    Mutant(
        name="elsewhere-is-damage",
        what="verify takes a file on another node for damage",
        file="trainer/checkpoint/manifest.py",
        before="manifest.files.keys() - set(files_elsewhere(path, manifest))",
        after="manifest.files",
        tests=(f"{_TESTS}::test_files_of_other_nodes_are_named_and_are_no_damage",),
    ),
    Mutant(
        name="whole-checkpoint-fetched",
        what="a node that lacks one file fetches those that it has as well",
        file="trainer/checkpoint/nodes.py",
        before="                return 0\n            except",
        after="            except",
        tests=(f"{_TESTS}::test_only_the_files_that_are_missing_or_damaged_come_from_the_store",),
    ),
    Mutant(
        name="local-files-unverified",
        what="files that are on a disk of the node are loaded without a look at their hashes",
        file="trainer/checkpoint/nodes.py",
        before="                verify_files(path, manifest, [name])\n",
        after="",
        tests=(f"{_TESTS}::test_only_the_files_that_are_missing_or_damaged_come_from_the_store",),
    ),
    Mutant(
        name="half-the-files-needed",
        what="a rank does not ask for the files of others that hold blocks of it",
        file="trainer/checkpoint/load.py",
        before="return NeededFiles(large, wanted.keys() - large)",
        after="return NeededFiles(own, set())",
        tests=(f"{_TESTS}::test_a_node_reads_only_the_files_that_its_ranks_need",),
    ),
    Mutant(
        name="commit-before-the-other-nodes",
        what="the first node writes the manifest before other nodes have uploaded their files",
        file="trainer/checkpoint/remote.py",
        before="if len(jobs) < len(manifest.files):",
        after="if False:",
        tests=(f"{_TESTS}::test_the_first_node_commits_when_the_files_of_all_nodes_are_in_the_store",),
    ),
    Mutant(
        name="every-node-commits",
        what="every node writes the manifest, and prunes the store",
        file="trainer/checkpoint/remote.py",
        before="epoch, not node()",
        after="epoch, True",
        tests=(f"{_TESTS}::test_the_first_node_commits_when_the_files_of_all_nodes_are_in_the_store",),
    ),
    Mutant(
        name="repair-wants-all-files",
        what="a checkpoint with files on other nodes does not count in a repair of the ledger",
        file="report/lineage/repair.py",
        before="sorted(manifest.files.keys() - set(absent))",
        after="manifest.files",
        tests=("tests/unit/trainer/test_prove.py::test_files_on_disks_of_other_nodes_are_named_and_stop_no_repair",),
    ),
]
