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
# Bytes/s of one drive, read in order: data sheets of 2024, a 7,200 rpm disk at its inner half, a PCIe 4 NVMe drive at a
# cautious half of its 6-7 GB/s.
DRIVES = {"hdd": 150e6, "nvme": 3e9}


def token_bytes(vocab_size: int) -> int:
    """Of one token in a shard: 2 (uint16) where all ids fit, else 4 (uint32)."""
    return 2 if vocab_size <= _UINT16_IDS else 4


def text_bytes_per_second(tokens_per_second: float, bytes_per_token: float = TEXT_BYTES_PER_TOKEN) -> float:
    """Of raw text, where it is tokenised as it is read."""
    return tokens_per_second * bytes_per_token


def drives(bytes_per_second: float, kind: str) -> int:
    """How many of DRIVES give that, each reading in order."""
    return max(math.ceil(bytes_per_second / DRIVES[kind]), 1)


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
    which the page cache of a node gives them. Windows are read in a shuffled order, but whole: a sequence of 4,096
    tokens is 8-16 kB, and disks that seek for each give a few hundred a second instead of 150 MB/s."""
    if not 0 < step_seconds < math.inf or not 0 <= storage_bytes_per_second < math.inf:
        found = f"a step of {step_seconds} s, storage of {storage_bytes_per_second} bytes/s"
        raise ConfigError(found, rule="a step takes time, and storage is not negative")
    width, speed = token_bytes(run.model.vocab_size), run.tokens_per_step / step_seconds
    needed = speed * width
    kind = f"uint{8 * width}, {format_count(run.model.vocab_size)} ids"
    formula = f"{format_count(speed)} tokens/s x {width} B ({kind}) = {format_bytes(needed)}/s"
    share = needed / storage_bytes_per_second if storage_bytes_per_second else 0.0
    if share:
        formula += f", {share:.1%} of {format_bytes(storage_bytes_per_second)}/s"
    return Reading(speed, needed, {name: drives(needed, name) for name in DRIVES}, share, formula)
