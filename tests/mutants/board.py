"""Faults of durability, which only a kill or a loss of power from outside of the program shows: tests/board."""

from .mutant import Mutant

_SAVE = "tests/unit/trainer/checkpoint/test_save.py"
_POWER = "tests/board/test_rows.py::test_a_loss_of_power_after_any_rename_costs_no_checkpoint"
_POINTS = "tests/board/test_crash_points.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="manifest-not-flushed",
        what="files written under a temporary name are renamed while the disk may not have their bytes yet",
        file="storage.py",
        before="            file.flush()\n            os.fsync(file.fileno())\n",
        after="            file.flush()\n",
        tests=(_POWER,),
    ),
    Mutant(
        name="folder-not-flushed",
        what="the older checkpoint is removed while the disk may not have the name of the new one yet",
        file="trainer/checkpoint/folders.py",
        before="        raise\n    fsync_dir(path.parent)\n",
        after="        raise\n",
        tests=(_POWER,),
    ),
    Mutant(
        name="published-before-manifest",
        what="a checkpoint gets its name before its manifest is written",
        file="trainer/checkpoint/files.py",
        before="            write_manifest(self.temporary, manifest)\n"
        "            fsync_dir(self.temporary)\n"
        "            self.require_newest()\n"
        "            publish(self.temporary, self.path)\n",
        after="            publish(self.temporary, self.path)\n            write_manifest(self.path, manifest)\n",
        tests=(_POWER,),
    ),
    Mutant(
        name="commit-before-the-second-disk",
        what="the manifest is committed while the disk of the second rank may not have the name of its file yet",
        file="trainer/checkpoint/files.py",
        before="                fsync_dir(own)\n",
        after="                fsync_dir(own) if not rank else None\n",
        tests=(f"{_POINTS}::test_a_loss_of_power_after_the_commit_finds_the_files_of_all_disks",),
    ),
    Mutant(
        name="weights-published-before-manifest",
        what="a save of the weights alone gets its name before its manifest is written",
        file="trainer/checkpoint/files.py",
        before="            publish(self.temporary, self.path)\n",
        after="            if manifest.kind != FULL:\n"
        "                (self.temporary / 'manifest.json').unlink()\n"
        "            publish(self.temporary, self.path)\n"
        "            write_manifest(self.path, manifest)\n",
        tests=(f"{_POINTS}::test_a_crash_of_a_save_of_the_weights_leaves_a_whole_one",),
    ),
    Mutant(
        name="samples-of-a-snapshot-lost",
        what="a run continues from memory without the samples that its save had not written yet",
        file="trainer/checkpoint/replicas.py",
        before="    if not last.exists():  # its save did not come so far",
        after="    if False:",
        tests=(f"{_POINTS}::test_a_rank_that_ends_while_it_writes_continues_from_memory",),
    ),
    Mutant(
        name="second-snapshot",
        what="a save fills a second snapshot",
        file="trainer/checkpoint/background.py",
        before="            size = snapshot.take(tensors, header)\n",
        after="            size = snapshot.take(tensors, header)\n"
        "            self._second = getattr(self, '_second', None) or Snapshot(snapshot._device)\n"
        "            self._second.take(tensors)\n",
        tests=("tests/board/test_save_memory.py",),
    ),
    Mutant(
        name="old-checkpoint-ends-the-save",
        what="a checkpoint counts as not saved if an old one cannot be removed",
        file="trainer/checkpoint/files.py",
        before="        except OSError as error:  # the checkpoint is there, and the next save tries again",
        after="        except ZeroDivisionError as error:",
        tests=(f"{_SAVE}::test_an_old_checkpoint_that_cannot_be_removed_costs_no_new_one",),
    ),
    Mutant(
        name="vanished-disk-unnamed",
        what="a disk that does not answer how much room it has ends a run with a traceback",
        file="trainer/checkpoint/files.py",
        before="self._on_disk(checkpoints, lambda: require_free(checkpoints, needed, purpose))",
        after="require_free(checkpoints, needed, purpose)",
        tests=(f"{_SAVE}::test_a_disk_that_vanished_is_named",),
    ),
    Mutant(
        name="read-back-of-memory",
        what="only the number of bytes that the disk gives back is compared",
        file="trainer/checkpoint/verified_file.py",
        before="if not np.array_equal(found, np.frombuffer(piece, np.uint8)):",
        after="if len(found) != len(piece):",
        tests=("tests/board/test_rows.py::test_a_wrong_bit_on_its_way_to_the_disk_is_noticed",),
    ),
    Mutant(
        name="leftovers-of-the-ledger",
        what="a file of samples that a killed save was writing stays in the ledger folder for ever",
        file="trainer/checkpoint/folders.py",
        before="return removed + remove_unfinished(folder.ledger)",
        after="return removed",
        tests=(f"{_SAVE}::test_leftovers_of_killed_saves_are_named",),
    ),
    Mutant(
        name="other-numbers-without-consent",
        what="a run continues with a setting that makes another experiment of it, without --accept-change",
        file="schema/changes.py",
        before="return self in (ChangeClass.SAME_BITS, ChangeClass.SAME_MATHEMATICS)",
        after="return self is not ChangeClass.REFUSED",
        tests=("tests/board/test_rows.py::test_a_row[RS29]",),
    ),
    Mutant(
        name="cut-off-node-kept",
        what="a job waits for ever for a node that a network without a sign has cut off",
        file="trainer/launch/nodes.py",
        before="elif node.link.silent() > self._launch.node_seconds:",
        after="elif node.link.silent() > 600:",
        tests=("tests/board/test_links.py::test_a_case_of_the_row[spare]",),
    ),
    Mutant(
        name="leader-that-returns-leads-on",
        what="a leader that was frozen trains on, although another one has taken the lease",
        file="trainer/lease.py",
        before="        if newest.epoch >= self.epoch or is_new:",
        after="        if False:",
        tests=("tests/board/test_links.py::test_a_case_of_the_row[two-leaders]",),
    ),
    Mutant(
        name="gap-of-a-network-is-a-loss",
        what="a node counts as lost because TCP waits twice as long as the network was gone",
        file="trainer/launch/link.py",
        before="            connected.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _REPEAT_MS)",
        after="            pass",
        tests=("tests/board/test_links.py::test_a_case_of_the_row[gap]",),
    ),
]
