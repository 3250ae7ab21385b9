"""Tasks on a Ray cluster: remote functions only, one per task, each with a worker process of its own (local.py).

Ray brings a task to a machine and notices when the machine is lost; everything else (what is done, how a record kills
its process, memory, hangs) is the store's and the local runner's, as everywhere. When this process dies Ray ends what
it ran, and the same command goes on.
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
from ingot.data.tasks.failures import from_json, to_json
from ingot.data.tasks.local import MEMORY_BYTES, Local
from ingot.data.tasks.run import Look
from ingot.data.tasks.task import Store, Task
from ingot.errors import ConfigError, DataError, require

_AHEAD = 2  # tasks per CPU that run or wait in Ray: enough to keep it busy, few enough to cancel
_LOSSES = 4  # of machines under one task
_SETTLE_SECONDS = 90.0  # that a network file system may take to show what another machine wrote
_PROBE_SECONDS = 120.0
_LOOK_SECONDS = 0.5


class Ray:
    """A runner. The store must be on a file system that all nodes see at the same path; that is checked first.

    address: of a running cluster, "auto" to find the one on this machine, None to start one here. It is connected to
    once, until `close` or the end of this process; if Ray is initialised already, that is used.
    cpus: that a task asks of Ray. max_parallel: tasks in Ray's hands at once, 0 for twice what its CPUs take.
    memory_bytes, preload: as of `Local`.
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
        """Leave the cluster; one that was started here ends."""
        if self._connected:
            require("ray", "ray").shutdown()
            self._connected = False

    def run(self, tasks: Sequence[Task], store: Store, watch: Look) -> None:
        """Return when all are done. Raises what the first failing task raised (the others are cancelled); ConfigError
        when nodes do not share the store or run another ingot; DataError when machine after machine is lost."""
        ray = require("ray", "ray")
        if not ray.is_initialized():
            _connect(ray, self.address)
            self._connected = True
        _check_nodes(ray, store)
        self._run(ray, tasks, store, watch)

    def _run(self, ray, tasks: Sequence[Task], store: Store, watch: Look) -> None:
        # Losses are counted here, so that they can be told from other ends. num_cpus is what Ray schedules by.
        do = ray.remote(num_cpus=self.cpus, max_retries=0)(_do)
        waiting = deque((task, 0) for task in tasks)
        flying: dict[Any, tuple[Task, int]] = {}  # Ray's reference -> task, machines lost under it
        try:
            while waiting or flying:
                cluster = _AHEAD * int(ray.cluster_resources().get("CPU", 1) / max(self.cpus, 0.01))
                room = self.max_parallel or max(cluster, 1)
                while waiting and len(flying) < room:
                    task, losses = waiting.popleft()
                    ref = do.remote(task.to_json(), str(store.root.absolute()), self.memory_bytes, self.preload)
                    flying[ref] = (task, losses)
                ray.wait(list(flying), timeout=_LOOK_SECONDS)  # for one; then all that are ready
                ready, _ = ray.wait(list(flying), num_returns=len(flying), timeout=0)
                ended = []
                for ref in ready:
                    task, losses = flying.pop(ref)
                    if self._did(ray, ref, task, losses):
                        ended.append(task)
                    else:
                        waiting.append((task, losses + 1))
                _wait_until_seen(ended, store)
                watch(ended, [task for task, _ in flying.values()])
        finally:
            for ref in flying:
                with contextlib.suppress(Exception):  # it may just have ended
                    ray.cancel(ref, force=True)

    def _did(self, ray, ref, task: Task, losses: int) -> bool:
        """Whether it is done; False when its machine or Ray's process for it was lost."""
        try:
            error = ray.get(ref)
        except ray.exceptions.RayError as lost:
            if losses + 1 >= _LOSSES:
                raise DataError(
                    f"Ray lost {task.label or task.function} {_LOSSES} times: {str(lost).splitlines()[0]}",
                    rule="a task whose machine is lost is done by another one",
                    fix="look at `ray status` and the nodes' memory; the same command goes on",
                ) from None
            return False
        if error is not None:
            raise from_json(error)
        return True


def _do(task: dict, root: str, memory_bytes: int, preload: tuple[str, ...]) -> dict | None:
    """On a node: the task in a watched process. Returns the error as JSON, or None."""
    chosen = Task.from_json(task)
    try:
        _local(memory_bytes, preload).run([chosen], Store(Path(root)), lambda ended, running: None)
    except Exception as error:
        return to_json(error, chosen)
    return None


_locals: dict[tuple, Local] = {}  # of this process: its fork server waits for the next task


def _local(memory_bytes: int, preload: tuple[str, ...]) -> Local:
    return _locals.setdefault((memory_bytes, preload), Local(1, memory_bytes=memory_bytes, preload=preload))


def _connect(ray, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING", include_dashboard=None)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster at {address!r}: {error}",
            rule="'auto' finds a cluster that runs on this machine; without an address one is started for the call",
            fix="ray start --head, or another address",
        ) from None


def _check_nodes(ray, store: Store) -> None:
    """Every node sees the same folder at the same path, and has the same ingot. Raises ConfigError with its name."""
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
                except ray.exceptions.RayError as error:  # lost just now: Ray takes a while to call it dead
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
        f"node {name} of the Ray cluster cannot run ingot: {str(error).strip().splitlines()[-1]}",
        rule="every node has the same Python, Ray and ingot installed",
        fix="install ingot on it, or take it out of the cluster",
    )


def _check_answer(name: str, answer: dict[str, str], store: Store, folder: Path) -> None:
    if answer["version"] != __version__:
        raise ConfigError(
            f"node {name} has ingot {answer['version']}, this is {__version__}",
            rule="every machine runs the same version: it is part of what names a result",
            fix="install one version everywhere",
        )
    deadline = time.monotonic() + _SETTLE_SECONDS
    while answer["error"] == "" and not (folder / answer["wrote"]).exists():
        if time.monotonic() > deadline:
            answer["error"] = "what it writes there is not seen here"
        time.sleep(0.1)
    if answer["error"]:
        raise ConfigError(
            f"node {name} does not share {store.root} with this machine: {answer['error']}",
            rule="the store is one folder, at the same path, on every node",
            fix="put --out on a file system that all nodes mount at the same place",
        )


def _probe(folder: str, nonce: str, node: str) -> dict[str, str]:
    """On a node: whether the driver's file is seen, and a file for the driver to see."""
    from ingot import __version__ as version

    answer = {"version": version, "wrote": f"{nonce}.{node}", "error": ""}
    try:
        if Path(folder, nonce).read_text(encoding="utf-8") != nonce:
            answer["error"] = "it sees another file there"
        Path(folder, answer["wrote"]).touch()
    except OSError as error:
        answer["error"] = str(error)
    return answer


def _wait_until_seen(ended: Sequence[Task], store: Store) -> None:
    deadline = time.monotonic() + _SETTLE_SECONDS
    waited = {task.key for task in ended}
    while waited := waited - store.finished_keys(waited):
        if time.monotonic() > deadline:
            raise DataError(
                f"{len(waited)} tasks were done on other machines, but {store.root} does not show it",
                rule="the store is one folder on every node",
                fix="look at the file system's mount options (attribute caching)",
            )
        time.sleep(0.2)
