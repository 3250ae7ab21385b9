"""The watch for slow ranks, made from a run's settings; why it cannot act, if it cannot."""

import os
from collections.abc import Callable

from ingot.schema.run import RunConfig
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.telemetry.slow_machines import SlowMachines
from ingot.trainer.telemetry.stragglers import StragglerWatch


def straggler_watch(
    config: RunConfig, mesh: Mesh, place: RankInfo, say: Callable[[str], None]
) -> StragglerWatch | None:
    """Return the watch for slow ranks, on rank 0, if the run wants it and hosts can measure how long ranks wait. say:
    shows on rank 0 that they cannot."""
    launch = config.launch
    if not launch.straggler_factor or not place.is_first:
        return None
    if place.device.type != "cpu":
        if place.world_size > 1:
            drains = ", and none is drained (launch.on_straggler)" if launch.on_straggler == "drain" else ""
            say(f"straggler slow ranks are not named{drains}: the host cannot time ranks on GPUs")
        return None
    return StragglerWatch(mesh.equal_work(), launch.straggler_factor)


def slow_machines(config: RunConfig, mesh: Mesh, place: RankInfo, say: Callable[[str], None]) -> SlowMachines | None:
    """Return the judge of slow machines, if the run wants them drained and something can do that; otherwise show why
    not."""
    if config.launch.on_straggler == "report":
        return None
    if why := _hindrance(config, mesh):
        say(f'straggler launch.on_straggler = "drain" only reports here: {why}')
        return None
    launch, each = config.launch, place.local_world_size
    return SlowMachines(launch.straggler_seconds, launch.straggler_factor, each, place.world_size // each)


def _hindrance(config: RunConfig, mesh: Mesh) -> str:
    if config.launch.nodes == 1:
        return "no other machine can take the place of the only one (launch.nodes)"
    if SUPERVISOR_VARIABLE not in os.environ:
        return "these ranks have no launcher of ingot that could replace a machine"
    if mesh.parallel.ep > 1:
        return "a rank whose experts get more tokens works longer, whatever its machine is"
    if all(len(group) == 1 for group in mesh.equal_work()):
        return "no two ranks have the same work"
    return ""
