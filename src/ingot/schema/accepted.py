"""accepted-changes.json of a run folder: the changes of settings or data that its user accepted, oldest first."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.errors import DataError
from ingot.storage import write_json


@dataclass(frozen=True, kw_only=True)
class AcceptedChanges:
    """Changes that were accepted together, and hold for the steps after `step`.

    step: the checkpoint from which the run continues with them. config_sha256, data_fingerprint: of the run file and
    the tokens after the changes. changes: setting -> (value before, value after).
    """

    step: int
    config_sha256: str
    data_fingerprint: str
    changes: dict[str, tuple[Any, Any]]


def read_accepted(path: Path) -> list[AcceptedChanges]:
    """Return the records of the file `path`; none if there is no such file. Raises DataError if it cannot be read."""
    try:
        return [_record(values) for values in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "E-RUN-CHANGES-READ",
            f"{path} cannot be read ({error})",
            rule="this file records the settings and the tokens that the steps of the run were trained with",
            fix="restore the file from a copy of the run folder",
            path=str(path),
        ) from None


def records_for(own: Sequence[AcceptedChanges] | None, step: int, path: Path) -> list[AcceptedChanges]:
    """Return the records that hold for a checkpoint of step `step`: its `own`, and later ones of the file `path`.

    The file alone is not enough: it is that of the steps the run trained last, and a run that had to continue from an
    older checkpoint dropped records of later steps. own: None in checkpoints of earlier versions of ingot, which have
    the file only. Raises DataError like `read_accepted`.
    """
    recorded = read_accepted(path)
    return recorded if own is None else [*own, *(one for one in recorded if one.step >= step)]


def rate_to_try(path: Path, lr: float) -> float:
    """Return the learning rate to continue with in place of optim.lr = `lr`, which is too high: that before the
    accepted change to it in the file `path`, else a tenth of it, rounded to four digits."""
    with suppress(DataError):
        for one in reversed(read_accepted(path)):
            before, after = one.changes.get("optim.lr", (None, None))
            is_rate = isinstance(before, int | float)  # a checkpoint may lack the setting
            if after == lr and is_rate and before < lr:
                return before
    return float(f"{lr / 10:.4g}")


def command_with_rate(run: Path, rate: float) -> str:
    """Return the command that continues the run folder `run` with the learning rate `rate`, in all its digits: a
    rounded one would not be the rate before a change, so it would be another change to accept."""
    return f"ingot train {run} --set optim.lr={rate!r} --accept-change optim.lr"


def _record(values: dict) -> AcceptedChanges:
    changes = {key: (before, after) for key, (before, after) in values["changes"].items()}
    return AcceptedChanges(
        step=int(values["step"]),
        config_sha256=values.get("config_sha256", ""),
        data_fingerprint=values.get("data_fingerprint", ""),
        changes=changes,
    )


def write_accepted(path: Path, records: list[AcceptedChanges]) -> None:
    """Replace the file `path`."""
    write_json(path, [asdict(record) for record in records])
