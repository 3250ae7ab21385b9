"""Checkpoints of a run: how large they are, how long they stop it, how many are kept.

Gradients are not saved. What is: float32 master and two moments, 12 bytes per parameter (ingot's: theory/memory.py
checkpoint_bytes); with the 16-bit weights 14. Measured on others' runs: 12.9 to 13.1.
"""

import math

from ingot.theory.term import Term
from ingot.units import format_bytes, format_seconds

SAVED_STATE_BYTES = 12
SAVED_STATE_AND_WEIGHTS_BYTES = 14


def blocking_stall(size_bytes: float, nodes: int, node_write: float, storage_write: float = 0.0) -> Term:
    """Seconds in which all nodes write their equal parts and no step runs.

    node_write: bytes/s of one node to storage. storage_write: of the storage in all, 0: no limit.
    """
    together = min(nodes * node_write, storage_write or math.inf)
    of = f"{nodes:,} nodes x {format_bytes(node_write)}/s"
    if storage_write and storage_write < nodes * node_write:
        of = f"the storage's {format_bytes(storage_write)}/s"
    seconds = size_bytes / together
    return Term(seconds, f"{format_bytes(size_bytes)} / {of} = {format_seconds(seconds)}")


def copy_stall(size_bytes: float, devices: int, host_bandwidth: float) -> Term:
    """Seconds until every device has its part in the host's memory, from where it is written while steps go on."""
    seconds = size_bytes / (devices * host_bandwidth)
    of = f"{devices:,} devices x {format_bytes(host_bandwidth)}/s to the host"
    return Term(seconds, f"{format_bytes(size_bytes)} / {of} = {format_seconds(seconds)}")


def kept_bytes(size_bytes: float, interval_seconds: float, step_seconds: float, keep: int = 0) -> float:
    """In storage at the end. interval_seconds, step_seconds: of steps, between two and in all. keep: the newest so many
    stay; 0: all, which is what a retention rule is there against."""
    written = math.ceil(step_seconds / interval_seconds)
    return size_bytes * (min(written, keep) if keep else written)
