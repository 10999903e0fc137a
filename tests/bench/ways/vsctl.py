"""Ports made by one command of ovs-vsctl each: the fastest that a shell script could be."""

from __future__ import annotations

import subprocess
import time

from tests.bench.ways import Plugged, Way
from tests.lab.ovs import PrivateOvs


class ByVsctl(Way):
    """``add-port`` with tag, type, socket path, MTU and id, until vswitchd has applied it."""

    name = "ovs-vsctl add-port"

    def __init__(self, ovs: PrivateOvs, bridge: str) -> None:
        self._command = ["ovs-vsctl", f"--db={ovs.connection}"]
        self._bridge = bridge

    def plug(self, number: int) -> Plugged:
        name = f"sh{number}"
        ms = self._run(
            *("add-port", self._bridge, name, "tag=100", "vlan_mode=access"),
            *("--", "set", "interface", name, "type=dpdkvhostuserclient", "mtu_request=1500"),
            *(f"options:vhost-server-path=/run/np/{name}", f"external_ids:iface-id={name}"),
        )
        return Plugged(ms)

    def unplug(self, number: int) -> float:
        return self._run("del-port", self._bridge, f"sh{number}")

    def _run(self, *words: str) -> float:
        start = time.perf_counter()
        subprocess.run([*self._command, *words], check=True, capture_output=True, timeout=120)
        return (time.perf_counter() - start) * 1e3
