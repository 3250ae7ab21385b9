"""Load a run's newest checkpoint and open its data at the next step: at the start, and when the run rolls back."""

from collections.abc import Callable

import torch

from ingot.errors import RunFailed
from ingot.schema import events
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.save import CheckpointFacts
from ingot.trainer.heldout import data_path
from ingot.trainer.loader.ledger import Ledger
from ingot.trainer.loader.loader import Loader
from ingot.trainer.loader.order import earlier_weights
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parts import StepParts, Trainer


def load_newest(
    parts: StepParts, folder: RunFolder, facts: CheckpointFacts, log: Callable[..., None]
) -> CheckpointManifest | None:
    """Load the newest undamaged checkpoint of `folder` into `parts`. Returns None for a new run. Collective.

    A checkpoint that cannot be used is logged, and the next older one is tried.
    """
    restored = resume(
        folder,
        parts.state,
        config_sha256=facts.config_sha256,
        data_fingerprint=facts.data_fingerprint,
        on_refused=lambda step, path, reason: log(
            events.CHECKPOINT_REFUSED, step=step, path=str(path.relative_to(folder.root)), reason=reason
        ),
    )
    if restored:
        parts.model.publish()
    return restored


def open_loader(config: RunConfig, folder: RunFolder, mesh: Mesh, device: torch.device, first_step: int) -> Loader:
    """Open the batches of this rank, from `first_step` to the run's last step."""
    return Loader(
        data_path(folder, config.data.tokens),
        seq_len=config.train.seq_len,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        seed=config.seed,
        weights=config.data.weights,
        earlier=earlier_weights(folder, config.data.weights),
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        first_step=first_step,
        last_step=config.train.steps,
        device=device,
        mask_documents=config.data.mask_documents,
        prefetch=config.data.prefetch,
    )


def reload(trainer: Trainer) -> int:
    """Load the newest undamaged checkpoint into the running `trainer`. Returns its step. Collective.

    Raises RunFailed if there is no checkpoint yet, CheckpointError if no checkpoint can be used.
    """
    restored = load_newest(trainer, trainer.folder, trainer.checkpoint_facts, trainer.log)
    if restored is None:
        raise RunFailed(
            "E-ROLLBACK-NO-CHECKPOINT",
            "the policy asked to roll back, but there is no checkpoint yet",
            rule="a run rolls back to its newest checkpoint",
            fix="lower checkpoint.every_steps, so that the first checkpoint is saved earlier",
            run=str(trainer.folder.root),
        )
    trainer.loader.close()
    trainer.loader = open_loader(trainer.config, trainer.folder, trainer.mesh, trainer.place.device, restored.step + 1)
    trainer.ledger, trainer.segments = Ledger(), list(restored.ledger)
    return restored.step
