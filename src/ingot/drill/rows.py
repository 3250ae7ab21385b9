"""The rows of the board of reliability (docs/reliability.md) that no drill plays on a user's run, and the choice of the
faults of the others. No torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.drill.fault import DrillFault
from ingot.drill.faults import FAULTS, faults_of
from ingot.errors import UsageError


@dataclass(frozen=True)
class BoardRow:
    """A row of the board that a drill does not play. injects: its fault, for people. why: the reason."""

    id: str
    injects: str
    why: str

    @property
    def way_out(self) -> str:
        """The command that plays it."""
        return _SOAK if self.id == "RS34" else on_the_board(self.id)


def on_the_board(*rows: str) -> str:
    """Return the command that plays rows of the board on its own run."""
    names = ",".join(rows)
    return f"python -m tests.board --rows {json.dumps(names) if ' ' in names else names} --seeds 1, in a clone of ingot"


_SOAK = "ingot drill RUN --soak 10min --every 10s"
_CALLS = "a compiled library has to stop the ranks at a call to the system"
_MACHINES = "it needs spare machines or links that fail, and a copy has all its ranks on this one"
_STORE = "copies upload to no store; it needs a server whose answers fail"
_BUILD = "it breaks a data build, not a training run"
_DECISION = "it judges a decision, and no recovery that can be compared bit for bit"
_CHANGED = "other settings are what it tests, and a copy with them has no undisturbed run with the same bits"

NOT_PLAYED: tuple[BoardRow, ...] = (
    BoardRow("RD1", "SIGKILL of processes of a data build", _BUILD),
    BoardRow("RD2", "a data build of hostile WARC, HTML and JSON", _BUILD),
    BoardRow("RD3", "a data build with other numbers of workers", _BUILD),
    BoardRow(
        "RS01 phases",
        "SIGKILL of a rank in each phase of a step",
        "nothing outside of a rank sees its phase; RS01 kills one at a random time within a step",
    ),
    BoardRow("RS04 phases", "all ranks hang at the start, in a save, in an evaluation", "it needs a start of its own"),
    BoardRow("RS07", "SIGKILL of all processes, and loss of the disk", _STORE),
    BoardRow("RS07 models", "a lost node: experts, latent attention, offload", "it needs models of several kinds"),
    BoardRow("RS07 partial", "a lost node; the ranks of the other one keep their processes", _MACHINES),
    BoardRow("RS07 shrink", "a lost node: the run goes on with fewer", _MACHINES),
    BoardRow("RS07 spare", "a lost or frozen node, with a spare and without", _MACHINES),
    BoardRow("RS09", "SIGKILL or loss of power at every call of a save", _CALLS),
    BoardRow("RS09 disks", "SIGKILL or loss of power in a save of two ranks, each with its disk", _CALLS),
    BoardRow("RS09 memory", "SIGKILL or loss of power in a save that memory has as well", _CALLS),
    BoardRow("RS09 weights", "SIGKILL or loss of power in a save of the weights alone", _CALLS),
    BoardRow("RS10 records", "a wrong bit in a record of the run folder", "a copy without trouble has few records"),
    BoardRow("RS12", "a disk that is full, fails or is read-only", _CALLS),
    BoardRow("RS13", "an object store that refuses, fails or is silent", _STORE),
    BoardRow("RS13 killed", "SIGKILL at every request to the store", _STORE),
    BoardRow("RS14", "a save that takes 5 times the interval", _CALLS),
    BoardRow("RS16", "none: how long training waits for a save", "it has no fault, and measures on a quiet machine"),
    BoardRow("RS17", "continued on other numbers of ranks", _CHANGED),
    BoardRow("RS18", "continued with other layouts", _CHANGED),
    BoardRow("RS19 persistent", "a wrong bit in a weight, again and again", _DECISION),
    BoardRow("RS22 ladder", "gradients that are not finite, for ever; all measures", _DECISION),
    BoardRow("RS26", "reads of token shards fail or stall", _CALLS),
    BoardRow("RS27", "out of memory on one rank", "how much memory is too little is measured on a model that it knows"),
    BoardRow("RS27 kernel", "the kernel kills a rank for lack of memory", "it needs root, to limit the memory"),
    BoardRow("RS29", "edits of settings between two commands", _DECISION),
    BoardRow("RS30 store", "a suspended job goes on after another took over its store", "copies upload to no store"),
    BoardRow("RS30 zombie", "a suspended job goes on after another took over", _CALLS),
    BoardRow("RS31 leader", "the leader of several nodes is killed", _MACHINES),
    BoardRow("RS31 links", "nodes that are cut off; links that lose packets", _MACHINES),
    BoardRow("RS31 mount", "the mount of the run folder fails", "it needs root, for a mount of its own"),
    BoardRow("RS31 sinks", "sinks hang, die or have a full disk", "it needs sinks that fail"),
    BoardRow("RS31 store", "the store is killed while a run uploads", _STORE),
    BoardRow("RS32", "the clock jumps by an hour", "a compiled library has to change the clock of the processes"),
    BoardRow("RS34", "random faults for a long time", "it is no single fault, but a soak"),
    BoardRow("RS35 drain", "a slow node, which leaves or is only reported", _MACHINES),
)


def chosen_faults(rows: Sequence[str] = (), *, smoke: bool = False) -> list[DrillFault]:
    """Return the faults of these rows of the board, or of the short drill, or all.

    rows: each is the whole id of a fault; with "+" after it, the variants of the row come too, as they do for a row
    that has nothing else here. Raises UsageError for a row that the board does not have, or that no drill plays.
    """
    asked = {row: _asked(row) for row in rows}
    if rows:
        return list(dict.fromkeys(fault for faults in asked.values() for fault in faults))
    return [fault for fault in FAULTS if fault.smoke or not smoke]


def _asked(row: str) -> list[DrillFault]:
    name = row.removesuffix("+")
    faults = faults_of(name) if row != name else [fault for fault in FAULTS if fault.id == row] or faults_of(row)
    if faults:
        return faults
    others = [one for one in NOT_PLAYED if one.id == name] or [one for one in NOT_PLAYED if one.id.split()[0] == name]
    if not others:
        known = ", ".join(dict.fromkeys(fault.id.split()[0] for fault in FAULTS))
        raise UsageError(
            "E-DRILL-ROW",
            f"--rows {row}: no such row",
            rule=f"the rows that work on any run are {known}",
            fix="`ingot drill --list` shows them, and those that run in a clone of ingot alone",
            row=row,
        )
    raise UsageError(
        "E-DRILL-NOT-HERE",
        f"--rows {row} cannot be played on a copy of a run: {'; '.join(dict.fromkeys(one.why for one in others))}",
        rule=f"the row of the board is: {'; '.join(one.injects for one in others)}",
        fix=others[0].way_out if len(others) == 1 else on_the_board(*(one.id for one in others)),
        row=row,
        rows=[one.id for one in others],
    )
