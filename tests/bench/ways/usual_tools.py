"""Ports with a filter made by the usual tools: one transaction of ovsdbapp, then flows by ovs-ofctl.

The same work as the agent's, without its record: the port, the flows of its filter as one bundle, and a look
whether they are there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.bench.ways.ovsdbapp_alone import Ovsdbapp

_PROTOCOL = "--protocols=OpenFlow14"  # bundles need it
_TIMEOUT_S = 120


class UsualTools(Ovsdbapp):
    prefix = "tool"

    def __init__(self, address: str, bridge: str) -> None:
        super().__init__(address, bridge)
        # vswitchd has it beside the database's.
        self._openflow = f"unix:{Path(address.removeprefix('unix:')).parent}/{bridge}.mgmt"

    def plug(self, number: int) -> None:
        super().plug(number)
        port = self._api.db_get("Interface", self.name(number), "ofport").execute(check_error=True)
        flows = _filter(port, number)
        self._ofctl("--bundle", "add-flows", "-", text="\n".join(flows))
        found = self._ofctl("dump-flows", f"cookie={_cookie(number)}/-1").count("cookie=")
        if found != len(flows):
            raise RuntimeError(f"{found} flows in place of {len(flows)}")

    def unplug(self, number: int) -> None:
        self._ofctl("--bundle", "del-flows", f"cookie={_cookie(number)}/-1")
        super().unplug(number)

    def _ofctl(self, *words: str, text: str = "") -> str:
        *options, command, last = words
        command_line = ["ovs-ofctl", _PROTOCOL, *options, command, self._openflow, last]
        done = subprocess.run(
            command_line, input=text, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        return done.stdout


def _cookie(number: int) -> str:
    return f"{0x746F6F6C0000 + number:#x}"


def _filter(port: int, number: int) -> list[str]:
    """What a VM with one MAC and one address may send: twelve flows."""
    high, low = number >> 8 & 255, number & 255
    mac, address = f"52:54:02:00:{high:02x}:{low:02x}", f"10.2.{high}.{low}"
    drop, passes = "actions=drop", "actions=NORMAL"
    of_vm = f"in_port={port},dl_src={mac}"
    flows = [
        f"priority=90,in_port={port},dl_dst=01:80:c2:00:00:00/ff:ff:ff:ff:ff:f0,{drop}",
        f"priority=80,{of_vm},udp,tp_src=67,{drop}",
        f"priority=80,{of_vm},udp6,tp_src=547,{drop}",
        f"priority=80,{of_vm},icmp6,icmp_type=134,{drop}",
        f"priority=80,{of_vm},icmp6,icmp_type=137,{drop}",
        f"priority=70,{of_vm},arp,arp_sha={mac},arp_spa={address},{passes}",
        f"priority=70,{of_vm},arp,arp_sha={mac},arp_spa=0.0.0.0,{passes}",
        f"priority=70,{of_vm},ip,nw_src={address},{passes}",
        f"priority=70,{of_vm},udp,nw_src=0.0.0.0,tp_src=68,tp_dst=67,{passes}",
        f"priority=60,{of_vm},arp,{drop}",
        f"priority=60,{of_vm},ip,{drop}",
        f"priority=50,in_port={port},{drop}",
    ]
    return [f"cookie={_cookie(number)},{flow}" for flow in flows]


def make(address: str, bridge: str) -> UsualTools:
    return UsualTools(address, bridge)
