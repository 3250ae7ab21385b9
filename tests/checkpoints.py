"""Checkpoints without a training: the smallest that fulfil every rule, and the ledgers that real ones need."""

from typing import Any

import numpy as np

from ingot.schema.checkpoint import WEIGHTS, CheckpointManifest, FileEntry, LedgerSegment, file_of
from ingot.schema.run_folder import RunFolder
from ingot.storage import sha256_bytes, write_atomic
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.manifest import write_manifest
from ingot.trainer.loader.ledger import write_segment

NO_TENSORS = (8).to_bytes(8, "little") + b"{}      "  # a safetensors file


def ledger_of(folder: RunFolder, step: int, batch: int = 1) -> tuple[LedgerSegment, ...]:
    """Write and return one segment that covers the steps 1 to `step`, with the samples 0, 1, ..."""
    return (write_segment(folder.ledger, 1, step, np.arange(step * batch).reshape(step, batch)),)


def model_settings(folder: RunFolder) -> dict[str, Any]:
    """Return the settings of the model in the run file, which checkpoints have that a command fetches."""
    settings = recorded_run(folder.config).settings()
    return {key: value for key, value in settings.items() if key.startswith("model.")}


def write_checkpoint(folder: RunFolder, step: int, settings: dict[str, Any] | None = None, **fields: Any) -> None:
    """Write a checkpoint of one rank without tensors, with a ledger and tokens that fit `settings`."""
    settings = settings or {}
    batch, seq_len = settings.get("train.global_batch", 1), settings.get("train.seq_len", 1)
    path = folder.checkpoint(step)
    write_atomic(path / file_of(0), NO_TENSORS)
    own = {
        "tokens": step * batch * seq_len,
        "config_sha256": "",
        "data_fingerprint": "",
        "layout": {"dp_shard": 1},
        "files": {file_of(0): FileEntry(bytes=len(NO_TENSORS), sha256=sha256_bytes(NO_TENSORS))},
        "tensors": {},
    }
    ledger = fields.pop("ledger") if "ledger" in fields else ledger_of(folder, step, batch)
    write_manifest(path, CheckpointManifest(step=step, settings=settings, ledger=ledger, **own | fields))


def write_weights(folder: RunFolder, step: int, settings: dict[str, Any] | None = None, **fields: Any) -> None:
    """Write a save of the weights alone, as `write_checkpoint` writes a checkpoint."""
    write_checkpoint(folder.weights, step, settings, kind=WEIGHTS, ledger=(), **fields)
