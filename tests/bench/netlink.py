"""Requests to rtnetlink, call by call on one host in one run: with the kernel's filters and pyroute2's own.

    unshare --net python -m tests.bench.netlink [--devices N]

What pyroute2 filters itself it lists first: that grows with the devices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from pyroute2 import IPRoute

from netplugin.host.bridge_members import BridgeMembers
from netplugin.host.fdb import Fdb
from netplugin.host.link_values import Bridge, Ifb
from netplugin.host.links import Links
from netplugin.host.tc import Tc

ROUNDS = 9
MAC = "02:00:00:00:00:01"


def median_ms(call: Callable[[], Any]) -> float:
    call()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1000, help="ports of one bridge")
    devices = parser.parse_args().devices
    links, fdb, tc, plain = Links(), Fdb(), Tc(), IPRoute()
    members = BridgeMembers(links)
    links.create("bench", Bridge(), alias="bench", address=MAC, mtu=1500)
    for number in range(devices):
        links.create(f"bench{number}", Ifb(), alias="bench", address=MAC, mtu=1500)
        links.set(f"bench{number}", master="bench")
    link = links.get("bench0")
    assert link is not None
    index = link.index

    def kept_members() -> None:
        links.set("bench0", mtu=1400)
        links.set("bench0", mtu=1500)
        members.read(anew=False)

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "read one device": (lambda: links.get("bench0"), lambda: plain.link("get", ifname="bench0")),
        "change one device": (
            lambda: links.set("bench0", mtu=1500),
            lambda: plain.link("set", index=index, mtu=1500),
        ),
        "read the qdiscs of one": (lambda: tc.read(index, ""), lambda: list(plain.get_qdiscs(index=index))),
        "list the bridges": (
            lambda: links.of_kind("bridge"),
            lambda: list(plain.link("dump", kind="bridge")),
        ),
        "list the ports of bridges": (links.bridge_ports, lambda: list(plain.link("dump", family=7))),
        "the same by two notifications": (kept_members, None),
        "list the MACs of one port": (
            lambda: fdb.fixed(index),
            lambda: list(plain.fdb("dump", ifindex=index)),
        ),
    }
    print(f"{'with ' + str(devices) + ' devices':32}{'as used, ms':>14}{'filters itself, ms':>20}")
    for name, (used, itself) in calls.items():
        beside = f"{median_ms(itself):20.2f}" if itself else ""
        print(f"{name:32}{median_ms(used):14.2f}{beside}")
    members.close()
    plain.close()


if __name__ == "__main__":
    main()
