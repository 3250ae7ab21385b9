"""Back to the newest checkpoint, in the running process: what a verdict to roll back does."""

from ingot.errors import RunFailed
from ingot.trainer.build import Training, data_path, load_newest, open_loader
from ingot.trainer.loader.ledger import Ledger


def reload(run: Training) -> int:
    """Load the newest checkpoint that verifies into `run` and open its data at the step after. Returns its step.

    Collective. Raises RunFailed when there is none yet, CheckpointError when none can be used.
    """
    restored = load_newest(run, run.folder, run.checkpoint_facts, run.log)
    if restored is None:
        raise RunFailed(
            "the policy asked to roll back, but there is no checkpoint yet",
            rule="a run rolls back to its newest checkpoint",
            fix="lower checkpoint.every_steps",
        )
    run.loader.close()
    tokens = data_path(run.folder, run.config.data.tokens)
    run.loader = open_loader(run.config, run.folder, tokens, run.mesh, run.place.device, restored.step + 1)
    run.ledger, run.segments = Ledger(), list(restored.ledger)
    return restored.step
