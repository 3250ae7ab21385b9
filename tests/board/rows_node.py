"""A row of a job of two nodes: agents of torchrun, each with a disk, temporary files and a keeper of its own."""

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from ingot.drill.job import DEADLINE_SECONDS, RUN_VARIABLE, gone_within, marked_processes, processes_with
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.keeper import keeper_name, reach_local

from .bench import ROOT, Bench
from .row import INTERVAL, Row, judge_recovered, random_of
from .rows_job import SLOW_STEPS, stopped_between_snapshots
from .times import NEW_DISK

_REPLACED = {  # SLOW_STEPS and others, because the program takes no settings
    "steps = 24": "steps = 60",
    "global_batch = 8": "global_batch = 64",
    'mode = "sync"': 'mode = "async"\nreplicas = 1\ndisks = ["DISK"]',
}
_PROGRAM = ROOT / "examples" / "own_loop.py"
# torchrun numbers its nodes in the order of these names, so that a new node has the number of the lost one.
_ADDRESSES = ("127.0.0.1", "localhost")
# An agent without a sign of life counts as gone after 4 s. The file is where all nodes see it, so that any may be lost.
_RENDEZVOUS = "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=4"
_END_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")  # of unix(7), SO_PEERCRED: process, user, group


class Node:
    """An agent of torchrun with one rank of the run `name`, and what is on its node: disk, temporary files, keeper."""

    def __init__(self, bench: Bench, name: str, number: int):
        self._run, self.disk = bench.folder(name).root, _disk(bench, name, number)
        self._temporary = bench.temporary(name) / f"node-{number}"
        for folder in (self.disk, self._temporary):
            folder.mkdir()
        with _log(bench, name).open("ab") as log:
            self.agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--monitor-interval=0.1"),
                    *("--rdzv-backend=c10d", f"--rdzv-endpoint={bench.root / name}.nodes", f"--rdzv-id={name}"),
                    *(f"--rdzv-conf={_RENDEZVOUS}", f"--local-addr={_ADDRESSES[number]}"),
                    *map(str, (_PROGRAM, _run_file(bench, name), self._run)),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
                | {"TMPDIR": str(self._temporary), RUN_VARIABLE: str(self._run)},
            )
        self._keeper = keeper_name(self.agent.pid, self._run)  # an agent that has ended has no name any more

    def keeper(self) -> int:
        """Return the process that keeps the snapshots of this node; 0 if there is none."""
        return keeper_at(self._keeper)

    def ranks(self) -> list[int]:
        """Return the living processes of this node that are neither the agent nor the keeper."""
        return [pid for pid in processes_with("TMPDIR", self._temporary) if pid != self.agent.pid]

    def lose(self) -> None:
        """Kill every process of the node at once, and remove what is on it."""
        for pid in (self.keeper(), self.agent.pid, *self.ranks()):
            with suppress(ProcessLookupError):  # a process that writes checkpoints ends with its rank
                os.kill(pid, signal.SIGKILL)
        self.agent.wait()
        assert not gone_within(_END_SECONDS, self.ranks)
        for folder in (self.disk, self._temporary):
            shutil.rmtree(folder)


def keeper_at(name: str) -> int:
    """Return the process of the keeper `name` (keeper.keeper_name); 0 if there is none."""
    with suppress(OSError), closing(reach_local(name)) as connection:
        found = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return _CREDENTIALS.unpack(found)[0]
    return 0


def remove_tensors(folder: Path) -> None:
    """Remove the tensors of all checkpoints below a folder, where a save may end meanwhile, and remove older ones."""
    while True:
        with suppress(FileNotFoundError):
            for path in folder.rglob("rank-*"):
                path.unlink(missing_ok=True)
            return


def rs07_node(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Lose one of two nodes and the tensors of all checkpoints, start another node at once, and lose the other one."""
    random, name, first = random_of("RS07 node", seed), f"node-{seed}", seed % 2
    folder, text = bench.folder(name), bench.run_file.read_text()
    for before, after in _REPLACED.items():
        assert before in text
        text = text.replace(before, after)
    _run_file(bench, name).write_text(text.replace("DISK", str(_disk(bench, name, "{node}"))))
    with ExitStack() as stack:
        stack.callback(_kill_all, folder)
        nodes = [Node(bench, name, number) for number in range(2)]
        started = list(nodes)
        kept, injected = [], []
        for lost, step in ((first, INTERVAL * random.randrange(2, 6)), (1 - first, INTERVAL * random.randrange(7, 11))):
            saved, at = _replace_node(bench, name, nodes, lost, step, verdicts)
            kept.append(saved)
            injected.append(at)
            started.append(nodes[lost])
        codes = [_ended(node.agent) for node in nodes]
    where = f"node {first}, then the other, after the snapshots of steps {kept}"
    verdicts.judge(
        "o6", where, "" if codes == [0, 0] else f"exit codes {codes}: {_log(bench, name).read_text()[-300:]}"
    )
    restored = [(e["step"], e["own_bytes"] > 0, e["peer_bytes"] > 0) for e in _found(folder, events.SNAPSHOT_RESTORED)]
    verdicts.judge("o6", where, "" if restored == [(one, True, True) for one in kept] else f"restored {restored}")
    read = _found(folder, events.CHECKPOINT_FETCHED, events.CHECKPOINT_REFUSED)
    verdicts.judge("o6", where, f"checkpoints were tried: {read}" if read else "")
    for at in injected:
        verdicts.time(folder, at)
    judge_recovered(bench, verdicts, name, where, bench.reference(*SLOW_STEPS), faults=2)
    left = gone_within(_END_SECONDS, lambda: [pid for node in started if (pid := node.keeper())])
    verdicts.judge("o7", where, f"processes {left} that keep snapshots have outlived their nodes" if left else "")


def _replace_node(
    bench: Bench, name: str, nodes: list[Node], lost: int, step: int, verdicts: Verdicts
) -> tuple[int, float]:
    """Lose a node after a snapshot of `step` or later, and wait until the run continues with a new one in its place.
    Returns the step of the snapshot, and the time of the loss."""
    folder, other = bench.folder(name), nodes[1 - lost]
    kept, pids = stopped_between_snapshots(bench, name, step, other.agent)
    where = f"node {lost} after the snapshot of step {kept}"
    keeper, ranks, before = other.keeper(), other.ranks(), len(_found(folder, events.SNAPSHOT_RESTORED))
    injected = time.time()
    nodes[lost].lose()
    for tensors in (folder.checkpoints, other.disk):
        remove_tensors(tensors)
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    nodes[lost] = Node(bench, name, lost)
    deadline, seen = time.monotonic() + DEADLINE_SECONDS, False
    while len(_found(folder, events.SNAPSHOT_RESTORED)) == before and time.monotonic() < deadline:
        if not seen and set(ranks) - set(other.ranks()):  # no event shows it: torchrun starts the ranks
            seen = True
            verdicts.detect.append(time.time() - injected)
        time.sleep(0.1)
    same = other.keeper() == keeper != 0 and not set(ranks) & set(other.ranks())
    verdicts.judge("o6", where, "" if same else "the other node has no new ranks, or another keeper")
    return kept, injected


def _disk(bench: Bench, name: str, number: int | str) -> Path:
    return bench.root / f"{name}-disk-{number}"


def _run_file(bench: Bench, name: str) -> Path:
    return bench.root / f"{name}.toml"


def _log(bench: Bench, name: str) -> Path:
    return bench.root / f"{name}.log"


def _found(folder: RunFolder, *kinds: str) -> list[dict]:
    return list(read_events(folder.events, *kinds))


def _ended(agent: subprocess.Popen) -> int | None:
    """Wait for the end of an agent. Returns its exit code; None if it has none after the deadline."""
    with suppress(subprocess.TimeoutExpired):
        return agent.wait(DEADLINE_SECONDS)
    return None


def _kill_all(folder: RunFolder) -> None:
    """Kill what is left of the job; the keepers end with their agents."""
    for pid in marked_processes(folder.root):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


ROWS = (
    Row(
        "RS07 node",
        "SIGKILL of all processes of a node, and loss of its disk; then the same for the other node",
        rs07_node,
        limits=NEW_DISK,
    ),
)
