"""The state that a run starts from, also after a roll-back: load the newest snapshot in memory or checkpoint, and open
the data at the next step."""

import time
from collections.abc import Callable

import numpy as np
import torch

from ingot.errors import CheckpointError, IngotError
from ingot.schema import events
from ingot.schema.accepted import read_accepted
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.accepted import record_resumed
from ingot.trainer.checkpoint.agree import from_rank_zero, world
from ingot.trainer.checkpoint.files import CheckpointFacts
from ingot.trainer.checkpoint.load import FetchInstead, resume, resume_from_memory
from ingot.trainer.checkpoint.manifest import SUSPECT, newest_step
from ingot.trainer.checkpoint.message import RankError
from ingot.trainer.checkpoint.nodes import FetchFile, NodeFetch
from ingot.trainer.checkpoint.replicas import Replicas
from ingot.trainer.heldout import data_path
from ingot.trainer.loader.loader import Loader
from ingot.trainer.loader.order import earlier_weights
from ingot.trainer.mesh.collectives import gather_from
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parts import StepParts
from ingot.units import format_bytes, format_seconds


def load_from_memory(
    parts: StepParts,
    folder: RunFolder,
    facts: CheckpointFacts,
    replicas: Replicas | None,
    log: Callable[..., None],
    say: Callable[[str], None],
) -> CheckpointManifest | None:
    """Load the newest snapshot that the memory of the nodes has whole into `parts`, and report it. Collective.

    Returns None if there is none, or if a checkpoint on the disk is newer: then nothing was reported, or why a snapshot
    was not used.
    """
    if replicas is None:
        return None
    began = time.monotonic()
    try:
        memory = replicas.newest(folder, facts.epoch, from_rank_zero(lambda: newest_step(folder.checkpoints)))
    except (IngotError, OSError, RankError, ValueError) as error:  # the same on every rank
        say(f"WARNING   snapshots in memory are not used: {getattr(error, 'found', error)}")
        return None
    if memory is None or memory.manifest.health.state == SUSPECT:
        return None
    try:
        restored = resume_from_memory(
            folder, memory, parts.state, settings=facts.settings, data_fingerprint=facts.data_fingerprint
        )
    except CheckpointError as error:
        log(events.CHECKPOINT_REFUSED, step=memory.step, path=str(memory.path), reason=error.found)
        say(f"refused   {error.found}; trying the checkpoints")
        return None
    finally:
        memory.close()
    replicas.adopt(memory.images[0].snapshot, facts.epoch)
    taken = gather_from(range(world()), np.array([memory.own_bytes, memory.peer_bytes], dtype=np.float64))
    own, peers = map(int, taken.sum(0))
    seconds = time.monotonic() - began
    log(events.SNAPSHOT_RESTORED, step=restored.step, own_bytes=own, peer_bytes=peers, seconds=seconds)
    say(
        f"restored  step {restored.step} from memory  {format_bytes(own)} of the same nodes  {format_bytes(peers)} of "
        f"other nodes  {format_seconds(seconds)}  no checkpoint was read"
    )
    _take_up(parts, folder, facts, restored, log)
    return restored


def load_newest(
    parts: StepParts,
    folder: RunFolder,
    facts: CheckpointFacts,
    log: Callable[..., None],
    say: Callable[[str], None],
    fetch_instead: FetchInstead,
    fetch_file: FetchFile | None,
) -> CheckpointManifest | None:
    """Load the newest undamaged checkpoint of `folder` into `parts`. Returns None for a new run. Collective.

    A checkpoint that cannot be used is logged, and the next older one is tried, on the disk or by `fetch_instead`.
    fetch_file: see `bring_files`. Settings that differ from those of the loaded checkpoint are recorded.
    """

    def on_fetched(manifest: CheckpointManifest, fetched: NodeFetch) -> None:
        whole = sum(entry.bytes for entry in manifest.files.values())
        log(events.CHECKPOINT_FETCHED, step=manifest.step, **vars(fetched), whole_bytes=whole)
        say(
            f"fetched   step {manifest.step} on node {fetched.node}  {fetched.files} of {len(manifest.files)} files, "
            f"{format_bytes(fetched.bytes)} of {format_bytes(whole)}  {format_seconds(fetched.seconds)}"
        )

    restored = resume(
        folder,
        parts.state,
        settings=facts.settings,
        data_fingerprint=facts.data_fingerprint,
        on_refused=lambda step, path, reason: log(
            events.CHECKPOINT_REFUSED, step=step, path=str(path.relative_to(folder.root)), reason=reason
        ),
        fetch_instead=fetch_instead,
        fetch_file=fetch_file,
        on_fetched=on_fetched,
    )
    if restored:
        _take_up(parts, folder, facts, restored, log)
    return restored


def _take_up(
    parts: StepParts, folder: RunFolder, facts: CheckpointFacts, restored: CheckpointManifest, log: Callable[..., None]
) -> None:
    """Bring what depends on the loaded state up to date, and record settings that differ. Collective."""
    parts.model.publish()
    parts.callbacks.restore(restored.callbacks)
    # The order of samples depends on this record: no rank may open the data before it is written.
    from_rank_zero(lambda: record_resumed(folder, restored, facts.settings, facts.data_fingerprint, log))


def open_loader(config: RunConfig, folder: RunFolder, mesh: Mesh, device: torch.device, first_step: int) -> Loader:
    """Open the batches of this rank, from `first_step` to the run's last step."""
    return Loader(
        data_path(folder, config.data.tokens),
        seq_len=config.train.seq_len,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        seed=config.seed,
        weights=config.data.weights,
        earlier=earlier_weights(read_accepted(folder.accepted), config.data.weights),
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        first_step=first_step,
        last_step=config.train.steps,
        device=device,
        mask_documents=config.data.mask_documents,
        prefetch=config.data.prefetch,
    )
