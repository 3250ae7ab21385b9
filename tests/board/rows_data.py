"""A row of token shards that cannot be read for a while, never answer, or end the process that reads them."""

from ingot.drill.oracles import Verdicts
from ingot.errors import DataError
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import Row, judge_recovered, random_of

# A batch after this time is read by another thread, and a read that fails is tried again for half of it.
_SETTINGS = ("launch.data_seconds=2",)
_READS = 8  # of a rank in the first steps, at least


def rs26(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Let reads of rank 1 fail once, three times, and for ever; stall; and kill the rank that reads."""
    random = random_of("RS26", seed)
    for case, do, times in (("once", "eio", 1), ("thrice", "eio", 3), ("stall", "stall", 1), ("killed", "dieread", 1)):
        name, k = f"data-{case}-{seed}", random.randrange(1, _READS + 1)
        where = f"{case} at read {k}"
        ended = bench.train(name, *options(_SETTINGS), env=_fault(bench, name, do, k, times))
        verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
        folder = bench.folder(name)
        troubles = [(e["rank"], e["tries"]) for e in read_events(folder.events, events.DATA_TROUBLE)]
        faults = [(e["rank"], e["failure"]) for e in read_events(folder.events, events.FAULT)]
        expected = ([], [(1, "killed")]) if do == "dieread" else ([(1, times)], [])
        verdicts.judge("o6", where, "" if (troubles, faults) == expected else f"{troubles}, faults {faults}")
        judge_recovered(bench, verdicts, name, where, bench.reference())
    name = f"data-always-{seed}"
    ended = bench.train(name, *options(_SETTINGS), env=_fault(bench, name, "eio", 3, 0))
    named = "E-SHARD-READ" in ended.output and "Input/output error" in ended.output
    verdicts.judge("o6", "always", "" if named and ended.code == DataError.exit_code else ended.output[-300:])
    again = bench.train(name, *options(_SETTINGS))
    verdicts.judge("o6", "always, then repaired", "" if again.code == 0 else again.output[-300:])
    judge_recovered(bench, verdicts, name, "always, then repaired", bench.reference())


def _fault(bench: Bench, name: str, do: str, k: int, times: int) -> dict[str, str]:
    variables = {"WHO": "rank:1", "DO": do, "K": k, "TIMES": times, "BELOW": bench.root / "tokens"}
    return {f"BOARD_{key}": str(value) for key, value in (variables | {"LOG": bench.root / f"{name}.reads"}).items()}


ROWS = (Row("RS26", "reads of token shards fail, stall, or end with their process", rs26),)
