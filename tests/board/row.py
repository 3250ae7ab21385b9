"""A row of the board: a fault, carried out for a seed, and the judgment that all rows share."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ingot.drill import trial
from ingot.drill.clean import left_running, o7
from ingot.drill.fault import play
from ingot.drill.faults import faults_of
from ingot.drill.job import RUN_VARIABLE
from ingot.drill.oracles import RunFacts, Trace, Verdicts
from ingot.errors import IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import candidate_folders, verify_checkpoint
from ingot.trainer.checkpoint.places import Places

from .bench import Bench
from .times import NO_LIMITS, Limits

INTERVAL = 4  # steps between checkpoints of the bench's runs
MODES = {"sync": "rank", "async": "writer"}  # checkpoint.mode -> the process that writes


@dataclass(frozen=True)
class Row:
    """id: as in the list of all rows. injects: the fault, for people. play: carries it out with a seed. missing:
    returns why this machine cannot play it; "" if it can. limits: of the medians of its times."""

    id: str
    injects: str
    play: Callable[[Bench, int, Verdicts], None]
    missing: Callable[[], str] = str
    limits: Limits = NO_LIMITS


def carry_out(bench: Bench, row: Row, seed: int, verdicts: Verdicts) -> None:
    """Play a row with a seed, and look for processes and sockets that it left, of its runs or of other commands: all
    that it starts has a mark."""
    before = os.environ.get(RUN_VARIABLE)
    os.environ[RUN_VARIABLE] = str(bench.root / "row")
    try:
        row.play(bench, seed, verdicts)
    finally:
        os.environ.pop(RUN_VARIABLE)
        os.environ.update({RUN_VARIABLE: before} if before else {})
    verdicts.judge("o7", "after the row", left_running(bench.root))


def random_of(row: str, seed: int) -> Random:
    """Return the random numbers of a row and seed."""
    return Random(f"{row} {seed}")


def mode_of(mode: str) -> str:
    """Return the setting of checkpoint.mode."""
    return f'checkpoint.mode="{mode}"'


def drawn_mode(seed: int) -> str:
    """Return the setting of checkpoint.mode for a seed: the default one for seed 0 and every second seed after it."""
    return mode_of("sync" if seed % 2 else "async")


def judge_recovered(
    bench: Bench,
    verdicts: Verdicts,
    name: str,
    where: str,
    reference: RunFacts,
    *,
    faults: int = 1,
    all_layouts: bool = False,
    earlier: Trace | None = None,
) -> None:
    """Judge O1, O2, O3, O7 and O8 of the run `name`, which has ended.

    where: the case, for people. faults: how many times the run was disturbed. all_layouts: random states are not
    compared, because another number of ranks has others. earlier: the trace of attempts whose log was lost.
    """
    folder = bench.folder(name)
    verdicts.judge("o7", where, o7(folder, bench.temporary(name), bench.memory_before))
    most = INTERVAL * faults
    trial.judge_recovered(verdicts, folder, where, reference, most, all_layouts=all_layouts, earlier=earlier)


def drilled(row: str, *settings: str, case: str = "", without: str = "") -> Callable[[Bench, int, Verdicts], None]:
    """Return how a row is played whose faults `ingot drill` has as well: on the bench's run with these settings,
    which saves in the mode that is drawn. Faults that such a run cannot have are left out. case: a word for the names
    of its folders, in a row with several. without: the fault that is a row of its own."""

    def play_row(bench: Bench, seed: int, verdicts: Verdicts) -> None:
        run, reference = bench.drilled(*settings, drawn_mode(seed)), bench.reference(*settings)
        for fault in faults_of(row):
            if fault.needs(run.config) or fault.id == without:
                continue
            place = bench.root / f"{fault.id.replace(' ', '-')}{case}-{seed}"
            own, random = fault.prepare(run, place), random_of(fault.id, seed)
            with trial.Trial(own, place, random, verdicts, name=fault.id) as one:
                play(fault, one, reference)

    return play_row


def newest_valid(folder: RunFolder) -> tuple[int, str]:
    """Return the step of the newest checkpoint folder, and why it cannot be used ("" if it can)."""
    newest = candidate_folders(folder.checkpoints)[:1]
    if not newest:
        return 0, "no checkpoint is left"
    try:
        manifest, places = verify_checkpoint(newest[0]), Places(newest[0])
    except IngotError as error:
        return 0, f"the newest checkpoint is torn: {error.found}"
    # On disks of nodes, a file that is nowhere could be another node's; here is no other one.
    lost = [name for name, entry in manifest.files.items() if places.find(name, entry.sha256) is None]
    return manifest.step, f"the newest checkpoint is torn: no disk has {', '.join(lost)}" if lost else ""


def resumed_from(folder: RunFolder) -> int:
    """Return the step from which the last attempt continued."""
    return [event["from_step"] for event in read_events(folder.events, events.RUN_STARTED)][-1]


def refused_steps(folder: RunFolder) -> list[int]:
    """Return the steps whose checkpoints were refused, in order."""
    return [event["step"] for event in read_events(folder.events, events.CHECKPOINT_REFUSED)]
