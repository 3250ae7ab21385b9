from ingot.events import EventLog
from ingot.trainer.launch.outcome import EventLogReader


def test_reads_what_is_added_and_only_that(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("finished", step=9)
    watch = EventLogReader(path)
    watch.read()
    assert watch.ended == ""
    log.write("run_started", from_step=40)
    log.write("progress", step=44)
    watch.read()
    assert watch.step == 44
    log.write("stopped", step=50)
    watch.read()
    assert (watch.ended, watch.step) == ("stopped", 50)


def test_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "events.jsonl"
    watch = EventLogReader(path)
    watch.read()  # no file yet
    with path.open("w") as file:
        file.write('{"kind": "progress", "st')
        file.flush()
        watch.read()
        assert watch.step == 0
        file.write('ep": 3}\nnot json\n{"kind": "progress", "step": 4}\n')
        file.flush()
        watch.read()
    assert watch.step == 4


def test_knows_the_checkpoint_that_was_verified_last(tmp_path):
    path = tmp_path / "events.jsonl"
    log, watch = EventLog(path), EventLogReader(path)
    watch.read()
    assert watch.saved is None
    log.write("run_started", from_step=160)
    watch.read()
    assert watch.saved == 160
    log.write("checkpoint", step=170)
    watch.read()
    assert watch.saved == 170
    log.write("progress", step=178)
    log.write("rolled_back", from_step=178, to_step=160)  # a fault that comes now is near step 160
    watch.read()
    assert (watch.saved, watch.step) == (160, 160)


def test_knows_the_ranks_that_are_slow_for_long(tmp_path):
    path = tmp_path / "events.jsonl"
    log, watch = EventLog(path), EventLogReader(path)
    slow = {"step": 90, "factor": 2.0, "since": 7, "ended": False, "slowdown": None}

    def ranks(rank, **changes):
        log.write("straggler", **slow | {"rank": rank} | changes)
        watch.read()
        return sorted(watch.slow)

    log.write("run_started", from_step=0)
    assert ranks(1) == [] and ranks(1, slowdown=1.5) == [1] and ranks(2, slowdown=1.5) == [1, 2]
    assert ranks(1, ended=True) == [2] and ranks(2) == [] and ranks(3, slowdown=1.5) == [3]
    log.write("run_started", from_step=40)
    watch.read()
    assert watch.slow == {}
