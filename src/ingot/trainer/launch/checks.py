"""The checks before any process starts: settings, data, devices, disk; and that a continued run has the same settings.

Without these checks, the same errors would appear minutes later, on every rank. No torch.
"""

import difflib
import importlib.util
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ingot.errors import (
    CheckpointError,
    ConfigError,
    ConfirmationNeeded,
    DataMissing,
    IngotError,
    MissingPartError,
    UsageError,
)
from ingot.hub.config_file import require_fit, run_of
from ingot.machine.facts import find_gpus, usable_cores
from ingot.schema.accepted import read_accepted, write_accepted
from ingot.schema.changes import CLASSES, ChangeClass, SettingChange
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.guard_record import read_measures, write_measures
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest, check_vocabulary, read_token_manifest
from ingot.theory.layout import require_layout
from ingot.trainer.checkpoint.accepted import changes_since, past_steps, record_for
from ingot.trainer.checkpoint.fence import newest_epoch
from ingot.trainer.checkpoint.folders import find_weights
from ingot.trainer.checkpoint.manifest import candidate_folders, read_manifest, verify_checkpoint
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.resumable import first_usable, judged_checkpoints, resume_step
from ingot.trainer.launch.disk_checks import check_disks
from ingot.trainer.lease import RunLease
from ingot.trainer.loader.listed import listed_windows
from ingot.units import counted

BIAS_RATE = "model.moe.bias_rate"  # router biases may be added, but never removed


def require_same_experiment(
    folder: RunFolder, config: RunConfig, data_fingerprint: str, accepted: Collection[str]
) -> list[SettingChange]:
    """Compare settings and data with the checkpoint that training resumes from. Returns all changes. Writes nothing.

    Changes that were accepted for this checkpoint by an earlier command, which ended before the next one was saved,
    need no second confirmation, each of them: the others of that command may have other values now.
    Raises ConfirmationNeeded for other changes of OTHER_NUMBERS that are not in `accepted`, ConfigError for REFUSED
    ones.
    """
    newest = _newest_manifest(folder)
    return _require_same(folder, newest, config, data_fingerprint, accepted) if newest else []


def require_same_in_store(
    folder: RunFolder,
    tier: RemoteTier,
    lease: RunLease,
    stored: CheckpointManifest,
    config: RunConfig,
    accepted: Collection[str],
) -> None:
    """Compare a checkpoint in the store, which the run would continue from, with the run. Nothing was fetched yet.

    stored: its manifest. Raises as `require_same_experiment`, ConfigError also if the run folder belongs to another run
    than the store; each error names what the store holds, and the way to another place.
    """
    tokens = _checked_tokens(folder, config, "data.tokens", config.data.tokens)
    try:
        lease.require_same_run()
        _require_same(folder, stored, config, tokens.fingerprint(), accepted)
    except (ConfigError, ConfirmationNeeded) as error:
        step, url = stored.step, tier.url
        error.found = f"{url} holds {run_in_store(tier, stored)}:\n{error.found}"
        can_continue = isinstance(error, ConfirmationNeeded) or error.facts.get("keys") == [BIAS_RATE]
        same = f"if it is this run, {error.fix.partition(', or ')[0]}; " if can_continue else ""
        error.fix = (
            f"{same}for a run of its own, another place: --set checkpoint.remote.url=NEW_PLACE; to begin there from "
            f"these weights, copy {url}/run.toml into a new folder F, ingot ckpt fetch F --step {step}, and set init = "
            f"F/checkpoints/{folder.checkpoint(step).name}"
        )
        error.facts |= {"store": url, "step": step}
        raise


def require_model_of_run(
    folder: RunFolder, tier: RemoteTier, stored: CheckpointManifest, settings: Mapping[str, Any]
) -> None:
    """Compare the model of a save in the store, which a command fetches into `folder`, with that of its run file.

    stored: its manifest. settings: those of the run file, flat. Other settings and data may differ: `ingot train`
    compares them. Raises ConfigError, which names what the store holds.
    """
    try:
        _require_same_model(changes_since(stored, settings, stored.data_fingerprint), stored.step)
    except ConfigError as error:
        error.found = f"{tier.url} holds {run_in_store(tier, stored)}:\n{error.found}"
        error.rule = "a save is fetched into a folder whose run file has the same model; nothing was fetched"
        error.fix = f"copy {tier.url}/run.toml to {folder.config}, or name the store of this run in it"
        error.facts |= {"store": tier.url, "step": stored.step}
        raise


def run_in_store(tier: RemoteTier, stored: CheckpointManifest) -> str:
    """Describe a checkpoint in a store: its step, its run and when it was written. stored: its manifest."""
    holder = newest_epoch(tier.store)
    number = f" (id {holder.run[:8]})" if holder and holder.run else ""
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(tier.stored_at(stored.step)))
    return f"step {stored.step} of the run {stored.settings.get('name', 'without a name')!r}{number}, stored {written}"


def _require_same(
    folder: RunFolder,
    newest: CheckpointManifest,
    config: RunConfig,
    data_fingerprint: str,
    accepted: Collection[str],
) -> list[SettingChange]:
    changes = changes_since(newest, config.settings(), data_fingerprint)
    if not changes:
        return []
    _require_same_model(changes, newest.step)
    _require_steps(config, newest.step)
    needed = record_for(newest.step, config.settings(), data_fingerprint, changes).changes
    known = [one.changes for one in read_accepted(folder.accepted) if one.step == newest.step] if needed else []
    confirmed = {*accepted, *(key for one in known for key in one if one[key] == needed.get(key))}
    unconfirmed = [c for c in changes if c.key in needed and c.key not in confirmed]
    if unconfirmed:
        flags = " ".join(f"--accept-change {c.key}" for c in unconfirmed)
        raise ConfirmationNeeded(
            "E-RUN-CHANGED",
            f"the run file differs from the checkpoint of step {newest.step} in settings that affect training:\n  "
            + "\n  ".join(map(str, unconfirmed)),
            rule="a changed setting must be confirmed with --accept-change; nothing was started",
            fix=f"{flags}, or train into another folder (--out DIR)",
            step=newest.step,
            keys=[c.key for c in unconfirmed],
            changes={c.key: [c.before, c.after] for c in unconfirmed},
        )
    return changes


def require_settings(keys: Collection[str]) -> None:
    """Raise UsageError for the first of `keys` that is no setting of a run file."""
    known = [key for key, _ in CLASSES]
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise UsageError(
                "E-ACCEPT-KEY",
                f"--accept-change {key}: there is no such setting",
                rule="the flag names a setting of the run file by its whole key, like optim.lr or data.weights",
                fix=f"did you mean {close[0]}?"
                if close
                else "without the flag, the command shows the keys that changed",
                key=key,
                close=close,
            )


def _require_same_model(changes: Collection[SettingChange], step: int) -> None:
    reshaped = [c for c in changes if c.kind is ChangeClass.REFUSED]
    if reshaped:
        raise ConfigError(
            "E-RUN-OTHER-MODEL",
            "the checkpoints are of another model:\n  " + "\n  ".join(map(str, reshaped)),
            rule="a run keeps its model, and --accept-change does not allow another one",
            fix="train the new model in another folder (--out DIR), or start again: --fresh --archive",
            keys=[c.key for c in reshaped],
        )
    for change in changes:
        if change.key == BIAS_RATE and not change.after:
            raise ConfigError(
                "E-RUN-OTHER-MODEL",
                f"the checkpoints have router biases, and the run file has none:\n  {change}",
                rule="without its biases a router chooses other experts, and --accept-change does not allow that",
                fix=f"keep {BIAS_RATE} = {change.before} and set model.moe.bias_steps = {step}: the biases then stay",
                keys=[BIAS_RATE],
                before=change.before,
                step=step,
            )


def _require_steps(config: RunConfig, step: int) -> None:
    """Raise ConfigError if the run, whose newest checkpoint is of `step`, is to have fewer steps."""
    if config.train.steps < step:
        raise ConfigError(
            "E-RUN-PAST-STEPS",
            f"train.steps = {config.train.steps}, but the run continues after step {step}",
            rule="train.steps is the number of all steps of a run, and trained steps are not taken back; nothing was "
            "started",
            fix=f"--set train.steps={step} ends the run at its checkpoint; a run of {config.train.steps} steps needs "
            "another folder (--out DIR)",
            steps=config.train.steps,
            step=step,
        )


def warn_of_past(step: int, changes: Collection[SettingChange], say: Callable[[str], None]) -> None:
    """Report steps up to `step`, after which the run continues, that a change of data.skip has no effect on."""
    for change in changes:
        if past := past_steps(step, change):
            s = "s" if past[0].last > past[0].first or len(past) > 1 else ""
            say(
                f"WARNING   data.skip has no effect on step{s} {', '.join(map(str, past))}: the run continues after "
                f"step {step}, and trained steps stay as they are"
            )


def drop_measures_of_another_rate(folder: RunFolder, lr: float, say: Callable[[str], None]) -> None:
    """Remove from the record of a run without a checkpoint the measures of its guard that were taken with another
    optim.lr than `lr`, and report them: none of their steps was kept, and they are not those of this rate."""
    if candidate_folders(folder.checkpoints):
        return
    measures = read_measures(folder.guard)
    if others := [one for one in measures if not one.is_of(lr)]:
        write_measures(folder.guard, [one for one in measures if one.is_of(lr)])
        say(
            f"guard     begins anew with optim.lr = {lr:g}: {len(others)} measure{'s' * (len(others) != 1)} with "
            f"{others[-1].lr:g}, from before any checkpoint, no longer hold"
        )


def record_accepted(
    folder: RunFolder, config: RunConfig, data_fingerprint: str, changes: Collection[SettingChange]
) -> None:
    """Record accepted changes in the run folder, where the ranks read them; the first rank logs them when they hold.

    changes: of all classes; free ones are not recorded. A second call before the next checkpoint does not record the
    changes again.
    """
    if (newest := _newest_manifest(folder)) is None:
        return
    now = record_for(newest.step, config.settings(), data_fingerprint, changes)
    records = read_accepted(folder.accepted)
    if now.changes and now not in records:
        write_accepted(folder.accepted, [*records, now])


def _newest_manifest(folder: RunFolder) -> CheckpointManifest | None:
    """Return the manifest of the checkpoint that training resumes from, as far as the files show; if none is usable,
    of the newest that can be read."""
    listed = judged_checkpoints(folder)
    usable = first_usable(listed)
    return usable.manifest if usable else next((c.manifest for c in listed if c.manifest), None)


def preflight(folder: RunFolder, config: RunConfig, say: Callable[[str], None]) -> TokenManifest:
    """Check that the run can start. Returns the manifest of its training tokens, or raises an IngotError."""
    for package in ("torch", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise MissingPartError(
                "E-PACKAGE-MISSING",
                f"training needs the package {package!r}, which is not installed",
                rule="the package is part of 'ingot[train]'",
                fix="pip install 'ingot[train]'",
                package=package,
            )
    require_layout(config)
    if config.init and not candidate_folders(folder.checkpoints):
        source = (folder.root / config.init).resolve()
        require_fit(source, config.model)
        if run_of(source):
            read_manifest(find_weights(source)[1])
    tokens = _checked_tokens(folder, config, "data.tokens", config.data.tokens)
    if config.data.heldout:
        _checked_tokens(folder, config, "data.heldout", config.data.heldout)
    _check_quarantined(folder, config, say)
    _check_devices(config, say)
    check_disks(folder, config, say)
    return tokens


def _checked_tokens(folder: RunFolder, config: RunConfig, key: str, value: str) -> TokenManifest:
    try:
        manifest = read_token_manifest((folder.root / value).resolve())
        check_vocabulary(manifest, config.model.vocab_size)
    except IngotError as error:
        error.found = f"{key}: {error.found}"
        if isinstance(error, DataMissing) and not Path(value).is_absolute():
            error.fix += f"; {value!r} is looked for from the folder of the run file on"
        error.facts["key"] = key
        raise
    return manifest


def _check_quarantined(folder: RunFolder, config: RunConfig, say: Callable[[str], None]) -> None:
    """Report documents of the quarantine lists that are in the training tokens. Raises DataError if the run would have
    to leave out too many windows because of them."""
    purge = f"ingot data purge {(folder.root / config.data.tokens).resolve().parent.parent} --quarantine"
    for path, (documents, windows) in listed_windows(config, folder).items():
        say(
            f"warning: the tokens have {counted(documents, 'document')} of {path}: the run leaves out "
            f"{windows:,} windows; to remove them from the tokens: {purge} {path}"
        )


def _check_devices(config: RunConfig, say: Callable[[str], None]) -> None:
    ranks = config.parallel.world_size // config.launch.nodes
    gpus = () if config.train.device == "cpu" else find_gpus()
    if (gpus or config.train.device == "cuda") and len(gpus) < ranks:
        raise ConfigError(
            "E-GPU-COUNT",
            f"{_degrees(config)} needs {ranks} GPUs{_on_each(config)}, but this machine has {len(gpus)}",
            rule="every process has its own GPU",
            fix=f"{_fewer(config, max(len(gpus), 1))}, or --set train.device=cpu",
            needed=ranks,
            available=len(gpus),
        )
    if not gpus and ranks > usable_cores():
        say(f"note: {ranks} ranks share {usable_cores()} cores; {usable_cores()} ranks would be faster")


def _on_each(config: RunConfig) -> str:
    return f" on each of {config.launch.nodes} nodes" if config.launch.nodes > 1 else ""


def _degrees(config: RunConfig) -> str:
    """Return the parallel degrees above 1 as text, like "parallel.pp=2 x parallel.tp=4"."""
    named = {name: getattr(config.parallel, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    return " x ".join(f"parallel.{name}={n}" for name, n in named.items() if n > 1) or "parallel.dp_shard=1"


def _fewer(config: RunConfig, ranks: int) -> str:
    only_shards = config.parallel.world_size == config.parallel.dp_shard
    return f"--set parallel.dp_shard={ranks}" if only_shards else f"degrees that multiply to at most {ranks}"


def check_until_step(until_step: int | None, config: RunConfig) -> None:
    """Raise UsageError unless `until_step` is None or a step of the run."""
    if until_step is not None and not 1 <= until_step <= config.train.steps:
        raise UsageError(
            "E-UNTIL-STEP",
            f"--until-step {until_step} is not a step of the run",
            rule=f"the steps of the run are 1 to {config.train.steps} (train.steps)",
            fix="name one of these steps, or leave the flag out to train to the end",
            until_step=until_step,
            steps=config.train.steps,
        )


def past_step(folder: RunFolder, config: RunConfig, until_step: int | None) -> int:
    """Return the newest saved step, verified, if the run already reached `until_step`; 0 if steps are left to do."""
    if until_step is None or until_step == config.train.steps:
        return 0  # to the end: the evaluation after the last step may be left to do
    step = resume_step(folder)
    return step if step >= until_step and is_sound(folder, step) else 0


def is_sound(folder: RunFolder, step: int) -> bool:
    """Read and hash every byte of the checkpoint of `step`, as the ranks do. Returns whether they would use it."""
    try:
        verify_checkpoint(folder.checkpoint(step))
    except CheckpointError:
        return False
    return True
