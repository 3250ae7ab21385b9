"""Faults in the watch over the run folder: its mount is gone, fails, or does not answer."""

from .mutant import Mutant

_WATCH = "tests/unit/trainer/launch/test_folder_watch.py"
_SUPERVISOR = "tests/unit/trainer/launch/test_supervise.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="below-the-mount-point",
        what="a run goes on in the folder that its path shows when its mount is gone",
        file="trainer/launch/folder_watch.py",
        before="is_same = os.path.samestat(self._root.stat(), os.fstat(self._fd))",
        after="is_same = bool(self._root.stat())",
        tests=(f"{_WATCH}::test_a_folder_that_is_gone_or_another_one_is_lost",),
    ),
    Mutant(
        name="folder-not-watched",
        what="the supervisor does not look at the identity of its folder",
        file="trainer/launch/supervise.py",
        before="is_there = self._watch is None or self._watch.require()",
        after="is_there = True",
        tests=(f"{_SUPERVISOR}::test_a_run_folder_that_vanishes_ends_the_job",),
    ),
    Mutant(
        name="ranks-blamed-for-their-folder",
        what="ranks that cannot write to a read-only folder are started again",
        file="trainer/launch/supervise.py",
        before="self._watch.require(writable=True)",
        after="self._watch.require()",
        tests=(f"{_SUPERVISOR}::test_a_folder_that_is_lost_with_its_ranks_is_the_cause",),
    ),
    Mutant(
        name="folder-error-without-a-name",
        what="an error of the file system of the run folder ends the command without a code of its own",
        file="trainer/launch/supervise.py",
        before="watch.require(writable=True, met=error)",
        after="pass",
        tests=(f"{_SUPERVISOR}::test_an_error_of_the_file_system_is_one_of_the_run_folder",),
    ),
    Mutant(
        name="full-disk-is-a-crash",
        what="a rank whose disk is full ends with a traceback, and is started again",
        file="trainer/resilience/endings.py",
        before="with full_disk_named(folder.root):\n            yield",
        after="with contextlib.nullcontext():\n            yield",
        tests=("tests/unit/trainer/resilience/test_endings.py::test_a_full_disk_is_a_cause_that_no_restart_resolves",),
    ),
    Mutant(
        name="full-disk-without-a-name",
        what="a command whose disk is full ends with the code of missing permissions",
        file="storage.py",
        before="_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)",
        after="_FULL = (errno.EFBIG,)",
        tests=("tests/unit/cli/test_main.py::test_what_the_system_refuses_is_a_message_and_no_traceback",),
    ),
    Mutant(
        name="torn-event-on-a-full-disk",
        what="an event of which a full disk took a part is lost",
        file="events.py",
        before="        return not self._may_be_torn",
        after="        return True",
        tests=("tests/unit/test_ground.py::test_events_for_which_a_disk_has_no_room_wait_for_it",),
    ),
    Mutant(
        name="manifest-below-the-mount-point",
        what="a manifest is written below the mount point if the mount goes just then",
        file="trainer/checkpoint/manifest.py",
        before=", make_folder=False)",
        after=")",
        tests=(
            "tests/unit/trainer/checkpoint/test_manifest.py"
            "::test_no_manifest_is_written_below_a_mount_point_whose_mount_is_gone",
        ),
    ),
    Mutant(
        name="silent-folder",
        what="a folder that does not answer holds the launcher and its ranks for ever",
        file="trainer/launch/folder_watch.py",
        before="if waited >= self._limit:",
        after="if False:",
        tests=(f"{_WATCH}::test_a_folder_that_does_not_answer_ends_the_launcher_and_its_job",),
    ),
    Mutant(
        name="silent-folder-keeps-ranks",
        what="a launcher whose folder does not answer ends without its ranks",
        file="trainer/launch/folder_watch.py",
        before="_try(self._kill, _KILL_SECONDS)",
        after="pass",
        tests=(f"{_WATCH}::test_a_folder_that_does_not_answer_ends_the_launcher_and_its_job",),
    ),
    Mutant(
        name="late-answers-add-up",
        what="a folder that answers late each time counts as one that does not answer",
        file="trainer/launch/folder_watch.py",
        before="waited = 0.0\n",
        after="waited = self._limit / 2\n",
        tests=(f"{_WATCH}::test_a_folder_that_answers_late_is_none_that_is_silent",),
    ),
    Mutant(
        name="one-error-loses-the-folder",
        what="one input/output error of a touch ends a healthy run",
        file="trainer/launch/folder_watch.py",
        before="passing = error.errno in MAY_PASS",
        after="passing = False",
        tests=(f"{_WATCH}::test_what_the_thread_finds_is_heard_of_unless_it_may_pass",),
    ),
    Mutant(
        name="saved-below-the-mount-point",
        what="a checkpoint is saved below the mount point of a run folder that is gone",
        file="trainer/checkpoint/files.py",
        before="if self.epoch:  # otherwise",
        after="if False:  # otherwise",
        tests=(f"{_WATCH}::test_an_attempt_saves_nothing_into_a_folder_without_its_run_file",),
    ),
]
