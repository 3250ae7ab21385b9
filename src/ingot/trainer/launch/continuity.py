"""Does this run file continue the experiment in this folder, or change it? Changes are made on purpose."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import ConfigError, ConfirmationNeeded
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.run import LATER_SETTINGS, RunConfig, essential
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json
from ingot.trainer.checkpoint.manifest import list_checkpoints

DATA = "data.tokens"  # stands for the token stream, whose fingerprint is compared, not its path
MIXTURE = "data.weights"  # one decision, however many sources it names
# How experts are trained: no parameter comes or goes with these. Biases of routers can come, and may not go.
BIAS_RATE = "model.moe.bias_rate"
OF_TRAINING = {
    *("model.moe.noise", "model.moe.capacity_factor", "model.moe.sequence_loss", "model.moe.global_loss"),
    *("model.moe.z_loss", BIAS_RATE, "model.moe.bias_steps"),
}


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}   {self.before} -> {self.after}"


def changes_since(manifest: CheckpointManifest, config: RunConfig, data_fingerprint: str) -> list[Change]:
    """What differs between the experiment that made checkpoint `manifest` and the one that is asked for."""
    before, after = _with_one_mixture(essential(manifest.settings)), _with_one_mixture(config.training_settings())
    keys = [k for k in before | after if before.get(k) != after.get(k)]
    changes = [Change(key, _value(before, key), _value(after, key)) for key in sorted(keys)]
    if manifest.data_fingerprint != data_fingerprint:
        changes.append(Change(DATA, manifest.data_fingerprint[:12], data_fingerprint[:12]))
    return changes


def _with_one_mixture(settings: Mapping[str, Any]) -> dict[str, Any]:
    """ "data.weights.web", "data.weights.code", ... as one setting."""
    prefix = f"{MIXTURE}."
    weights = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    return {key: value for key, value in settings.items() if not key.startswith(prefix)} | {MIXTURE: weights}


def _value(settings: Mapping[str, Any], key: str) -> Any:
    return settings.get(key, LATER_SETTINGS.get(key, "not set"))


def require_same_experiment(
    folder: RunFolder, config: RunConfig, data_fingerprint: str, accepted: Collection[str]
) -> list[Change]:
    """Compare with the newest readable checkpoint. Returns the changes, all of them accepted. Writes nothing.

    Raises ConfirmationNeeded for changes that were not accepted, ConfigError for another model.
    """
    newest = _newest_manifest(folder)
    changes = changes_since(newest, config, data_fingerprint) if newest else []
    if newest is None or not changes:
        return []
    _require_same_model(changes, newest.step)
    open_ones = [c for c in changes if c.key not in accepted]
    if open_ones:
        flags = " ".join(f"--accept-change {c.key}" for c in open_ones)
        raise ConfirmationNeeded(
            f"the run file differs from the checkpoint of step {newest.step} in what changes training:\n  "
            + "\n  ".join(map(str, open_ones)),
            rule="nothing was started; changing a running experiment is decided, not slipped in",
            fix=f"{flags}, or train into another folder (--out DIR)",
        )
    return changes


def _require_same_model(changes: Collection[Change], step: int) -> None:
    reshaped = [c for c in changes if c.key.startswith("model.") and c.key not in OF_TRAINING]
    if reshaped:
        raise ConfigError(
            "the checkpoints are of another model:\n  " + "\n  ".join(map(str, reshaped)),
            rule="a run keeps its model, and --accept-change does not allow another one",
            fix="train it in another folder (--out DIR), or anew: --fresh --archive",
        )
    for change in changes:
        if change.key == BIAS_RATE and not change.after:
            raise ConfigError(
                f"the checkpoints have biases of routers, and the run file has none:\n  {change}",
                rule="without its biases a model chooses other experts, and --accept-change does not allow that",
                fix=f"keep {BIAS_RATE} = {change.before} and set model.moe.bias_steps = {step}: biases rest, and act",
            )


def record_accepted(folder: RunFolder, config: RunConfig, data_fingerprint: str, changes: Collection[Change]) -> None:
    """Write accepted changes down: in the folder for the ranks to see, in the event log for the report to tell.

    Asking again before the next checkpoint records nothing twice.
    """
    newest = _newest_manifest(folder)
    if newest is None or not changes:
        return
    record = json.loads(folder.accepted.read_text()) if folder.accepted.exists() else []
    accepted = {
        "step": newest.step,
        "config_sha256": config.training_sha256(),
        "data_fingerprint": data_fingerprint,
        "changes": {c.key: [c.before, c.after] for c in changes},
    }
    if record and record[-1] == json.loads(json.dumps(accepted)):
        return
    write_json(folder.accepted, [*record, accepted])
    log = EventLog(folder.events)
    for change in changes:
        log.write(events.SETTING_CHANGED, key=change.key, old=change.before, new=change.after, step=newest.step)
    log.close()


def _newest_manifest(folder: RunFolder) -> CheckpointManifest | None:
    return next((c.manifest for c in list_checkpoints(folder.checkpoints) if c.manifest), None)
