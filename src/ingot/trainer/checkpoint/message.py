"""The bytes that ranks send each other about checkpoints: a value or an error, and a manifest. No torch, no pickle.

A message begins with "+" and a value, or with "-" and an error as JSON. A reader builds errors of known classes and
plain values: a hostile peer can send wrong values, but cannot choose the code that runs.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from ingot import errors
from ingot.errors import IngotError
from ingot.schema.accepted import AcceptedChanges
from ingot.schema.checkpoint import BlockLayout, CheckpointManifest, FileEntry, Health, TensorEntry, segments_of
from ingot.schema.guard_record import guard_state
from ingot.schema.quarantine_record import quarantined_of

T = TypeVar("T")
_VALUE, _ERROR = b"+", b"-"


class RankError(RuntimeError):
    """An error of another rank that is not an IngotError: its rank, class and message."""


def pack_json(value: Any) -> bytes:
    """Return `value`, of which dataclasses become dicts, as compact JSON. Raises ValueError or TypeError for a value
    without a JSON form."""
    return json.dumps(value, separators=(",", ":"), default=vars).encode("utf-8", "surrogatepass")


def unpack_json(data: bytes) -> Any:
    """Return the value that `pack_json` made into `data`; tuples come back as lists."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def as_value(data: bytes) -> bytes:
    """Return the message of a packed value."""
    return _VALUE + data


def as_error(error: Exception) -> bytes:
    """Return the message of an error: of an IngotError its class, code, text and facts, of others class and text."""
    if isinstance(error, IngotError):
        kind = next(k.__name__ for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k)
        parts = {"code": error.code, "found": error.found, "rule": error.rule, "fix": error.fix, "facts": error.facts}
        try:
            text = json.dumps({"kind": kind} | parts, default=str)
        except (TypeError, ValueError):  # facts without a JSON form: the other ranks wait for the error, not for those
            text = json.dumps({"kind": kind} | parts | {"facts": {"facts": repr(error.facts)}}, default=str)
        return _ERROR + text.encode("utf-8", "surrogatepass")
    if isinstance(error, OSError):
        parts = {"kind": "OSError", "found": str(error), "errno": error.errno, "strerror": error.strerror}
        return _ERROR + json.dumps(parts | {"filename": error.filename}, default=str).encode("utf-8", "surrogatepass")
    kind = "ValueError" if isinstance(error, ValueError) else "RankError"
    return _ERROR + json.dumps({"kind": kind, "found": str(error)}).encode("utf-8", "surrogatepass")


def read_message(message: bytes, unpack: Callable[[bytes], T]) -> T:
    """Return the value of a message, or raise its error. Raises RankError for bytes that are not a message."""
    try:
        if message[:1] == _VALUE:
            return unpack(message[1:])
        if message[:1] != _ERROR:
            raise ValueError("it is neither a value nor an error")
        error = _error_of(unpack_json(message[1:]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as problem:
        raise RankError(f"a rank sent a message that cannot be read: {problem}") from None
    raise error


def _error_of(parts: dict[str, Any]) -> Exception:
    kind, found = getattr(errors, str(parts["kind"]), None), str(parts["found"])
    if isinstance(kind, type) and issubclass(kind, IngotError):
        facts = {str(k): v for k, v in parts["facts"].items() if k not in ("rule", "fix")}
        return kind(str(parts["code"]), found, rule=str(parts["rule"]), fix=str(parts["fix"]), **facts)
    if parts["kind"] == "OSError":
        if parts["errno"] is None:
            return OSError(found)
        return OSError(int(parts["errno"]), str(parts["strerror"]), *([parts["filename"]] if parts["filename"] else []))
    return ValueError(found) if parts["kind"] == "ValueError" else RankError(found)


def unpack_manifest(data: bytes) -> CheckpointManifest:
    """Return the manifest that `pack_json` made into `data`. Its sender has checked the rules (rules.py)."""
    values = unpack_json(data)
    cuts = (
        BlockLayout(
            ranks=tuple(cut["ranks"]), offsets=tuple(map(tuple, cut["offsets"])), sizes=tuple(map(tuple, cut["sizes"]))
        )
        for cut in values["cuts"]
    )
    tensors = {name: TensorEntry(**one | {"shape": tuple(one["shape"])}) for name, one in values["tensors"].items()}
    return CheckpointManifest(
        **values
        | {
            "health": Health(**values["health"]),
            "files": {name: FileEntry(**one) for name, one in values["files"].items()},
            "cuts": tuple(cuts),
            "tensors": tensors,
            "rng": tuple(values["rng"]),
            "ledger": segments_of(values["ledger"]),
            "guard": guard_state(values["guard"]),
            "quarantine": tuple(map(quarantined_of, values["quarantine"])),
            "accepted": None if values["accepted"] is None else tuple(map(_accepted, values["accepted"])),
        }
    )


def _accepted(values: dict[str, Any]) -> AcceptedChanges:
    changes: dict[str, Any] = {key: tuple(pair) for key, pair in values["changes"].items()}
    return AcceptedChanges(
        step=values["step"],
        config_sha256=values["config_sha256"],
        data_fingerprint=values["data_fingerprint"],
        changes=changes,
    )
