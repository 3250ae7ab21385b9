"""Back to the newest checkpoint, in the running process: what a verdict to roll back does."""

from ingot.checkpoint.loading import resume
from ingot.errors import RunFailed
from ingot.loader.ledger import Ledger
from ingot.schema import events
from ingot.train.build import Training, data_path, open_loader


def reload(run: Training) -> int:
    """Load the newest checkpoint that verifies into `run` and open its data at the step after. Returns its step.

    Collective. Raises RunFailed when there is none yet, CheckpointError when none can be used.
    """
    facts = run.checkpoint_facts
    restored = resume(
        run.folder,
        run.state,
        config_sha256=facts.config_sha256,
        data_fingerprint=facts.data_fingerprint,
        on_refused=lambda step, path, reason: run.log(
            events.CHECKPOINT_REFUSED, step=step, path=str(path.relative_to(run.folder.root)), reason=reason
        ),
    )
    if restored is None:
        raise RunFailed(
            "the policy asked to roll back, but there is no checkpoint yet",
            rule="a run rolls back to its newest checkpoint",
            fix="lower checkpoint.every_steps",
        )
    run.model.publish()
    run.model.publish()
    run.loader.close()
    tokens = data_path(run.folder, run.config.data.tokens)
    run.loader = open_loader(run.config, tokens, run.mesh, run.place.device, restored.step + 1)
    run.ledger, run.segments = Ledger(), list(restored.ledger)
    return restored.step
