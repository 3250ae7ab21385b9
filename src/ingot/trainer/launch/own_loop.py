"""A run for the loop of a program: opened on every rank as `ingot train` opens one, without a supervisor."""

import contextlib
from collections.abc import Callable

from ingot.errors import ConfigError
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.given import GivenCallbacks
from ingot.trainer.interrupts import signals_ask
from ingot.trainer.launch.here import own_process
from ingot.trainer.launch.prepare import RunRequest
from ingot.trainer.launch.train import training_job
from ingot.trainer.lease import open_lease
from ingot.trainer.loop import RunLoop
from ingot.trainer.mesh.environment import environment_number
from ingot.trainer.mesh.start import start
from ingot.trainer.resilience.lock import RunLock
from ingot.trainer.resilience.start_times import StartClock
from ingot.trainer.run import build_trainer


def open_run(
    request: RunRequest, given: GivenCallbacks, say: Callable[[str], None], stack: contextlib.ExitStack
) -> RunLoop | None:
    """Prepare the run, join its job and build its parts. Returns None if no step is left to train. Collective.

    The place of this process is in its environment, as torchrun writes it; without one, it is alone. stack: closes
    everything. Raises ConfigError for a wrong number of processes, and the errors of `train` and `build_trainer`.
    """
    ranks, needed = environment_number("WORLD_SIZE", 1, least=1), request.config.parallel.world_size
    if ranks != needed:
        raise ConfigError(
            "E-LOOP-RANKS",
            f"the run has {needed} ranks, but this program runs in {ranks} process{'es' if ranks > 1 else ''}",
            rule="a loop of one's own runs in one process per rank",
            fix=f"start it with torchrun --nproc_per_node {needed} PROGRAM, or change a degree in [parallel]",
            needed=needed,
            processes=ranks,
        )
    env = training_job(request.folder, request.written).env
    if environment_number("LOCAL_WORLD_SIZE", 1) != ranks:
        env.pop("GLOO_SOCKET_IFNAME", None)  # loopback leads to no other machine
    stack.enter_context(own_process(env, alone=ranks == 1))
    config = request.written
    clock = StartClock()
    place = start(config.train.device, config.launch.timeout_seconds, tf32=config.train.tf32)
    clock.end("groups")
    say = say if place.is_first else _silent
    epoch = from_rank_zero(lambda: _prepare(request, say, stack))
    if epoch is None:
        return None
    config = load_run(request.folder.config, same_code=True)
    stops = stack.enter_context(signals_ask(request.folder, config.launch, say))
    until = request.until_step
    parts = build_trainer(
        config, request.folder, place, epoch=epoch, until_step=until, say=say, given=given, stops=stops, clock=clock
    )
    stack.callback(parts.close)
    return RunLoop(parts)


def _prepare(request: RunRequest, say: Callable[[str], None], stack: contextlib.ExitStack) -> int | None:
    """Lock and prepare the run folder. Returns the number of this attempt; None if no step is left to train."""
    stack.enter_context(RunLock(request.folder.lock))
    lease = stack.enter_context(open_lease(request.folder, request.config))
    request.folder.stop_request.unlink(missing_ok=True)
    return lease.epoch if request.prepare(lease, say) is None else None


def _silent(text: str) -> None:
    """Drop a line: used on every rank except the first."""
