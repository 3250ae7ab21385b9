"""quarantine.json of a run folder: the tokens that training leaves out, oldest record first. Checkpoints have a copy.

The order of samples follows from this record, the run file and the token manifest (trainer/loader/quarantine.py), so a
run that continues has the order that it had. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ingot.errors import DataError
from ingot.schema.sealed import sealed, unsealed
from ingot.storage import write_json

_LEFT_OUT = "left_out"


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """The tokens begin..end-1 of a shard, which training leaves out from `step` on: the first step that would have used
    them.

    blocks_sha256: of the shard as it was built (schema/tokens.py); a shard with this name and another hash is another
    one. code: of the error that names the damage.
    """

    step: int
    shard: str
    blocks_sha256: str
    begin: int
    end: int
    code: str


def quarantined_of(values: Mapping[str, Any]) -> Quarantined:
    """Return the record whose JSON is `values`. Raises KeyError, TypeError or ValueError for other values."""
    return Quarantined(
        step=int(values["step"]),
        shard=str(values["shard"]),
        blocks_sha256=str(values["blocks_sha256"]),
        begin=int(values["begin"]),
        end=int(values["end"]),
        code=str(values["code"]),
    )


def continued(
    recorded: Sequence[Quarantined], saved: Sequence[Quarantined], saved_step: int
) -> tuple[Quarantined, ...]:
    """Return the records of a run that continues from a checkpoint of `saved_step`, which has the records `saved`.

    recorded: those of the run folder. One that the checkpoint lacks holds for later steps only: the checkpoint was
    trained without it.
    """
    others = (replace(one, step=max(one.step, saved_step + 1)) for one in recorded if one not in saved)
    return (*saved, *(one for one in others if one not in saved))


def read_quarantine(path: Path) -> tuple[Quarantined, ...]:
    """Return the records of the file `path`; none if there is no such file. Raises DataError if it cannot be read."""
    try:
        record = json.loads(path.read_bytes())
        # A list is of an earlier version of ingot.
        found = record if isinstance(record, list) else unsealed(record, {_LEFT_OUT})[_LEFT_OUT]
        return tuple(quarantined_of(values) for values in found)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "E-QUARANTINE-READ",
            f"{path} cannot be read ({error})",
            rule="this file records which tokens the run leaves out, and from which step on",
            fix="restore the file from a copy of the run folder, or delete it: then the record is that of the newest "
            "checkpoint",
            path=str(path),
        ) from None


def write_quarantine(path: Path, records: Sequence[Quarantined]) -> None:
    """Replace the file `path`."""
    write_json(path, sealed({_LEFT_OUT: [asdict(one) for one in records]}))
