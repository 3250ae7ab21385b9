"""Damage to a token shard while a copy of a run trains: one that is repaired, and one that is left out. No torch.

The tokens of the run are not touched. The copy reads a folder of its own, whose files are links to those of the run,
but for one shard, which is copied: the last step reads the part of it that will be damaged.
"""

import shutil
from pathlib import Path

from ingot.drill.damage import flip_in_place
from ingot.drill.fault import DrillFault
from ingot.drill.guarded import directed_place, trained_directed, with_settings
from ingot.drill.oracles import RunFacts
from ingot.drill.trial import DrilledRun, Trial
from ingot.errors import DataError
from ingot.schema import events
from ingot.schema.quarantine import listed_in
from ingot.schema.quarantine_record import read_quarantine, write_quarantine
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest, training_tokens
from ingot.trainer.loader.listed import record_of
from ingot.trainer.loader.order import Order

_CODE = "E-SHARD-HASH"


def tokens_of(run: Path) -> Path:
    """Return the folder of tokens of the copy with the run folder `run`."""
    return run.with_name(f"{run.name}.tokens")


def _place_of(run: DrilledRun) -> tuple[str, int]:
    """Return the shard, and the byte in it, of a token that the last step reads. It is of no listed document."""
    config = run.config
    folder = training_tokens(run.run_file.parent / config.data.tokens)
    manifest = read_token_manifest(folder)
    listed = listed_in(folder, [run.run_file.parent / path for path in config.data.quarantine])
    records = [(0, record_of(one, 1)) for one in listed]
    order = Order(manifest, config.train.seq_len, config.seed, config.data.weights, quarantine=records)
    window = order.step(run.steps, config.train.global_batch)[:1]
    shard, first = (int(one[0]) for one in order.locate(window))
    return manifest.shards[shard].name, (first + config.train.seq_len // 2) * (2 if manifest.dtype == "uint16" else 4)


def _with_own_shard(run: DrilledRun, place: Path) -> DrilledRun:
    """Return the run of the copy in `place` that reads a folder with a copy of the shard, and make that folder."""
    folder = training_tokens(run.run_file.parent / run.config.data.tokens)
    shard, own = _place_of(run)[0], tokens_of(place)
    own.mkdir()
    for path in folder.iterdir():
        if path.name == f"{shard}.tokens":
            shutil.copyfile(path, own / path.name)
        else:
            (own / path.name).symlink_to(path.resolve())
    return with_settings(run, {"data.tokens": str(own)})


def _leaves_out(run: DrilledRun, place: Path) -> DrilledRun:
    return with_settings(_with_own_shard(run, place), {"data.on_damage": "quarantine", "data.max_quarantined": 1.0})


def _stops(run: DrilledRun, place: Path) -> DrilledRun:
    return with_settings(_with_own_shard(run, place), {"data.on_damage": "stop"})


def _flip(trial: Trial, *, quiet: bool) -> None:
    shard, byte = _place_of(trial.run)
    trial.injects(f"a wrong bit of byte {byte:,} of the token shard {shard}", quiet=quiet)
    flip_in_place(tokens_of(trial.folder.root) / f"{shard}.tokens", byte, 0)


def _flip_and_stop(trial: Trial) -> None:
    _flip(trial, quiet=False)


def _flip_and_go_on(trial: Trial) -> None:
    _flip(trial, quiet=True)


def repair(trial: Trial) -> None:
    """Make the damaged shard of a copy whole again."""
    shard, byte = _place_of(trial.run)
    flip_in_place(tokens_of(trial.folder.root) / f"{shard}.tokens", byte, 0)
    trial.output.say("  repaired   the shard is whole again")


def _named(trial: Trial) -> str:
    shard, printed = _place_of(trial.run)[0], trial.printed.read_text(errors="replace")
    faults = [event["failure"] for event in trial.found(events.FAULT)]
    if _CODE not in printed or shard not in printed:
        return f"no error {_CODE} names the shard {shard}: {trial.last_words()}"
    return "" if faults == ["data"] else f"faults {faults}, not one of the data"


def _left_out(trial: Trial) -> str:
    shard, byte = _place_of(trial.run)
    width = 2 if read_token_manifest(tokens_of(trial.folder.root)).dtype == "uint16" else 4
    # Listed documents and what a filter leaves out are in the same record, and are no damage.
    found = [one for one in read_quarantine(trial.folder.quarantine) if one.code == _CODE]
    right = [one for one in found if one.shard == shard and one.begin * width <= byte < one.end * width]
    logged = sum(event["code"] == _CODE for event in trial.found(events.QUARANTINED))
    if len(found) != 1 or found != right or logged != 1:
        spans = [(one.shard, one.begin, one.end) for one in found]
        return f"{spans} is in quarantine, in {logged} events, and not the damaged block of {shard}"
    return ""


def _directed(trial: Trial) -> RunFacts | None:
    """Train a copy on sound tokens whose record of damage is there from its start."""
    place = directed_place(trial.folder.root)
    place.mkdir()
    write_quarantine(RunFolder(place).quarantine, read_quarantine(trial.folder.quarantine))
    repair(trial)
    return trained_directed(trial, trial.run, place)


def _reads_late(config: RunConfig) -> str:
    ahead, steps = config.data.prefetch, config.train.steps
    return f"{ahead} batches are read ahead, and the copy has {steps} steps" if 3 * ahead > steps else ""


SHARD_FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        id="RS25",
        injects="a wrong bit in a token shard: it stops; the shard is repaired",
        inject=_flip_and_stop,
        expects=_named,
        codes=frozenset({DataError.exit_code}),
        repair=repair,
        room=lambda config: config.data.prefetch + 3,
        needs=_reads_late,
        one_of="shards",
        prepare=_stops,
    ),
    DrillFault(
        id="RS25 quarantine",
        injects="a wrong bit in a token shard: it goes on without that block",
        inject=_flip_and_go_on,
        expects=_left_out,
        repair=repair,
        may_end=frozenset({DataError.exit_code}),  # by a rank that reads the part of another one, to compute it twice
        intervals=0,
        room=lambda config: config.data.prefetch + 3,
        needs=_reads_late,
        one_of="shards",
        prepare=_leaves_out,
        directed=_directed,
    ),
)
