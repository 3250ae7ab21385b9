"""Health reports from the kernel's log: XIDs of NVIDIA's driver, memory errors (EDAC), links of network cards."""

import contextlib
import os
import re
from pathlib import Path

from ingot.machine.health.report import HealthReport, Kind, node_name

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # the longest one that the kernel hands out
_MOST_RECORDS = 10_000  # of one call
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<code>\d+)\b,? *(?P<words>.*)")
_EDAC = re.compile(
    r"EDAC (?P<controller>MC\d+): (?P<count>\d+) (?P<which>CE|UE) (?P<how>.*?) on (?P<place>[^(]+?) *(\(|$)"
)
_LINK = re.compile(
    r"\S+ (?P<pci>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)(?P<name> \S+)?: "
    r"(?P<port>Port: \d+ )?(?:NIC )?Link (?:is )?(?P<state>down|up|active)\b",
    re.I,
)
_POISON = re.compile(r"Memory failure: (?P<page>0x[0-9a-f]+): .*hardware memory corruption")
_MACHINE_CHECK = "[Hardware Error]: Machine check events logged"


class KernelLog:
    """The messages that the kernel writes from now on, to /dev/kmsg. Raises OSError if this user may not read it.

    path: another file of the same form.
    """

    name = "kernel log"

    def __init__(self, path: Path = KERNEL_LOG):
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)

    def poll(self) -> list[HealthReport]:
        """Return the reports since the last call."""
        reports = []
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # the oldest ones were overwritten before they were read: the next call has the rest
            except BlockingIOError:
                break
            if not record:
                break
            _, _, message = record.decode(errors="replace").partition(";")
            if report := read_message(message.partition("\n")[0]):
                reports.append(report)
        return reports

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def read_message(message: str) -> HealthReport | None:
    """Return the report that a message of the kernel is; None for all others."""
    node = node_name()
    if found := _XID.search(message):
        return HealthReport(
            kind="xid",
            device=f"GPU {found['device']}",
            code=int(found["code"]),
            words=found["words"].strip(),
            node=node,
        )
    if found := _EDAC.search(message):
        scrubbed = "scrub" in found["how"]
        kind: Kind = "ecc_corrected"
        if found["which"] == "UE":
            kind = "ecc_scrubbed" if scrubbed else "ecc_uncorrected"
        device = f"memory {found['place'].strip()}"
        count, words = int(found["count"]), f"{found['count']} {found['which']} {found['how']}"
        return HealthReport(kind=kind, device=device, count=count, words=words, node=node) if count else None
    if found := _LINK.search(message):
        kind = "link_down" if found["state"].lower() == "down" else "link_up"
        device = f"network {(found['name'] or found['pci']).strip()} {(found['port'] or '').replace(':', '').lower()}"
        return HealthReport(kind=kind, device=device.strip(), words=message, node=node)
    if found := _POISON.search(message):
        return HealthReport(kind="ecc_uncorrected", device=f"memory page {found['page']}", words=message, node=node)
    if _MACHINE_CHECK in message:
        return HealthReport(kind="machine_check", device="processor", words=message, node=node)
    return None
