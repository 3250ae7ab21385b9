"""From a run to the job that trains it. What a launcher needs is in the Job; which launcher does not matter here."""

from pathlib import Path

from ingot.machine.facts import usable_cores
from ingot.schema.job import Job
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.mesh.start import worker_environment

WORKER = "ingot.trainer.main"


def training_job(folder: RunFolder, config: RunConfig, *, until_step: int | None = None, quiet: bool = False) -> Job:
    """The ranks that train the run in `folder`, to its end or `until_step`. Rank 0 prints, unless `quiet`."""
    processes = config.parallel.world_size
    until = [] if until_step is None else ["--until-step", str(until_step)]
    arguments = (str(folder.root), *until, *(["--quiet"] if quiet else []))
    env = worker_environment(most_ranks(config.parallel), usable_cores())  # a container's CPU quota counts, too
    if Path("/sys/class/net/lo").exists():
        # One machine: ranks talk over loopback, whatever the host's name resolves to, and nobody else can connect.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return Job(module=WORKER, arguments=arguments, processes=processes, env=env)


def most_ranks(parallel: Parallel) -> int:
    """Among how many ranks cores are shared. A product of few rows has other bits with other numbers of threads, so
    with canonical sums a rank has the threads that it has beside the most copies."""
    if parallel.reduce != "canonical":
        return parallel.world_size
    return parallel.world_size // parallel.dp_replicate * parallel.virtual_ranks
