"""Reports about the health of a machine, and the interface of what provides them."""

import os
import socket
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, get_args

Kind = Literal[
    "xid",  # an event of NVIDIA's driver; `code` is its number
    "ecc_corrected",  # single-bit errors of a memory, which it corrected
    "ecc_scrubbed",  # an error that cannot be corrected, found by the memory's own patrol before a program read it
    "ecc_uncorrected",  # an error that cannot be corrected, in data that a program read
    "row_remap_pending",  # a reset of the GPU would replace a row of its memory
    "row_remap_failure",  # no spare row is left
    "link_down",
    "link_up",
    "link_lost",  # one that does not come back
    "temperature",  # a device slows itself down because it is too hot
    "machine_check",
    "wrong_state",  # weights or optimizer state of a rank changed without an update, twice in the same steps
    "unfit",  # a check of the machines of a run found wrong results, or a much slower machine than the others
    "slow",  # a rank on it was slower than its peers for long (launch.on_straggler)
    "silent_source",  # a source of reports does not answer, or writes what cannot be read
]
KINDS: tuple[str, ...] = get_args(Kind)


class HealthVerdict(IntEnum):
    """The consequence of a report, from harmless to worst. DRAIN: the run saves, and goes on without the machine.
    DISCARD: the same, but memory has returned wrong data, so nothing that was computed since may be saved."""

    IGNORE = 0
    WARN = 1
    DRAIN = 2
    DISCARD = 3


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """A report of a provider. device: as the source names it; "" for the machine. code: the number of an XID, else 0.
    count: of the events since the report before. words: the line of the source. node: the name of the machine."""

    kind: Kind
    device: str = ""
    code: int = 0
    count: int = 1
    words: str = ""
    node: str = ""


class HealthProvider(Protocol):
    """A source of reports."""

    name: str

    def poll(self) -> list[HealthReport]:
        """Return the reports since the last call. Waits for nothing but a local file."""
        ...

    def close(self) -> None: ...


def node_name() -> str:
    """Return the name of this machine: that of its scheduler if it has one, because a virtual node of Slurm shares the
    host name of others."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
