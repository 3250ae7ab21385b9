"""The settings of a replay: the run's own in one process, on a device of this machine that has enough memory."""

from collections.abc import Callable
from dataclasses import replace

from ingot.errors import ResourceError
from ingot.machine.facts import Machine, read_machine, this_cluster
from ingot.planner.predict.memory.peak_memory import memory_bill
from ingot.schema.launch import Launch
from ingot.schema.load_filter import LoadFilter
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.theory.layout import resolve_parallel
from ingot.trainer.mesh.start import choose_device
from ingot.units import format_bytes

_RUNS_ON = {"cpu": "host", "cuda": "GPU"}


def one_process(run: RunConfig, device: str, say: Callable[[str], None]) -> tuple[RunConfig, list[str]]:
    """Return the settings with which one process replays `run`, and a sentence for each that may change its numbers.

    device: "auto": a GPU if there is one. Blocks are recomputed if the run's activations do not fit: that changes no
    number. Raises ResourceError if the replay does not fit into the memory of this machine.
    """
    kind = choose_device(device, local_rank=0).type  # pyright: ignore[reportArgumentType]
    parallel = resolve_parallel(run)
    own = Parallel(
        zero=1,
        unit_layers=parallel.unit_layers,
        grads="fp32" if parallel.zero == 3 else parallel.grads,  # zero 3 sums them in fp32 whatever the run says
        recompute=parallel.recompute,
        recompute_every=parallel.recompute_every,
    )
    train = replace(run.train, compile="off", device=kind)  # compiled code hides its operations
    checkpoint = replace(run.checkpoint, mode="sync")
    guard = replace(run.guard, preset="off")  # the skips that the run recorded are repeated
    data = replace(run.data, filter=LoadFilter())  # what it found is recorded
    alone = replace(run, data=data, parallel=own, train=train, launch=Launch(), checkpoint=checkpoint, guard=guard)
    machine = read_machine()
    free, needed = _free_bytes(machine, kind), _needed_bytes(alone, machine, kind)
    if needed > free and own.recompute != "full":
        alone = replace(alone, parallel=replace(own, recompute="full", recompute_every=1))
        needed = _needed_bytes(alone, machine, kind)
    if needed > free:
        raise _too_large(needed, free, kind)
    say(f"memory    {format_bytes(needed)} needed, {format_bytes(free)} free on the {_RUNS_ON[kind]}")
    notes = []
    if run.parallel.world_size > 1:
        notes.append(f"the run has {run.parallel.world_size} ranks, the replay one: sums are rounded in another order")
    if run.train.device != "auto" and run.train.device != kind:
        notes.append(f"the run trains on {run.train.device}, the replay on {kind}: kernels differ")
    return alone, notes


def _needed_bytes(run: RunConfig, machine: Machine, kind: str) -> int:
    """Return the predicted peak of memory of one process, with the planner's bill."""
    if kind == "cpu":
        machine = replace(machine, gpus=())
    return round(sum(term.value for term in memory_bill(run, this_cluster(machine, 1)).values()))


def _free_bytes(machine: Machine, kind: str) -> int:
    return machine.available_bytes if kind == "cpu" else machine.gpus[0].memory_bytes if machine.gpus else 0


def _too_large(needed: int, free: int, kind: str) -> ResourceError:
    other = ", or on the host: --device cpu" if kind == "cuda" else ""
    return ResourceError(
        "E-REPLAY-MEMORY",
        f"a replay in one process needs {format_bytes(needed)}, and {format_bytes(free)} are free on the "
        f"{_RUNS_ON[kind]}",
        rule="one process holds the whole model with its gradients and moments, and the activations of a micro-batch",
        fix=f"run the same command on a machine with {format_bytes(needed)} of memory that sees the run folder{other}",
        needed=needed,
        free=free,
        device=kind,
    )
