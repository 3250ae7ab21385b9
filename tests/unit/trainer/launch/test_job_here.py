"""The ranks of this machine, as the supervisor sees them: ranks that hang while the others are in no step."""

import os

import pytest

from ingot.schema.launch import Launch
from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.launch.job_here import JobHere

# Rank 0 is in a step for ever, and rank 1 in a save. WAITS is the rank that has begun a collective that the other one
# has not.
RANK = """
import os, sys, time
from ingot.trainer.resilience import reports
from ingot.trainer.resilience.collective_calls import CollectiveCall
from ingot.trainer.resilience.heartbeat import Phase, open_heartbeat
rank, waits = int(os.environ["RANK"]), int(sys.argv[1])
call = CollectiveCall("dp", (0, 1), 4, "all_reduce", ((8,),), "Float", finished=False)
reports.calls_of_this_process = lambda: (call,) if rank == waits else ()
own = reports.Reports()
heartbeat = open_heartbeat(rank, own.stacks, own.collectives)
heartbeat.enter(Phase.SAVE if rank else Phase.STEP, 6)
time.sleep(60)
"""


@pytest.mark.parametrize(("waits", "hangs"), [(1, True), (0, False)])
def test_a_suspect_hangs_only_if_the_others_wait_for_it(tmp_path, waits, hangs):
    (tmp_path / "fake_rank.py").write_text(RANK)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    job = Job(module="fake_rank", arguments=(str(waits),), processes=2, env={"PYTHONPATH": path})
    running, found = JobHere(RunFolder(tmp_path / "run"), job, Launch(watchdog_seconds=0.3)), []
    look = running._look
    running._look = lambda: found.append(look()) or found[-1]
    try:
        running.start(0)
        while not any(hang and hang.suspects for hang in found):
            assert running.running()
            hang = running.hang()
            running.wait(0.05)
        assert found[-1].suspects == {0} and (hang is not None) == hangs
        if hang:
            assert running.examine(hang, 6).rank == 0
    finally:
        running.close()
