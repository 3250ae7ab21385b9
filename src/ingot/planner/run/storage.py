"""A run's use of storage: the rate at which training data is read, and the size and stall of checkpoints."""

import math
from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.schema.run import RunConfig
from ingot.theory.memory import Term
from ingot.units import format_bytes, format_count, format_seconds

# The number of ids that two bytes can distinguish (schema/tokens.py refuses more in uint16).
_UINT16_IDS = 65_536
# English text with a vocabulary of 32k to 128k ids: 3.5 to 4.5 bytes per token.
TEXT_BYTES_PER_TOKEN = 4.0
# Consecutive tokens per read in ingot's data order (docs/design/order.md). A loader that picks single windows at
# random seeks for each window.
BLOCK_TOKENS = 1 << 19
# A checkpoint has float32 master weights and two moments, but no gradients: 12 bytes per parameter (theory/memory.py,
# checkpoint_bytes); 14 with the 16-bit weights. Measured on other groups' runs: 12.9 to 13.1.
SAVED_STATE_BYTES = 12
SAVED_STATE_AND_WEIGHTS_BYTES = 14


@dataclass(frozen=True)
class Drive:
    """A kind of drive. bytes_per_second: of sequential reads. seek_seconds: the delay before each read."""

    bytes_per_second: float
    seek_seconds: float

    def rate(self, read_bytes: float) -> float:
        """Return bytes per second when each read has `read_bytes` bytes."""
        return read_bytes / (self.seek_seconds + read_bytes / self.bytes_per_second)


# Data sheets of 2024: a 7,200 rpm disk on its inner tracks; a PCIe 4 NVMe drive at half of its 6-7 GB/s.
DRIVES = {"hdd": Drive(150e6, 0.010), "nvme": Drive(3e9, 0.0001)}


def token_bytes(vocab_size: int) -> int:
    """Return the bytes of one token in a shard: 2 (uint16) if all ids fit, else 4 (uint32)."""
    return 2 if vocab_size <= _UINT16_IDS else 4


def text_bytes_per_second(tokens_per_second: float, bytes_per_token: float = TEXT_BYTES_PER_TOKEN) -> float:
    """Return the bytes of raw text per second that a loader reads if it tokenizes while it reads."""
    return tokens_per_second * bytes_per_token


def drives(bytes_per_second: float, kind: str, read_bytes: float = BLOCK_TOKENS * 2.0) -> int:
    """Return the number of drives of a kind of DRIVES that deliver this rate in reads of `read_bytes`."""
    return max(math.ceil(bytes_per_second / DRIVES[kind].rate(read_bytes)), 1)


@dataclass(frozen=True)
class DataReading:
    """The load that reading the training data puts on storage.

    bytes_per_second: of all loaders together. drives: number of drives that deliver this rate, by kind. share: of the
    storage's rate, 0 if that is not known; above 1 the run waits for storage.
    """

    tokens_per_second: float
    bytes_per_second: float
    drives: dict[str, int]
    share: float
    formula: str

    @property
    def is_limit(self) -> bool:
        return self.share > 1


def data_reading(run: RunConfig, step_seconds: float, storage_bytes_per_second: float = 0.0) -> DataReading:
    """Return how fast the run reads its data. Raises ConfigError for impossible times and rates.

    Each sample counts once: ranks of one pipeline, tensor or context group read the same sample, which the page cache
    of their node serves.
    """
    if not 0 < step_seconds < math.inf or not 0 <= storage_bytes_per_second < math.inf:
        raise ConfigError(
            "E-STORAGE-VALUE",
            f"a step of {step_seconds} s, storage of {storage_bytes_per_second} bytes/s",
            rule="a step takes more than 0 s, and the rate of storage is not negative",
            fix="give --assume storage_read_bytes_per_second=RATE with a rate of at least 0",
            step_seconds=step_seconds,
            storage_bytes_per_second=storage_bytes_per_second,
        )
    width, speed = token_bytes(run.model.vocab_size), run.tokens_per_step / step_seconds
    needed = speed * width
    kind = f"uint{8 * width}, {format_count(run.model.vocab_size)} ids"
    formula = f"{format_count(speed)} tokens/s x {width} B ({kind}) = {format_bytes(needed)}/s"
    needs = {name: drives(needed, name, BLOCK_TOKENS * width) for name in DRIVES}
    formula += "; " + " or ".join(f"{count:,} x {name}" for name, count in needs.items())
    share = needed / storage_bytes_per_second if storage_bytes_per_second else 0.0
    if share:
        waits = ": steps wait for storage" if share > 1 else ""
        formula += f"; {share:.1%} of {format_bytes(storage_bytes_per_second)}/s{waits}"
    return DataReading(speed, needed, needs, share, formula)


def blocking_stall(size_bytes: float, nodes: int, node_write: float, storage_write: float = 0.0) -> Term:
    """Return the seconds in which all nodes write their equal parts of a checkpoint and no step runs.

    node_write: bytes/s from one node to storage. storage_write: bytes/s of the whole storage, 0 for no limit.
    """
    together = min(nodes * node_write, storage_write or math.inf)
    of = f"{nodes:,} nodes x {format_bytes(node_write)}/s"
    if storage_write and storage_write < nodes * node_write:
        of = f"the storage's {format_bytes(storage_write)}/s"
    seconds = size_bytes / together
    return Term(seconds, f"{format_bytes(size_bytes)} / {of} = {format_seconds(seconds)}")


def copy_stall(size_bytes: float, devices: int, host_bandwidth: float) -> Term:
    """Return the seconds until every device has copied its part of a checkpoint to the host's memory.

    The host writes this copy to storage while steps continue. host_bandwidth: bytes/s of one device.
    """
    seconds = size_bytes / (devices * host_bandwidth)
    of = f"{devices:,} devices x {format_bytes(host_bandwidth)}/s to the host"
    return Term(seconds, f"{format_bytes(size_bytes)} / {of} = {format_seconds(seconds)}")


def kept_bytes(size_bytes: float, interval_seconds: float, step_seconds: float, keep: int = 0) -> float:
    """Return the bytes of all checkpoints in storage at the end of a run.

    interval_seconds: between two checkpoints. step_seconds: of all steps together. keep: the number of newest
    checkpoints that a run keeps, 0 for all.
    """
    written = math.ceil(step_seconds / interval_seconds)
    return size_bytes * (min(written, keep) if keep else written)
