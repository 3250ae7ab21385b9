"""A run's use of storage: the rate at which training data is read, and the size and stall of checkpoints."""

import math
from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.schema.checkpoint import FULL, SaveKind
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.layout import positions
from ingot.theory.memory import Term, saved, saved_weights, snapshots
from ingot.units import format_bytes, format_count, format_seconds

# The number of ids that two bytes can distinguish (schema/tokens.py refuses more in uint16).
_UINT16_IDS = 65_536
# English text with a vocabulary of 32k to 128k ids: 3.5 to 4.5 bytes per token.
TEXT_BYTES_PER_TOKEN = 4.0
# The number of consecutive tokens that one read gets in ingot's data order (docs/design/order.md). A loader that picks
# single windows at random has a seek for each window.
BLOCK_TOKENS = 1 << 19
# A checkpoint has float32 master weights and two float32 moments, but no gradients: 12 bytes per parameter
# (theory/memory.py, checkpoint_bytes), or 14 with the 16-bit weights. In published runs of others: 12.9 to 13.1.
SAVED_STATE_BYTES = 12
SAVED_STATE_AND_WEIGHTS_BYTES = 14


@dataclass(frozen=True)
class Drive:
    """A kind of drive. bytes_per_second: rate of sequential reads. seek_seconds: delay before each read."""

    bytes_per_second: float
    seek_seconds: float

    def rate(self, read_bytes: float) -> float:
        """Return the bytes per second of reads of `read_bytes` bytes each."""
        return read_bytes / (self.seek_seconds + read_bytes / self.bytes_per_second)


# Data sheets of 2024: a 7,200 rpm hard disk at its inner tracks; a PCIe 4 NVMe drive at half of its 6-7 GB/s.
DRIVES = {"hdd": Drive(150e6, 0.010), "nvme": Drive(3e9, 0.0001)}


def token_bytes(vocab_size: int) -> int:
    """Return the bytes of one token in a shard: 2 (uint16) if all ids of the vocabulary fit, otherwise 4 (uint32)."""
    return 2 if vocab_size <= _UINT16_IDS else 4


def text_bytes_per_second(tokens_per_second: float, bytes_per_token: float = TEXT_BYTES_PER_TOKEN) -> float:
    """Return the bytes of raw text per second that a loader must read if it tokenizes during training."""
    return tokens_per_second * bytes_per_token


def drives(bytes_per_second: float, kind: str, read_bytes: float = BLOCK_TOKENS * 2.0) -> int:
    """Return the number of drives that together deliver `bytes_per_second` in reads of `read_bytes` bytes. kind: a key
    of DRIVES."""
    return max(math.ceil(bytes_per_second / DRIVES[kind].rate(read_bytes)), 1)


@dataclass(frozen=True)
class DataReading:
    """The load on storage from reading the training data.

    bytes_per_second: rate of all loaders together. drives: number of drives that deliver this rate, by kind. share: the
    rate divided by the storage's read rate, 0 if that is unknown; if it is above 1, the run waits for storage.
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
    """Return the rate at which a run reads its data, and the drives that deliver it. Raises ConfigError for impossible
    times and rates.

    Each sample counts once, even if all ranks of a pipeline, tensor or context group read it, because repeated reads
    are served from the page cache of the node.
    """
    if not 0 < step_seconds < math.inf or not 0 <= storage_bytes_per_second < math.inf:
        raise ConfigError(
            "E-STORAGE-VALUE",
            f"a step of {step_seconds} s, storage of {storage_bytes_per_second} bytes/s",
            rule="a step takes more than 0 s, and the read rate of storage is not negative",
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
    """Return the seconds in which all nodes write equal parts of a checkpoint while no step runs.

    node_write: bytes/s from one node to storage. storage_write: bytes/s that the whole storage accepts, 0 for no limit.
    """
    together = min(nodes * node_write, storage_write or math.inf)
    of = f"{nodes:,} nodes x {format_bytes(node_write)}/s"
    if storage_write and storage_write < nodes * node_write:
        of = f"the storage's {format_bytes(storage_write)}/s"
    seconds = size_bytes / together
    return Term(seconds, f"{format_bytes(size_bytes)} / {of} = {format_seconds(seconds)}")


def node_snapshot(run: RunConfig, cluster: Cluster) -> Term:
    """Return the bytes of host memory that the fullest node needs for saves in the background: copies of what each of
    its ranks saves (trainer/checkpoint/snapshot.py), and of what ranks of other nodes save (checkpoint.replicas). They
    stay allocated between saves.
    """
    ranks = ranks_of_node(run, cluster)
    own = max(
        (snapshots(position, weights_apart=run.checkpoint.weights_apart) for position in positions(run)),
        key=lambda term: term.value,
    )
    others = min(run.checkpoint.replicas, -(-run.parallel.world_size // ranks) - 1)
    kept, copy = "", rank_snapshot(run).value
    if others:
        kept = f"; and {others} x {ranks} x {format_bytes(copy)} of other nodes"
    formula = f"{ranks} ranks of a node x {format_bytes(own.value)} ({own.formula}){kept}"
    return Term(ranks * (own.value + others * copy), formula)


def rank_snapshot(run: RunConfig, kind: SaveKind = FULL) -> Term:
    """Return the bytes that the fullest rank copies before steps continue."""
    of_rank = saved if kind == FULL else saved_weights
    return max((of_rank(position) for position in positions(run)), key=lambda term: term.value)


def ranks_of_node(run: RunConfig, cluster: Cluster) -> int:
    """Return the largest number of ranks of a run on one node."""
    if cluster.device == "cpu":
        return -(-run.parallel.world_size // cluster.nodes)
    return min(cluster.devices_per_node, run.parallel.world_size)


def copy_stall(size_bytes: float, devices: int, host_bandwidth: float) -> Term:
    """Return the seconds in which all devices copy equal parts of a checkpoint to host memory. The host writes this
    copy to storage while steps continue.

    host_bandwidth: bytes/s from one device to its host.
    """
    seconds = size_bytes / (devices * host_bandwidth)
    of = f"{devices:,} devices x {format_bytes(host_bandwidth)}/s to the host"
    return Term(seconds, f"{format_bytes(size_bytes)} / {of} = {format_seconds(seconds)}")


def kept_bytes(size_bytes: float, interval_seconds: float, step_seconds: float, keep: int = 0) -> float:
    """Return the bytes of all checkpoints in storage at the end of a run.

    interval_seconds: time of steps between two checkpoints. step_seconds: time of all steps together. keep: number of
    newest checkpoints that the run keeps, 0 for all.
    """
    written = math.ceil(step_seconds / interval_seconds)
    return size_bytes * (min(written, keep) if keep else written)
