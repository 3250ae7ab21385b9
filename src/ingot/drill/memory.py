"""Faults after which a copy of a run continues from the memory of nodes (checkpoint.replicas): the tensors of all
checkpoints are removed. No torch.

A node is a launcher on this machine with half of the ranks, and with a keeper of snapshots of its own.
"""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.drill.fault import DrillFault
from ingot.drill.guarded import with_settings
from ingot.drill.job import send
from ingot.drill.trial import DrilledRun, Trial
from ingot.schema import events
from ingot.schema.run import RunConfig

_NODES = 2
_LEAST_INTERVAL = 3  # steps, so that the drill can see one between two saves


# -- the runs --


def _with_keeper(run: DrilledRun, place: Path) -> DrilledRun:
    copies = max(run.config.checkpoint.replicas, 1)
    return with_settings(run, {"checkpoint.mode": "async", "checkpoint.replicas": copies})


def _on_two_nodes(run: DrilledRun, place: Path) -> DrilledRun:
    """Return the run on two nodes, which are not judged by their speed, because both are this machine."""
    calm = {"launch.nodes": _NODES, "launch.check_every": 0, "launch.on_straggler": "report"}
    return with_settings(_with_keeper(run, place), calm)


def _rarely_saves(config: RunConfig) -> str:
    steps = config.checkpoint.interval.steps
    return f"it saves every {steps} steps, so none is surely between two saves" if steps < _LEAST_INTERVAL else ""


def _halves(config: RunConfig) -> str:
    ranks = config.parallel.world_size
    return f"{ranks} ranks cannot be on {_NODES} nodes" if ranks % _NODES else _rarely_saves(config)


# -- faults --


def _is_between_saves(trial: Trial) -> bool:
    """Return whether the newest snapshot is in memory, and the next one is not begun."""
    kept, trained = 0, 0
    for event in trial.found(events.SNAPSHOT_KEPT, events.STEP):
        if event["kind"] == events.STEP:
            trained = event["step"]
        else:
            kept = event["step"]
    return 0 < kept <= trained < kept + trial.run.interval - 1


def _stopped_between_saves(trial: Trial) -> bool:
    """Stop all ranks if they are between two saves now. Returns whether they are stopped."""
    ranks = trial.job.ranks()
    if len(ranks) < trial.run.ranks or not _is_between_saves(trial):
        return False
    send(signal.SIGSTOP, ranks.values())
    if _is_between_saves(trial):
        return True
    send(signal.SIGCONT, ranks.values())
    return False


def _lose_tensors(trial: Trial) -> None:
    for path in trial.folder.checkpoints.rglob("rank-*"):
        path.unlink(missing_ok=True)


def _lose_rank(trial: Trial) -> None:
    if not trial.follow(lambda: _stopped_between_saves(trial)):
        return
    rank, ranks = trial.any_rank(), trial.job.ranks()
    trial.injects(f"SIGKILL of rank {rank}, and loss of the tensors of all checkpoints", [rank])
    _lose_tensors(trial)
    send(signal.SIGKILL, [ranks[rank]])
    send(signal.SIGCONT, ranks.values())


def _lose_node(trial: Trial) -> None:
    """Lose one of two nodes, the leader or the other one, and give the command anew in its place."""
    if not trial.follow(lambda: _stopped_between_saves(trial)):
        return
    number, ranks = trial.random.randrange(_NODES), trial.job.ranks()
    lost = trial.launchers[number]
    processes = trial.job.started_by(lost.pid)
    own = sorted(rank for rank, pid in ranks.items() if pid in processes)
    named = f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
    trial.injects(f"SIGKILL of all processes of a node ({named}), and loss of the tensors of all checkpoints", own)
    lost.kill()
    send(signal.SIGKILL, processes)
    lost.wait()
    _lose_tensors(trial)
    send(signal.SIGCONT, [pid for rank, pid in ranks.items() if rank not in own])
    trial.launchers[number] = trial.start_node(number)


# -- what has to be reported --


def _restored(is_named: Callable[[Mapping[str, Any]], bool], *, from_peer: bool) -> Callable[[Trial], str]:
    """Return the judge of a restart from memory. is_named: whether a `fault` event has the kind and cause of the fault.
    from_peer: bytes have to come from another node too; otherwise none may."""

    def expects(trial: Trial) -> str:
        log = trial.found(events.SNAPSHOT_KEPT, events.DRILL, events.SNAPSHOT_RESTORED)
        before = [number for number, event in enumerate(log) if event["kind"] == events.DRILL]
        if not before:
            return "nothing was injected: no step was between two saves with a snapshot in memory"
        faults = [(event["rank"] in trial.named, is_named(event)) for event in trial.found(events.FAULT)]
        if faults != [(True, True)]:
            causes = [(event["rank"], event["failure"], event["cause"]) for event in trial.found(events.FAULT)]
            return f"faults {causes}, not one of rank {', '.join(map(str, trial.named))}"
        kept = [event["step"] for event in log[: before[0]] if event["kind"] == events.SNAPSHOT_KEPT]
        found = [(e["step"], e["peer_bytes"] > 0) for e in log if e["kind"] == events.SNAPSHOT_RESTORED]
        right = [(kept[-1], from_peer)]
        if found != right:
            return f"restored from memory (step, bytes of another node) {found}, not {right}"
        read = [event["kind"] for event in trial.found(events.CHECKPOINT_FETCHED, events.CHECKPOINT_REFUSED)]
        return f"checkpoints were tried: {read}" if read else ""

    return expects


def _is_killed(event: Mapping[str, Any]) -> bool:
    return "SIGKILL" in event["cause"]


def _is_node(event: Mapping[str, Any]) -> bool:
    return event["failure"] == "node"


MEMORY_FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        id="RS07 memory",
        injects="SIGKILL of a rank, and loss of all checkpoints: from memory",
        inject=_lose_rank,
        expects=_restored(_is_killed, from_peer=False),
        saves=1,
        needs=_rarely_saves,
        soaks=False,
        prepare=_with_keeper,
    ),
    DrillFault(
        id="RS07 node",
        injects="a lost node of two, and loss of all checkpoints: from the memory of the other",
        inject=_lose_node,
        expects=_restored(_is_node, from_peer=True),
        saves=1,
        needs=_halves,
        soaks=False,
        prepare=_on_two_nodes,
    ),
)
