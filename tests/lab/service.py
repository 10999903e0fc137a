"""A network service in a namespace, such as a platform's DHCP server: one end of a veth stays on the host."""

from __future__ import annotations

import array
import fcntl
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.namespaces import entered, namespace, pings, within
from tests.lab.processes import Daemon, run, wait_for

INSIDE = "eth0"
#: The MAC of the host's end, which sends nothing.
_OUTER = "52:54:00:00:05:fe"
# include/uapi/linux/sockios.h and ethtool.h
_SIOCETHTOOL, _ETHTOOL_STXCSUM = 0x8946, 0x17


@dataclass(frozen=True)
class Service:
    """The namespace ``name`` with an address on ``eth0``, whose other end is ``device`` on the host.

    ``host`` is the namespace of a host that is not this machine; ``mtu`` is in bytes, of both ends.
    """

    name: str
    device: str
    mac: str
    address: str
    host: str | None = None
    mtu: int = 1500

    def spec(self, backend: str, vlan_id: int = 100, **fields: Any) -> dict[str, Any]:
        """The body of ``PUT /v1/service-ports`` for its device; on a VLAN unless the network is given."""
        network = {"type": "vlan", "physical_network": "physnet1", "vlan_id": vlan_id}
        spec = {"device": self.device, "backend": backend, "network": network, "mac": self.mac}
        return {**spec, **fields}

    def link(self) -> dict[str, Any]:
        """The device, as ``ip`` prints it."""
        (found,) = json.loads(run(within(self.host, ["ip", "-json", "link", "show", self.device])))
        return dict(found)

    def remove_device(self) -> None:
        """Remove the pair, if a test has not. It also goes with the namespace, but then some time later."""
        links = json.loads(run(within(self.host, ["ip", "-json", "link", "show"])))
        if self.device in {link.get("ifname") for link in links}:
            run(within(self.host, ["ip", "link", "delete", self.device]))

    def make_device(self) -> None:
        """The pair, both ends up. The stack leaves no checksum to a NIC: there is none."""
        mtu = ["mtu", str(self.mtu)]
        peer = ["peer", "name", INSIDE, "address", self.mac, *mtu, "netns", self.name]
        outer = [self.device, "address", _OUTER, *mtu]
        run(within(self.host, ["ip", "link", "add", *outer, "type", "veth", *peer]))
        run(within(self.host, ["ip", "link", "set", self.device, "up"]))
        run(within(self.name, ["ip", "link", "set", INSIDE, "up"]))
        # The kernel follows the carrier of the pair a moment later.
        wait_for(lambda: self.link()["operstate"] == "UP", 10, f"{self.device} has a carrier")
        run(within(self.name, ["ip", "address", "add", f"{self.address}/24", "dev", INSIDE]))
        with entered(self.name):
            asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with asking:
            value = array.array("B", struct.pack("II", _ETHTOOL_STXCSUM, 0))
            request = struct.pack("16sP", INSIDE.encode(), value.buffer_info()[0])
            fcntl.ioctl(asking, _SIOCETHTOOL, request)

    def ip(self, *words: str) -> str:
        return run(within(self.name, ["ip", *words]))

    def pings(self, address: str, wait_s: int = 1) -> bool:
        return pings(self.name, address, wait_s=wait_s)

    def dnsmasq(self, directory: Path, first: str, last: str) -> Daemon:
        """A DHCP server for addresses of this range."""
        command = [
            "dnsmasq",
            "--no-daemon",
            "--conf-file=/dev/null",
            "--port=0",
            "--user=root",
            "--no-ping",
            "--log-dhcp",
            f"--interface={INSIDE}",
            "--bind-interfaces",
            f"--dhcp-leasefile={directory / 'leases'}",
            f"--dhcp-range={first},{last},255.255.255.0,1h",
        ]
        return Daemon("dnsmasq", within(self.name, command), directory / "dnsmasq.log")


@contextmanager
def service(
    name: str, device: str, mac: str, address: str, host: str | None = None, mtu: int = 1500
) -> Iterator[Service]:
    with namespace(name):
        made = Service(name, device, mac, address, host, mtu)
        made.make_device()
        try:
            yield made
        finally:
            made.remove_device()
