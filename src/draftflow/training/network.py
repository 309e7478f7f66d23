"""By which address and interface other nodes reach this one. Standard library only."""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence

from draftflow.errors import DraftflowError

SIOCGIFADDR = 0x8915

REMEDY = (
    "Have the hosts know one another by name, or name their interface in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)."
)


def address_among(hosts: Sequence[str], node: int) -> tuple[str, dict[str, str]]:
    """The address at which the other nodes reach this one, and variables for the processes that talk to them.

    By itself gloo takes the address that this host's own name has here, which many systems make 127.0.1.1. So it is
    told the interface on the way to another host. NCCL chooses among the interfaces that are not loopback.

    Args:
        hosts: name of the host of every node.
        node: the number of this one.

    Raises:
        DraftflowError: the name of another host means nothing here, or GLOO_SOCKET_IFNAME names no interface.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        address = _address_of(interface)
        if address is None:
            raise DraftflowError(
                f"{interface} is no network interface with an IPv4 address.", REMEDY, "GLOO_SOCKET_IFNAME"
            )
        return address, {}
    other = next((host for host in hosts if host != hosts[node]), None)
    if other is None:
        return "127.0.0.1", {}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((other, 9))  # sends nothing, and tells the route
            address = way.getsockname()[0]
    except OSError as error:
        raise DraftflowError(f"There is no way from {hosts[node]} to {other}: {error}.", REMEDY) from None
    names = [name for _, name in socket.if_nameindex() if _address_of(name) == address]
    return address, {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, or None."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
