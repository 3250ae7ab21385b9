"""The network interfaces of this machine, and the addresses at which others reach it."""

import errno
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # of netdevice(7)


def interface_of(host: str) -> str:
    """Return the name of the interface with the address `host`; "" if it is not known."""
    return own_interfaces().get(host, "")


def own_interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of this machine, with the names of their interfaces."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise
                continue
            found[socket.inet_ntoa(reply[20:24])] = name
    return found


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        return probe.getsockname()[0]
