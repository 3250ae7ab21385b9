"""Rows of wrong bits in the records of a run folder: what the guard did, left-out tokens, the lease, names on disks."""

from pathlib import Path

from ingot.drill.damage import flip
from ingot.drill.oracles import Verdicts
from ingot.errors import DataError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.guard_record import write_measures
from ingot.schema.quarantine_record import write_quarantine
from ingot.schema.run_folder import RunFolder

from .bench import Bench
from .row import Row, judge_recovered, random_of, resumed_from
from .rows_damage import three_places

_NEWEST = 8


def rs10_records(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Flip a bit at three places of each record. The run refuses the records that decide which data it trains on, and
    goes on without them when they are deleted; what a launcher or the names of the files can give again is rebuilt."""
    random = random_of("RS10 records", seed)
    base = bench.base(_NEWEST)
    for write, code in ((write_measures, "E-GUARD-READ"), (write_quarantine, "E-QUARANTINE-READ")):
        folder = bench.copy(base, "flipped")
        path = folder.guard if write is write_measures else folder.quarantine
        write(path, [])
        whole = path.read_bytes()
        for offset in three_places(random, 0, len(whole)):
            bit = random.randrange(8)
            path.write_bytes(whole)
            flip(path, offset, bit)
            where, ended = f"{path.name}: bit {bit} of byte {offset}", bench.attempt("flipped")
            refused = ended.code == DataError.exit_code and code in ended.output and path.name in ended.output
            verdicts.judge("o6", where, "" if refused else f"exit code {ended.code}: {ended.output[-300:]}")
        path.unlink()  # as the error proposes
        _judge_goes_on(bench, verdicts, f"{path.name} deleted")

    (record,) = (bench.folder(base).root / "lease").glob("epoch-*.json")
    for offset in three_places(random, 0, record.stat().st_size):
        folder, bit = bench.copy(base, "flipped"), random.randrange(8)
        flip(folder.root / "lease" / record.name, offset, bit)
        _judge_goes_on(bench, verdicts, f"{record.name}: bit {bit} of byte {offset}", named=record.name)

    disk = bench.root / "nvme"
    disk.mkdir(exist_ok=True)
    settings = (f'checkpoint.disks=["{disk}"]',)
    base = bench.base(_NEWEST, *settings)
    for offset in three_places(random, 0, (bench.folder(base).root / "disks.json").stat().st_size):
        folder, bit = bench.copy(base, "flipped"), random.randrange(8)
        flip(folder.root / "disks.json", offset, bit)
        where = f"disks.json: bit {bit} of byte {offset}"
        _judge_goes_on(bench, verdicts, where, *settings, named="disks.json")


def _judge_goes_on(bench: Bench, verdicts: Verdicts, where: str, *settings: str, named: str = "") -> None:
    """Continue the run: it has to start from the newest checkpoint, and to name the record that was damaged."""
    folder, ended = bench.folder("flipped"), bench.attempt("flipped", *settings)
    problem = "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}"
    if not problem and resumed_from(folder) != _NEWEST:
        problem = f"continued from step {resumed_from(folder)}"
    if not problem and named and not _names(folder, named, ended.output):
        problem = f"no line and event name {named}"
    verdicts.judge("o6", where, problem)
    judge_recovered(bench, verdicts, "flipped", where, bench.reference(ranks=1))


def _names(folder: RunFolder, name: str, output: str) -> bool:
    found = [Path(event["file"]).name for event in read_events(folder.events, events.RECORD_DAMAGED)]
    return found == [name] and name in output


ROWS = (Row("RS10 records", "one wrong bit in every record of the run folder, at 3 places each", rs10_records),)
