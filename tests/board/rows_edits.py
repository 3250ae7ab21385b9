"""The row of settings that change between two commands: each has its class, and the difference is shown."""

import json
from random import Random

from tests.unit.trainer.launch.test_checks import OTHER_NUMBERS, REFUSED, SAME_BITS, SAME_MATHEMATICS, changed

from ingot.drill.oracles import Verdicts
from ingot.errors import ConfigError, ConfirmationNeeded, IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.changes import ChangeClass
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.manifest import candidate_folders, read_manifest
from ingot.trainer.launch.checks import require_same_experiment

from .bench import Bench
from .row import INTERVAL, Row, judge_recovered, random_of

_EDITS = dict(zip(ChangeClass, (SAME_BITS, SAME_MATHEMATICS, OTHER_NUMBERS, REFUSED), strict=True))
# Of them, what the bench's run can train with: the others need files, ranks or a compiler.
_TRAINS = {
    *("data.prefetch", "checkpoint.keep", "launch.max_restarts", "launch.timeout_seconds", "cost.usd_per_hour"),
    *("train.micro_batch", "parallel.recompute", "seed", "optim.lr", "optim.beta2", "optim.clip_norm"),
    *("guard.preset", "guard.window", "guard.lr_factor"),
    *("schedule.warmup_steps", "data.mask_documents", "model.rope_theta", "model.tied_embeddings", "model.num_layers"),
}
_BEGUN = 2 * INTERVAL  # steps before the edit


def rs29(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Compare all edits with a checkpoint that was trained, and give the command with one edit of each class."""
    random, base = random_of("RS29", seed), bench.base(_BEGUN)
    folder = bench.folder(base)
    config, edits = recorded_run(folder.config), 0
    for kind, pairs in _EDITS.items():
        for key, value in pairs:
            if config.settings().get(key) != value:
                edits += 1
                verdicts.judge("o6", f"{key} = {value}", _wrong_class(folder, config, key, value, kind))
    verdicts.numbers["edits"] = float(edits)
    for kind in ChangeClass:
        _command(bench, seed, verdicts, kind, random)


def _wrong_class(folder: RunFolder, config: RunConfig, key: str, value: object, kind: ChangeClass) -> str:
    """Return what is wrong in the comparison of an edit with the checkpoint; "" if nothing."""
    data = read_manifest(candidate_folders(folder.checkpoints)[0]).data_fingerprint
    try:
        changes = require_same_experiment(folder, changed(config, key, value), data, ())
        found = [(change.key, change.kind, change.after) for change in changes]
        return "" if found == [(key, kind, value)] and kind.is_free else f"passes as {found}"
    except IngotError as error:
        code = {ChangeClass.OTHER_NUMBERS: "E-RUN-CHANGED", ChangeClass.REFUSED: "E-RUN-OTHER-MODEL"}.get(kind)
        right = (error.code, error.facts.get("keys")) == (code, [key]) and f"{key}   " in error.found
        return "" if right else f"{error.code}: {error.found}"


def _command(bench: Bench, seed: int, verdicts: Verdicts, kind: ChangeClass, random: Random) -> None:
    """Continue a run with an edit of this class. Where it changes no bit, the run has to end as R."""
    key, value = random.choice([pair for pair in _EDITS[kind] if pair[0] in _TRAINS])
    name, setting = f"edit-{kind.name.lower()}-{seed}", f"{key}={json.dumps(value)}"
    folder, where = bench.copy(bench.base(_BEGUN), name), f"{setting}, {kind}"
    before = folder.events.read_bytes()
    ended = bench.attempt(name, setting)
    if kind.is_free:
        shown = any(line.split()[:2] == ["changed", key] and str(kind) in line for line in ended.output.splitlines())
        verdicts.judge("o6", where, "" if shown and ended.code == 0 else f"code {ended.code}: {ended.output[-300:]}")
        if kind is ChangeClass.SAME_BITS:
            judge_recovered(bench, verdicts, name, where, bench.reference(ranks=1))
        return
    code = ConfigError.exit_code if kind is ChangeClass.REFUSED else ConfirmationNeeded.exit_code
    same = f"{key}   " in ended.output and folder.events.read_bytes() == before
    verdicts.judge("o6", where, "" if same and ended.code == code else f"code {ended.code}: {ended.output[-300:]}")
    ended = bench.attempt(name, setting, accept=(key,))
    if kind is ChangeClass.REFUSED:
        verdicts.judge("o6", f"{where}, accepted", "" if ended.code == code else f"code {ended.code}")
        return
    recorded = [(e["key"], e["step"]) for e in read_events(folder.events, events.SETTING_CHANGED)]
    right = ended.code == 0 and recorded == [(key, _BEGUN)]
    verdicts.judge("o6", f"{where}, accepted", "" if right else f"code {ended.code}, recorded {recorded}")


ROWS = (Row("RS29", f"{sum(map(len, _EDITS.values()))} edits of settings between two commands", rs29),)
