"""Taps made by iproute2 and put on a Linux bridge: the fastest that a shell script could be."""

from __future__ import annotations

import subprocess
import time

from tests.bench.ways import Plugged, Way


class ByIproute(Way):
    """One ``ip -batch`` for each port: tap, MTU, bridge, up."""

    name = "ip -batch"

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge

    def plug(self, number: int) -> Plugged:
        name = f"sh{number}"
        return Plugged(
            self._run(
                f"tuntap add dev {name} mode tap multi_queue vnet_hdr\n"
                f"link set dev {name} mtu 1500 master {self._bridge} up\n"
            )
        )

    def unplug(self, number: int) -> float:
        return self._run(f"link delete dev sh{number}\n")

    def _run(self, lines: str) -> float:
        start = time.perf_counter()
        subprocess.run(
            ["ip", "-batch", "-"], input=lines.encode(), check=True, capture_output=True, timeout=60
        )
        return (time.perf_counter() - start) * 1e3
