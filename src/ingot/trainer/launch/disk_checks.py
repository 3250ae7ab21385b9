"""The check of the disks of a run before it starts: have they room for the checkpoints that will be on them?"""

from collections.abc import Callable
from pathlib import Path

from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.storage import require_free
from ingot.theory.memory import checkpoint_bytes
from ingot.theory.update import mean_moments
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.checkpoint.places import own_disks, require_disks
from ingot.trainer.mesh.environment import environment_number
from ingot.units import counted


def check_disks(folder: RunFolder, config: RunConfig, say: Callable[[str], None]) -> None:
    """Check that the disk has room for the checkpoints that stay and the one being written, and for saves of the
    weights alone."""
    saves, arch, precision = config.checkpoint, config.model, config.train.precision
    most = saves.most_kept(config.train.steps, config.guard.proven_steps) + 1
    needed = round(checkpoint_bytes(arch, precision, mean_moments(config)).value) * most
    needed -= sum(listed.bytes for listed in list_checkpoints(folder.checkpoints))
    what = counted(most, "checkpoint")
    if saves.disks:
        _check_striped(config, max(needed, 0), f"the share of {what} on this disk", say)
        needed, what = 0, "the manifests of checkpoints"
    if saves.weights_interval and saves.interval.falls_on_each_of(saves.weights_interval):
        say(
            f"note: checkpoint.weights_every = {saves.weights_every!r} saves nothing alone: a full checkpoint, every "
            f"{saves.interval}, falls on each of its steps"
        )
    elif saves.weights_interval:
        needed += round(checkpoint_bytes(arch, precision, moments=0).value) * (saves.weights_keep + 1)
        needed -= sum(listed.bytes for listed in list_checkpoints(folder.weights.checkpoints))
        what += f" and {saves.weights_keep + 1} saves of the weights"
    require_free(folder.checkpoints, max(needed, 0), what, "lower checkpoint.keep (or weights_keep)")


def _check_striped(config: RunConfig, needed: int, what: str, say: Callable[[str], None]) -> None:
    """Check that the disks of this node exist, and have room for the files of its ranks; note those that no rank will
    use. needed: of all ranks."""
    require_disks(config.checkpoint.disks)
    disks, world = own_disks(config.checkpoint.disks), config.parallel.world_size
    by_device: dict[int, tuple[Path, int]] = {}  # two folders may be on one file system
    ranks = min(environment_number("LOCAL_WORLD_SIZE", world // config.launch.nodes, least=1), world)
    if unused := config.checkpoint.disks[ranks:]:
        say(
            f"note: checkpoint.disks names {len(disks)} folders, but a node has {ranks} rank{'s' * (ranks != 1)} with "
            f"one file each: {', '.join(unused)} stay{'s' * (len(unused) == 1)} unused"
        )
    for local_rank in range(ranks):
        disk = disks[local_rank % len(disks)]
        device = disk.stat().st_dev
        before = by_device.get(device, (disk, 0))[1]
        by_device[device] = disk, before + needed // world
    for disk, size in by_device.values():
        require_free(disk, size, what)
