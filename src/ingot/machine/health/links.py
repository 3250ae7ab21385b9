"""The network links of this machine, and which of them a run uses: the loss of another one is no reason to leave it."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_CLASSES = Path("/sys/class")
_PORT = re.compile(r"\bport:? *(\d+)", re.I)


@dataclass(frozen=True, kw_only=True)
class NetworkLinks:
    """The network devices of a machine. interfaces, adapters: of IP and of RDMA, each with the address of its device.
    uppers: the interfaces above an interface: the bond of which it is a part."""

    interfaces: Mapping[str, str]
    adapters: Mapping[str, str]
    uppers: Mapping[str, tuple[str, ...]]

    def is_used(
        self, report_device: str, carriers: Collection[str], environment: Mapping[str, str] = os.environ
    ) -> bool | None:
        """Return whether a run uses the link of a report; None if that is not known.

        report_device: as in a HealthReport: "network eth5", "mlx5_0 port 1", "network 0000:53:00.0". carriers: the
        interfaces by which the machine reaches the others of the run. environment: of the ranks, in which users choose
        links for Gloo and NCCL.
        """
        words = report_device.split()
        places = {place for place in words if place in {*self.interfaces.values(), *self.adapters.values()}}
        places |= {known[word] for known in (self.interfaces, self.adapters) for word in words if word in known}
        places.discard("")
        interfaces = {word for word in words if word in self.interfaces or word in carriers}
        interfaces |= {name for name, place in self.interfaces.items() if place in places}
        adapters = {name for name, place in self.adapters.items() if place in places}
        adapters |= {word for word in words if word in self.adapters}
        port = _PORT.search(report_device)
        uses = [_uses_adapter(name, port[1] if port else "", environment) for name in adapters]
        uses += [self._uses_interface(name, carriers, environment) for name in interfaces]
        return True if True in uses else None if None in uses or not uses else False

    def _uses_interface(self, name: str, carriers: Collection[str], environment: Mapping[str, str]) -> bool | None:
        names, todo = set[str](), [name]
        while todo:
            if (one := todo.pop()) not in names:
                names.add(one)
                todo += self.uppers.get(one, ())
        gloo, nccl = environment.get("GLOO_SOCKET_IFNAME", ""), environment.get("NCCL_SOCKET_IFNAME", "")
        if names & {*carriers, *gloo.split(",")} or (nccl and any(_is_listed(one, "", nccl) for one in names)):
            return True
        return False if carriers or gloo or nccl else None


def _uses_adapter(name: str, port: str, environment: Mapping[str, str]) -> bool:
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return False
    listed = environment.get("NCCL_IB_HCA", "")
    return not listed or _is_listed(name, port, listed)


def _is_listed(name: str, port: str, listed: str) -> bool:
    """Return whether NCCL takes a device for a list of its environment: of prefixes; after "=" of whole names, after
    "^" of those that it leaves. port: "" for one that is not known."""
    without = listed.startswith("^")
    rest = listed.removeprefix("^")
    whole = rest.startswith("=")
    found = False
    for one in rest.removeprefix("=").split(","):
        wanted, _, wanted_port = one.partition(":")
        same = name == wanted if whole else bool(wanted) and name.startswith(wanted)
        found = found or (same and (not wanted_port or not port or port == wanted_port))
    return found != without


def read_links(classes: Path = _CLASSES) -> NetworkLinks:
    """Return the network links of this machine. Read them before a fault: a device that fell off its bus is not shown.

    classes: the folder that the kernel shows them in.
    """
    interfaces = list(_entries(classes / "net"))
    return NetworkLinks(
        interfaces={path.name: _device(path) for path in interfaces},
        adapters={path.name: _device(path) for path in _entries(classes / "infiniband")},
        uppers={
            path.name: tuple(sorted(upper.name.removeprefix("upper_") for upper in path.glob("upper_*")))
            for path in interfaces
        },
    )


def _entries(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _device(path: Path) -> str:
    """Return the address of a device on its bus; "" of one that has none, as loopback."""
    return (path / "device").resolve().name if (path / "device").exists() else ""
