"""The faults that planted.py plants in the ranks of a copy: what the drill plans, and what was planted. No torch.

A folder beside that of the copy has both. The drill appends faults while the copy trains; rank 0 gives each a first
step, one after the other, so that no fault hides another one.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.storage import write_json

NEVER = 1 << 40  # as a first step: the fault does not come
FaultKind = Literal[
    "flip", "moment", "gradient", "nan", "rate", "still", "document", "slow", "hold", "wait", "leave", "abort"
]
BITS: frozenset[FaultKind] = frozenset({"flip", "moment", "gradient"})  # a wrong bit of one rank
UNTIL_REPAIRED: frozenset[FaultKind] = frozenset({"leave", "abort"})  # comes each time that its step is trained
LOUD: frozenset[FaultKind] = frozenset({*UNTIL_REPAIRED, "hold", "wait"})  # an attempt ends by it
OF_ONE_RANK: frozenset[FaultKind] = frozenset({*BITS, *LOUD, "slow"})
STAYS: frozenset[FaultKind] = frozenset({"still", "document"})  # comes each time that its steps are trained


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """A fault in a rank, from a first step on that rank 0 chooses.

    kind: "flip": a bit of a weight of `rank` flips, once per run: bit `bit` of an element of a piece, each counted
      around. "moment": the same of the optimizer's state of a piece. "gradient": of a gradient before it is reduced.
      "nan": a gradient is NaN in `steps` steps. "rate": the learning rate of a step is `factor` times `optim.lr`.
      "still": that of `steps` steps is 0, whenever they are trained. "document": a token that repeats itself is in
      place of the data of `steps` steps, whenever they are read. "slow": `rank` takes `seconds` longer in each of
      `steps` steps. After the update of a step, `rank`: "hold" holds its interpreter lock for ever, "wait" waits for
      ever, both once per run; "leave" leaves out a collective that the others call, "abort" ends by SIGABRT, both in
      each attempt until the drill has repaired it.
    once: "nan" and "rate" do not come again after the guard took a measure against them.
    earliest, latest: the first steps that it may have; it does not come at all after `latest`.
    """

    kind: FaultKind
    steps: int = 1
    rank: int = 0
    piece: int = 0
    element: int = 0
    bit: int = 0
    factor: float = 0.0
    seconds: float = 0.0
    once: bool = True
    earliest: int = 1
    latest: int = NEVER


class FaultPlan:
    """The planned faults of the copy with the run folder `run`, numbered from 0."""

    def __init__(self, run: Path):
        self.folder = folder_of(run)
        self._faults, self._starts = self.folder / "faults.jsonl", self.folder / "starts.jsonl"

    def add(self, fault: PlannedFault) -> int:
        """FaultPlan a fault. Returns its number."""
        number = len(self.faults())
        _append(self._faults, asdict(fault))
        return number

    def faults(self) -> list[PlannedFault]:
        """Return all faults that are planned so far."""
        return [PlannedFault(**values) for values in _lines(self._faults)]

    def start(self, number: int, step: int) -> None:
        """Record the first step of a fault."""
        _append(self._starts, {"number": number, "step": step})

    def starts(self) -> dict[int, int]:
        """Return number -> first step, of the faults that have one."""
        return {values["number"]: values["step"] for values in _lines(self._starts)}

    def record(self, number: int, **facts: Any) -> None:
        """Record that a fault is planted now, unless that is recorded already. facts: its step and place."""
        if self.planted(number) is None:
            write_json(self.folder / f"planted-{number}.json", facts)

    def repair(self, number: int) -> None:
        """Record that a fault comes no more."""
        write_json(self.folder / f"repaired-{number}.json", {})

    def is_repaired(self, number: int) -> bool:
        """Return whether a fault comes no more."""
        return (self.folder / f"repaired-{number}.json").exists()

    def planted(self, number: int) -> dict[str, Any] | None:
        """Return the facts of a fault that was planted; None if it was not."""
        try:
            return json.loads((self.folder / f"planted-{number}.json").read_bytes())
        except FileNotFoundError:
            return None


def folder_of(run: Path) -> Path:
    """Return the folder of the plan for the run folder `run`."""
    return run.with_name(f"{run.name}.planted")


def _append(file: Path, values: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{json.dumps(values)}\n".encode())  # at once: a rank may read now
    finally:
        os.close(descriptor)


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
