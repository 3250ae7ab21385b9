"""JSON records with a hash of their own content, so that a changed bit is never taken for another record."""

from collections.abc import Mapping
from typing import Any

from ingot.storage import canonical_json, sha256_bytes

HASH = "sha256"


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with their hash under the key "sha256"."""
    return {**values, HASH: _hash(values)}


def unsealed(record: Any, keys: set[str]) -> dict[str, Any]:
    """Return the values of a record of `sealed`. Raises ValueError unless it has exactly `keys` and their hash."""
    if not isinstance(record, dict) or record.keys() != {*keys, HASH}:
        raise ValueError(f"it is not an object with {', '.join(sorted({*keys, HASH}))}")
    values = {key: value for key, value in record.items() if key != HASH}
    if record[HASH] != _hash(values):
        raise ValueError("its content does not match its own hash")
    return values


def _hash(values: Mapping[str, Any]) -> str:
    return sha256_bytes(canonical_json(values).encode("utf-8", "surrogatepass"))
