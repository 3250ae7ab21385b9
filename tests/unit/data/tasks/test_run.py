import subprocess
import sys

import pytest
from tests.expect import refused

from ingot.data.tasks.drill import digest, first_phase, run_job
from ingot.data.tasks.run import Inline, PhaseStatus, describe, run_all
from ingot.data.tasks.store import Store


def test_results_in_order_and_only_once(tmp_path):
    store, log = Store(tmp_path / "s"), tmp_path / "log"
    tasks = first_phase(5, 10, log=log)
    first = run_all(tasks[:2], store, Inline())
    statuses: list[PhaseStatus] = []
    results = run_all(tasks, store, Inline(), statuses.append)
    assert results[:2] == first
    assert results == [store.result(task) for task in tasks]
    assert log.read_text().count("\n") == 5
    last = statuses[-1]
    assert (last.done, last.total, last.records) == (5, 5, 30)  # of this call: three tasks
    assert last.counts["kept"] == sum(result["kept"] for result in results[2:])
    assert sum(last.counts.values()) == 30


def test_a_long_task_is_seen_while_it_runs(tmp_path):
    statuses: list[PhaseStatus] = []
    run_all(first_phase(1, 60, wait=0.02), Store(tmp_path), Inline(), statuses.append)
    under_way = [status for status in statuses if not status.done]
    assert len(under_way) >= 2
    assert 0 < under_way[-1].records < 60
    assert under_way[-1].counts
    assert under_way[-1].seconds_left is None


def test_the_folder_of_a_store_does_not_decide_the_bytes(tmp_path):
    assert run_job(Store(tmp_path / "a"), Inline(), tasks=3) == run_job(Store(tmp_path / "b"), Inline(), tasks=3)


def test_one_driver_per_store(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from ingot.data.tasks.run import _only_driver\n"
        "from ingot.data.tasks.store import Store\n"
        "with _only_driver(Store(Path(sys.argv[1]))): print('in', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout and other.stdout.readline() == "in\n"
        with refused("E-STORE-BUSY", path=str(tmp_path)) as error:
            run_all(first_phase(1, 1), Store(tmp_path), Inline())
        assert error.value.facts["owner"].startswith(f"process {other.pid} on")
    finally:
        other.kill()
        other.communicate()
    assert run_all(first_phase(1, 1), Store(tmp_path), Inline())  # the kernel let go


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (
            PhaseStatus(3, 8, 12_340, {"kept": 31, "language.other": 22, "url.duplicate": 17, "x": 30}, 30.1, 130.0),
            "12,340 records, 410/s, 3 of 8 files, 2 min 10 s left; kept 31%; most dropped by x 30%",
        ),
        (PhaseStatus(0, 8), "0 of 8 files"),
        (PhaseStatus(0, 8, 3, {}, 2.0), "3 records, 1.5/s, 0 of 8 files"),
        (PhaseStatus(8, 8, 10, {"kept": 10}, 1.0, 0.0), "10 records, 10/s, 8 of 8 files; kept 100%"),
        (PhaseStatus(1, 2, 10, {"b": 5, "a": 5}, 1.0, 0.2), "10 records, 10/s, 1 of 2 files, 1.0 s left; kept 0%; "
         "most dropped by a 50%"),
    ],
)  # fmt: skip
def test_what_people_read(status, text):
    assert describe(status) == text


def test_finished_tasks_are_found_without_asking_for_each(tmp_path, monkeypatch):
    store, tasks = Store(tmp_path), first_phase(2000, 1)
    for task in tasks[:1500]:
        store.folder(task).mkdir(parents=True)
    monkeypatch.setattr(Store, "finished", None)
    assert store.finished_keys(task.key for task in tasks) == {task.key for task in tasks[:1500]}
    assert len(list((tmp_path / "done").iterdir())) <= 256


def test_digest_sees_what_was_written(tmp_path):
    store, tasks = Store(tmp_path), first_phase(1, 5)
    run_all(tasks, store, Inline())
    before = digest(store, tasks)
    (store.folder(tasks[0]) / "seconds.json").write_text("9")
    assert digest(store, tasks) == before
    (store.folder(tasks[0]) / "lines.jsonl").write_text("")
    assert digest(store, tasks) != before
