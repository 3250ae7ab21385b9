"""The name of a run outside of its folder."""

import hashlib

from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder


def run_id_of(folder: RunFolder, config: RunConfig) -> str:
    """Return the name of a run for trackers: the same for the life of its folder, and no other run has it. The log of
    the run has its first line. Raises OSError."""
    with folder.events.open("rb") as log:
        first = log.readline()
    return f"{config.name}-{hashlib.sha256(first).hexdigest()[:8]}"
