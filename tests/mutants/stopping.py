"""Faults in the way a run ends: signals, time limits, the agreement of the ranks, and the last save."""

from .mutant import Mutant

_RUNS = "tests/unit/trainer/test_stopping.py"
_SUPERVISOR = "tests/unit/trainer/launch/test_supervise.py"
_SIGNALS = "tests/unit/trainer/test_interrupts.py"
_VOTE = "tests/unit/trainer/resilience/test_stop_vote.py"
_UPLOADS = "tests/unit/trainer/test_last_uploads.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="uploads-outlast-a-request",
        what="a request to stop does not end the wait for the last uploads",
        file="trainer/save.py",
        before="if request is not None and request is not before:",
        after="if False:",
        tests=(f"{_UPLOADS}::test_the_wait_is_announced_and_ends_with_a_request",),
    ),
    Mutant(
        name="uploads-without-grace",
        what="the time that a scheduler leaves is not used for the last uploads",
        file="trainer/save.py",
        before="ends, request.deadline - _END_SECONDS if waits else now), request",
        after="ends, now), request",
        tests=(f"{_UPLOADS}::test_a_scheduler_leaves_the_wait_its_grace",),
    ),
    Mutant(
        name="stopped-without-uploads",
        what="the request by which a run stops leaves out the upload of its last checkpoint",
        file="trainer/save.py",
        before="requests.current() if stopped else None",
        after="None",
        tests=(f"{_UPLOADS}::test_the_request_by_which_the_run_stopped_does_not_end_the_wait",),
    ),
    Mutant(
        name="uploads-in-silence",
        what="the wait for the last uploads is silent",
        file="trainer/save.py",
        before="if not is_reported and began + _SILENT_SECONDS <= now < ends:",
        after="if False:",
        tests=(f"{_UPLOADS}::test_the_wait_is_announced_and_ends_with_a_request",),
    ),
    Mutant(
        name="progress-of-the-last-attempt",
        what="what an upload has left to send includes what the attempt before had left",
        file="trainer/checkpoint/uploader.py",
        before="self._count(total - self._left)",
        after="self._count(total)",
        tests=(f"{_UPLOADS}::test_progress_is_what_is_left_of_the_last_upload",),
    ),
    Mutant(
        name="stop-at-log-lines",
        what="requests to stop are read after steps with a log line only",
        file="trainer/loop.py",
        before="request, due = trainer.stop_vote.after_step(at_line=bool(self.line), due=vote)",
        after="request, due = trainer.stop_vote.after_step(at_line=True, due=vote) if self.line else (None, 0)",
        tests=(f"{_RUNS}::test_a_signal_to_one_rank_stops_all_after_the_same_step",),
    ),
    Mutant(
        name="stop-after-of-an-attempt",
        what="the time limit counts from the start of the attempt, not of the launcher",
        file="trainer/launch/supervise.py",
        before="                running.start(restarts.count, before)\n",
        after="                stopping = _Stopping(folder, StopRequests(None, launch, time.monotonic()), say)\n"
        "                running.start(restarts.count, before)\n",
        tests=(f"{_SUPERVISOR}::test_the_time_limit_counts_over_all_attempts",),
    ),
    Mutant(
        name="stop-after-of-a-rank",
        what="under torchrun the time limit counts from the start of the rank",
        file="trainer/interrupts.py",
        before='if "TORCHELASTIC_RUN_ID" not in os.environ:',
        after='if "TORCHELASTIC_RUN_ID" in os.environ:',
        tests=(f"{_SIGNALS}::test_a_rank_of_torchrun_counts_from_the_start_of_torchrun",),
    ),
    Mutant(
        name="interrupt-during-commit",
        what="a second signal kills the ranks while they write a checkpoint",
        file="trainer/interrupts.py",
        before="self._waits = is_saving(self._folder)",
        after="self._waits = False",
        tests=(
            f"{_SUPERVISOR}::test_a_second_signal_does_not_kill_ranks_that_write_a_checkpoint",
            f"{_SIGNALS}::test_a_second_ctrl_c_waits_for_a_checkpoint_and_a_third_does_not",
        ),
    ),
    Mutant(
        name="second-sigterm-kills",
        what="a second SIGTERM counts like a second Ctrl-C",
        file="trainer/interrupts.py",
        before="if number != signal.SIGINT:",
        after="if number == signal.SIGHUP:",
        tests=(f"{_SIGNALS}::test_every_stop_signal_asks_once_and_the_handlers_return",),
    ),
    Mutant(
        name="notebook-cell-asks",
        what="Ctrl-C in a notebook asks the run to stop and does not end the cell",
        file="trainer/interrupts.py",
        before='ctrl_c="ipykernel" not in sys.modules',
        after="ctrl_c=True",
        tests=(f"{_SIGNALS}::test_in_a_notebook_ctrl_c_ends_the_cell",),
    ),
    Mutant(
        name="grace-without-end",
        what="ranks that do not stop live on after the end of launch.grace",
        file="trainer/launch/supervise.py",
        before="now >= self.request.deadline",
        after="now < 0",
        tests=(f"{_SUPERVISOR}::test_ranks_that_do_not_stop_are_killed_at_the_end_of_the_grace",),
    ),
    Mutant(
        name="save-without-time",
        what="a save is begun that cannot end within the rest of launch.grace",
        file="trainer/loop.py",
        before="if self.stopped and not fits(",
        after="if self.stopped and not self.stopped and not fits(",
        tests=(f"{_RUNS}::test_a_save_that_does_not_fit_into_the_grace_is_not_begun",),
    ),
    Mutant(
        name="own-estimate-of-a-save",
        what="each rank decides by its own estimate whether a save fits",
        file="trainer/save.py",
        before="largest_of_ranks(SAVE_MARGIN * trainer.save_seconds, time.monotonic() - deadline)",
        after="(SAVE_MARGIN * trainer.save_seconds, time.monotonic() - deadline)",
        tests=(f"{_RUNS}::test_a_save_that_does_not_fit_into_the_grace_is_not_begun",),
    ),
    Mutant(
        name="writer-killed-by-signals",
        what="a signal to every process of a job kills the processes that write checkpoints",
        file="trainer/checkpoint/writer.py",
        before="signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)",
        after="signal.pthread_sigmask(signal.SIG_BLOCK, ())",
        tests=(f"{_RUNS}::test_the_process_that_writes_a_checkpoint_outlives_the_signals_of_a_scheduler",),
    ),
    Mutant(
        name="latest-deadline",
        what="the latest deadline of the ranks counts, not the earliest",
        file="trainer/resilience/stop_vote.py",
        before="largest_of_ranks(reason, -left, own_seconds, due)",
        after="largest_of_ranks(reason, left, own_seconds, due)",
        tests=(f"{_VOTE}::test_the_earliest_deadline_counts",),
    ),
    Mutant(
        name="vote-by-own-steps",
        what="each rank decides by its own step time when to vote, so ranks stop after different steps",
        file="trainer/resilience/stop_vote.py",
        before="max(step_seconds, 1e-6)",
        after="max(own_seconds, 1e-6)",
        tests=(f"{_VOTE}::test_all_ranks_stop_after_the_same_step",),
    ),
]
