import os
import signal
import threading
import time

import pytest
from tests.expect import refused

from ingot.data.tasks.drill import first_phase, run_job
from ingot.data.tasks.ray import Ray, _check_answer
from ingot.data.tasks.run import Inline, run_all
from ingot.data.tasks.store import Store


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each on this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    arguments = {"num_cpus": 1, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args=arguments)
    made.add_node(**arguments)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
def test_same_bytes_on_two_nodes(tmp_path, cluster):
    expected = run_job(Store(tmp_path / "a"), Inline(), tasks=6, records=20)
    assert run_job(Store(tmp_path / "b"), Ray(), tasks=6, records=20, wait=0.002) == expected
    assert not list((tmp_path / "b" / "probe").iterdir())


@pytest.mark.slow
def test_bad_records_and_errors_as_everywhere(tmp_path, cluster):
    assert run_all(first_phase(2, 20, faults={7: "abort"}), Store(tmp_path), Ray())[0]["read.killed_worker"] == 1
    with refused("E-DRILL-REFUSED", kind="refuse") as error:
        run_all(first_phase(2, 20, faults={7: "refuse"}), Store(tmp_path), Ray())
    assert error.value.rule == "a rule"
    with pytest.raises(RuntimeError, match=r"(?s)ValueError: a bug.*in misbehave"):
        run_all(first_phase(2, 20, faults={7: "bug"}), Store(tmp_path), Ray())


@pytest.mark.slow
def test_no_more_tasks_at_once_than_asked_for(tmp_path, cluster):
    running = []
    tasks = first_phase(4, 20, wait=0.002)
    Ray(max_parallel=1).run(tasks, Store(tmp_path), lambda ended, now: running.append(len(now)))
    assert max(running) <= 1
    assert Store(tmp_path).finished_keys(task.key for task in tasks) == {task.key for task in tasks}


@pytest.mark.nightly
def test_a_node_is_lost(tmp_path, cluster):
    """The tasks of a lost node go to the other node."""
    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    store, tasks, ended = Store(tmp_path / "s"), first_phase(9, 50, wait=0.01), threading.Event()

    def lose():  # nothing, if the tasks end before this thread sees three of them
        while (
            len(list((store.root / "progress").glob("*"))) < 3 and not ended.is_set()
        ):  # set: this thread was too slow
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        results = run_all(tasks, store, Ray())
    finally:
        ended.set()
        thread.join()
    assert [sum(result.values()) for result in results] == [50] * 9
    assert not any("read.killed_worker" in result for result in results)


def test_nodes_must_share_the_store_and_the_version(tmp_path):
    store, folder = Store(tmp_path), tmp_path
    (folder / "there").touch()
    good = {"version": __import__("ingot").__version__, "wrote": "there", "error": ""}
    _check_answer("n1", dict(good), store, folder)
    with refused("E-NODE-VERSION", node="n1", found="0.0.0"):
        _check_answer("n1", good | {"version": "0.0.0"}, store, folder)
    with refused("E-STORE-NOT-SHARED", node="n1"):
        _check_answer("n1", good | {"error": "No such file"}, store, folder)


@pytest.mark.nightly
def test_ctrl_c_cancels(tmp_path, cluster):
    store = Store(tmp_path)

    def boards():
        return {path.name: path.read_bytes() for path in (store.root / "progress").glob("*")}

    def interrupt():
        while len(boards()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_all(first_phase(4, 1000, wait=0.02), store, Ray())
    thread.join()
    time.sleep(0.5)
    before = boards()
    time.sleep(0.5)
    assert boards() == before  # nobody works on them any more
    assert not list((store.root / "done").iterdir())
