"""What reading the training data asks of storage: bytes per second, and how many drives give them."""

import math
from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.schema.run import RunConfig
from ingot.units import format_bytes, format_count

# Ids that two bytes can tell apart (schema/tokens.py refuses more in uint16).
_UINT16_IDS = 65_536
# English text of a vocabulary of 32k to 128k: 3.5 to 4.5 bytes per token.
TEXT_BYTES_PER_TOKEN = 4.0
# ingot's order reads so many consecutive tokens at once (docs/design/order.md); loaders that pick single windows at
# random seek for each of them.
BLOCK_TOKENS = 1 << 19


@dataclass(frozen=True)
class Drive:
    """bytes_per_second: in order. seek_seconds: before each read."""

    bytes_per_second: float
    seek_seconds: float

    def rate(self, read_bytes: float) -> float:
        """Bytes/s in reads of that size."""
        return read_bytes / (self.seek_seconds + read_bytes / self.bytes_per_second)


# Data sheets of 2024: a 7,200 rpm disk at its inner half; a PCIe 4 NVMe drive at a cautious half of its 6-7 GB/s.
DRIVES = {"hdd": Drive(150e6, 0.010), "nvme": Drive(3e9, 0.0001)}


def token_bytes(vocab_size: int) -> int:
    """Of one token in a shard: 2 (uint16) where all ids fit, else 4 (uint32)."""
    return 2 if vocab_size <= _UINT16_IDS else 4


def text_bytes_per_second(tokens_per_second: float, bytes_per_token: float = TEXT_BYTES_PER_TOKEN) -> float:
    """Of raw text, where it is tokenised as it is read."""
    return tokens_per_second * bytes_per_token


def drives(bytes_per_second: float, kind: str, read_bytes: float = BLOCK_TOKENS * 2.0) -> int:
    """How many of DRIVES give that in reads of `read_bytes`."""
    return max(math.ceil(bytes_per_second / DRIVES[kind].rate(read_bytes)), 1)


@dataclass(frozen=True)
class Reading:
    """bytes_per_second: of all loaders together. drives: by kind. share: of what the storage gives, 0 where that is not
    known; above 1 it is what the run waits for."""

    tokens_per_second: float
    bytes_per_second: float
    drives: dict[str, int]
    share: float
    formula: str

    @property
    def is_limit(self) -> bool:
        return self.share > 1


def data_reading(run: RunConfig, step_seconds: float, storage_bytes_per_second: float = 0.0) -> Reading:
    """Every sample is read once: the ranks of a pipeline, of tensor and of context parallelism read the same ones,
    which the page cache of a node gives them."""
    if not 0 < step_seconds < math.inf or not 0 <= storage_bytes_per_second < math.inf:
        found = f"a step of {step_seconds} s, storage of {storage_bytes_per_second} bytes/s"
        raise ConfigError(found, rule="a step takes time, and storage is not negative")
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
    return Reading(speed, needed, needs, share, formula)
