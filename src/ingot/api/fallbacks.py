"""The fallback layouts of a run: the planner works them out, and its launchers read them from the run folder."""

from pathlib import Path

from ingot.errors import ConfigError
from ingot.planner.request.clusters import find_cluster
from ingot.planner.run.fallbacks import cluster_sha256, plan_fallbacks
from ingot.schema.fallbacks import OTHER_RUN, read_fallbacks, write_fallbacks
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder


def keep_fallbacks(base: Path, folder: RunFolder, run: RunConfig) -> None:
    """Write the fallback layouts of `run` for this machine into its folder, unless they are there.

    base: the folder of the run file, which may have a machine.json. Raises ConfigError for a file that was changed, or
    for a machine.json that cannot be read.
    """
    cluster = find_cluster(None, base)
    try:
        kept = read_fallbacks(folder.fallbacks, run) if folder.fallbacks.exists() else None
        if kept and kept.cluster_sha256 == cluster_sha256(cluster):
            return
    except ConfigError as error:
        if error.code != OTHER_RUN:
            raise
    write_fallbacks(folder.fallbacks, plan_fallbacks(run, cluster))
