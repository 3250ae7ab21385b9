"""The network links that a run uses, from the kernel's folders of a machine as they look with common cards."""

from pathlib import Path

import pytest

from ingot.machine.health.links import NetworkLinks, read_links

PCI = "0000:{}:00.0"


@pytest.fixture
def links(tmp_path) -> NetworkLinks:
    """A machine with two RDMA cards (ib0 is the IP interface of the first), a bond of two cards, and another card."""
    cards = {"ib0": "17", "eth1": "53", "eth2": "54", "eth5": "05"}
    for name, bus in (*cards.items(), ("mlx5_0", "17"), ("mlx5_3", "65")):
        device = tmp_path / "devices" / PCI.format(bus)
        device.mkdir(parents=True, exist_ok=True)
        place = tmp_path / "class" / ("infiniband" if name.startswith("mlx") else "net") / name
        place.mkdir(parents=True)
        (place / "device").symlink_to(device)
    for name in ("bond0", "lo"):
        (tmp_path / "class" / "net" / name).mkdir()
    for name in ("eth1", "eth2"):
        (tmp_path / "class" / "net" / name / "upper_bond0").symlink_to(tmp_path / "class" / "net" / "bond0")
    return read_links(tmp_path / "class")


@pytest.mark.parametrize(
    ("device", "carriers", "environment", "used"),
    [
        # By the way to the other machines.
        ("network eth5", ["eth5"], {}, True),
        ("network eth5", ["bond0"], {}, False),
        ("network eth1", ["bond0"], {}, True),
        ("network eth5", [], {}, None),
        ("network bond0", ["bond0"], {}, True),
        ("network gone7", ["gone7"], {}, True),  # its device fell off the bus before the links were read
        # By the user's choice, in the form of each library.
        ("network eth5", ["bond0"], {"GLOO_SOCKET_IFNAME": "eth5"}, True),
        ("network eth5", ["bond0"], {"GLOO_SOCKET_IFNAME": "eth"}, False),
        ("network eth5", ["bond0"], {"NCCL_SOCKET_IFNAME": "eth"}, True),
        ("network eth5", ["bond0"], {"NCCL_SOCKET_IFNAME": "=eth"}, False),
        ("network eth5", ["bond0"], {"NCCL_SOCKET_IFNAME": "^eth5,docker"}, False),
        ("network eth5", ["bond0"], {"NCCL_SOCKET_IFNAME": "^docker"}, True),
        # RDMA: all ports unless the user chose some; the IP interface of a port is that port.
        ("mlx5_0 port 1", ["bond0"], {}, True),
        ("network mlx5_3 port 1", ["bond0"], {"NCCL_IB_HCA": "mlx5_0"}, False),
        ("network mlx5_3 port 1", ["bond0"], {"NCCL_IB_HCA": "mlx5_3:2"}, False),
        ("network mlx5_3 port 2", ["bond0"], {"NCCL_IB_HCA": "=mlx5_0,mlx5_3:2"}, True),
        ("network mlx5_3 port 1", ["bond0"], {"NCCL_IB_HCA": "^=mlx5_3"}, False),
        ("network mlx5_3 port 1", ["bond0"], {"NCCL_IB_DISABLE": "1"}, False),
        ("network ib0", ["bond0"], {}, True),
        ("network ib0", ["bond0"], {"NCCL_IB_HCA": "mlx5_3"}, False),
        (f"network {PCI.format('65')}", ["bond0"], {}, True),
        (f"network {PCI.format('05')}", ["bond0"], {}, False),
        # Not a link of this machine, as far as the kernel shows.
        ("uplink of the rack", ["bond0"], {}, None),
        ("mlx5_9 port 1", ["bond0"], {}, None),
    ],
)
def test_only_links_that_a_run_uses_matter(links, device, carriers, environment, used):
    assert links.is_used(device, carriers, environment) is used


def test_a_machine_without_such_folders_has_no_links(tmp_path):
    assert read_links(tmp_path) == NetworkLinks(interfaces={}, adapters={}, uppers={})
    assert isinstance(read_links(Path("/sys/class")), NetworkLinks)
