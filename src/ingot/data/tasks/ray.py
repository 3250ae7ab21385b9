"""A runner that does tasks on a Ray cluster, one call of a remote function per task, in a worker process (local.py).

Ray sends a task to a machine and notices when the machine is lost. The store decides which tasks are done, and the
local runner handles records that end their process, memory limits and hangs. When this process dies, Ray ends the
running tasks, and the same command continues.
"""

import contextlib
import importlib
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot import __version__
from ingot.data.tasks.local import MEMORY_BYTES, Local
from ingot.data.tasks.run import Look
from ingot.data.tasks.store import Store
from ingot.data.tasks.task import Task, error_from_json, error_to_json
from ingot.errors import ConfigError, DataError, require

_AHEAD = 2  # tasks per CPU that run or wait in Ray: enough to keep Ray busy, few enough to cancel
_LOSSES = 4  # how many times one task may lose its machine before the build gives up
_SETTLE_SECONDS = 90.0  # longest time until a network file system shows a file that another machine wrote
_PROBE_SECONDS = 120.0
_LOOK_SECONDS = 0.5


class Ray:
    """A runner that uses a Ray cluster. All nodes must see the store at the same path; that is checked first.

    address: the address of a running cluster, "auto" to find one on this machine, None to start one here. The
    connection stays until `close` or the end of this process; if Ray is initialized already, its cluster is used.
    cpus: CPUs that a task requests from Ray. max_parallel: tasks that run or wait in Ray at once; 0 means twice as many
    as the CPUs of the cluster can run. memory_bytes, preload: see `Local`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: float = 1,
        max_parallel: int = 0,
        memory_bytes: int = MEMORY_BYTES,
        preload: Sequence[str] = (),
    ):
        self.address, self.cpus, self.max_parallel = address, cpus, max_parallel
        self.memory_bytes, self.preload = memory_bytes, tuple(preload)
        self._connected = False

    def __enter__(self) -> "Ray":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect from the cluster, and end the cluster if this process started it."""
        if self._connected:
            require("ray", "ray").shutdown()
            self._connected = False

    def run(self, tasks: Sequence[Task], store: Store, watch: Look) -> None:
        """Return when all tasks are done.

        Raises the error of the first task that fails (the others are canceled); ConfigError if nodes do not share the
        store or run another version of ingot; DataError if one task loses its machine too often.
        """
        ray = require("ray", "ray")
        if not ray.is_initialized():
            _connect(ray, self.address)
            self._connected = True
        _check_nodes(ray, store)
        self._run(ray, tasks, store, watch)

    def _run(self, ray, tasks: Sequence[Task], store: Store, watch: Look) -> None:
        # Losses are counted here, not by Ray, to distinguish them from errors. Ray schedules by num_cpus.
        do = ray.remote(num_cpus=self.cpus, max_retries=0)(_do)
        waiting = deque((task, 0) for task in tasks)
        in_flight: dict[Any, tuple[Task, int]] = {}  # Ray's reference -> task, number of machines that it lost
        try:
            while waiting or in_flight:
                cluster = _AHEAD * int(ray.cluster_resources().get("CPU", 1) / max(self.cpus, 0.01))
                room = self.max_parallel or max(cluster, 1)
                while waiting and len(in_flight) < room:
                    task, losses = waiting.popleft()
                    ref = do.remote(task.to_json(), str(store.root.absolute()), self.memory_bytes, self.preload)
                    in_flight[ref] = (task, losses)
                ray.wait(list(in_flight), timeout=_LOOK_SECONDS)  # waits for one; the next call takes all ready ones
                ready, _ = ray.wait(list(in_flight), num_returns=len(in_flight), timeout=0)
                ended = []
                for ref in ready:
                    task, losses = in_flight.pop(ref)
                    if self._did(ray, ref, task, losses):
                        ended.append(task)
                    else:
                        waiting.append((task, losses + 1))
                _wait_until_seen(ended, store)
                watch(ended, [task for task, _ in in_flight.values()])
        finally:
            for ref in in_flight:
                with contextlib.suppress(Exception):  # the task may just have ended
                    ray.cancel(ref, force=True)

    def _did(self, ray, ref, task: Task, losses: int) -> bool:
        """Return True if the task is done; False if its machine or its Ray process was lost."""
        try:
            error = ray.get(ref)
        except ray.exceptions.RayError as lost:
            if losses + 1 >= _LOSSES:
                raise DataError(
                    "E-RAY-LOST",
                    f"Ray lost {task.title} {_LOSSES} times: {str(lost).splitlines()[0]}",
                    rule=f"a task whose machine is lost is tried again, at most {_LOSSES} times",
                    fix="look at `ray status` and the memory of the nodes; the same command continues",
                    task=task.title,
                    losses=_LOSSES,
                ) from None
            return False
        if error is not None:
            raise error_from_json(error)
        return True


def _do(task: dict, root: str, memory_bytes: int, preload: tuple[str, ...]) -> dict | None:
    """Do a task in a worker process of this node. Return the error as JSON, or None."""
    chosen = Task.from_json(task)
    try:
        _local(memory_bytes, preload).run([chosen], Store(Path(root)), lambda ended, running: None)
    except Exception as error:
        return error_to_json(error, chosen)
    return None


_locals: dict[tuple, Local] = {}  # one runner per settings; its fork server waits for the next task


def _local(memory_bytes: int, preload: tuple[str, ...]) -> Local:
    return _locals.setdefault((memory_bytes, preload), Local(1, memory_bytes=memory_bytes, preload=preload))


def _connect(ray, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING", include_dashboard=None)
    except ConnectionError as error:
        raise ConfigError(
            "E-RAY-CLUSTER",
            f"there is no Ray cluster at {address!r}: {error}",
            rule="'auto' finds a cluster on this machine; without an address the command starts a cluster of its own",
            fix="start one with `ray start --head`, or give another --ray-address",
            address=address,
        ) from None


def _check_nodes(ray, store: Store) -> None:
    """Raise ConfigError unless every node sees the store at the same path and has the same version of ingot."""
    scheduling = importlib.import_module("ray.util.scheduling_strategies")
    folder = store.root.absolute() / "probe"
    folder.mkdir(parents=True, exist_ok=True)
    nonce = os.urandom(8).hex()
    (folder / nonce).write_text(nonce, encoding="utf-8")
    try:
        checked: set[str] = set()
        deadline = time.monotonic() + _PROBE_SECONDS
        while unchecked := [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in checked]:
            asked = [(node, _ask(ray, scheduling, node, folder, nonce)) for node in unchecked]
            for node, ref in asked:
                name = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
                try:
                    answer = ray.get(ref, timeout=_PROBE_SECONDS)
                except (ray.exceptions.RayTaskError, ray.exceptions.RaySystemError) as error:
                    raise _unfit(name, error) from None
                except ray.exceptions.RayError as error:  # the node was just lost: Ray reports it dead after a while
                    if time.monotonic() > deadline:
                        raise _unfit(name, error) from None
                    time.sleep(1)
                    continue
                _check_answer(name, answer, store, folder)
                checked.add(node["NodeID"])
    finally:
        for path in folder.glob(f"{nonce}*"):
            path.unlink(missing_ok=True)


def _ask(ray, scheduling, node: dict, folder: Path, nonce: str):
    place = scheduling.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    probe = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(_probe)
    return probe.remote(str(folder), nonce, node["NodeID"])


def _unfit(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        "E-RAY-NODE",
        f"node {name} of the Ray cluster cannot run ingot: {str(error).strip().splitlines()[-1]}",
        rule="every node has the same Python, Ray and ingot installed",
        fix="install ingot on the node, or remove the node from the cluster",
        node=name,
    )


def _check_answer(name: str, answer: dict[str, str], store: Store, folder: Path) -> None:
    if answer["version"] != __version__:
        raise ConfigError(
            "E-NODE-VERSION",
            f"node {name} has ingot {answer['version']}, but this machine has ingot {__version__}",
            rule="every machine runs the same version, because the version is part of a result's key",
            fix="install one version everywhere",
            node=name,
            found=answer["version"],
            expected=__version__,
        )
    deadline = time.monotonic() + _SETTLE_SECONDS
    while answer["error"] == "" and not (folder / answer["wrote"]).exists():
        if time.monotonic() > deadline:
            answer["error"] = "a file that the node wrote there does not appear here"
        time.sleep(0.1)
    if answer["error"]:
        raise ConfigError(
            "E-STORE-NOT-SHARED",
            f"node {name} does not share {store.root} with this machine: {answer['error']}",
            rule="the store is one folder, at the same path, on every node",
            fix="put --out on a file system that all nodes mount at the same path",
            node=name,
            path=str(store.root),
        )


def _probe(folder: str, nonce: str, node: str) -> dict[str, str]:
    """On a node, look for the driver's file in the store, and write a file for the driver to find."""
    from ingot import __version__ as version

    answer = {"version": version, "wrote": f"{nonce}.{node}", "error": ""}
    try:
        if Path(folder, nonce).read_text(encoding="utf-8") != nonce:
            answer["error"] = "the node sees another file there"
        Path(folder, answer["wrote"]).touch()
    except OSError as error:
        answer["error"] = str(error)
    return answer


def _wait_until_seen(ended: Sequence[Task], store: Store) -> None:
    """Wait until the store shows the results that other machines wrote."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    waited = {task.key for task in ended}
    while waited := waited - store.finished_keys(waited):
        if time.monotonic() > deadline:
            raise DataError(
                "E-STORE-DELAY",
                f"{len(waited)} tasks were done on other machines, but {store.root} does not show their results",
                rule=f"the file system shows a file of another machine within {_SETTLE_SECONDS:.0f} s",
                fix="check the mount options of the file system (attribute caching); the same command continues",
                path=str(store.root),
                tasks=len(waited),
            )
        time.sleep(0.2)
