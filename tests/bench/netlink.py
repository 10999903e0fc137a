"""Requests to rtnetlink as the agent makes them beside pyroute2's own calls, in one run on one host.

    unshare --net python -m tests.bench.netlink [--devices N]

pyroute2 is called with the kernel's own filters, and all attributes of its answers are decoded.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from pyroute2 import IPRoute

from netplugin.host.bridge_members import BridgeMembers
from netplugin.host.fdb import Fdb
from netplugin.host.link_messages import SKIP_STATISTICS
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


def decoded(messages: Iterable[Any]) -> None:
    """Decode all attributes of pyroute2's messages, which it does when one is read."""
    for message in messages:
        decoded(value for _, value in message["attrs"] if isinstance(value, dict) and "attrs" in value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1000, help="ports of one bridge")
    devices = parser.parse_args().devices
    links, fdb, tc, calls = Links(), Fdb(), Tc(), IPRoute(ext_ack=True, strict_check=True)
    members = BridgeMembers(links)
    links.create("bench", Bridge(), alias="bench", address=MAC, mtu=1500)
    for number in range(devices):
        links.create(f"bench{number}", Ifb(), alias="bench", address=MAC, mtu=1500)
        links.set(f"bench{number}", master="bench")
    link = links.get("bench0")
    assert link is not None
    index = link.index
    brief = {"ext_mask": SKIP_STATISTICS}
    bridges = {"dump_filter": None, "IFLA_LINKINFO": {"attrs": [("IFLA_INFO_KIND", "bridge")]}, **brief}

    def kept_members() -> None:
        links.set("bench0", mtu=1400)
        links.set("bench0", mtu=1500)
        members.read(whole=False)

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "read one device": (
            lambda: links.get("bench0"),
            lambda: decoded(calls.link("get", ifname="bench0", **brief)),
        ),
        "change one device": (
            lambda: links.set("bench0", mtu=1500),
            lambda: calls.link("set", index=index, mtu=1500),
        ),
        "read the qdiscs of one": (
            lambda: tc.read(index, ""),
            lambda: decoded(calls.get_qdiscs(index=index)),
        ),
        "list the bridges": (
            lambda: links.of_kind("bridge"),
            lambda: decoded(calls.link("dump", **bridges)),
        ),
        "list the ports of bridges": (
            links.bridge_ports,
            lambda: decoded(calls.link("dump", dump_filter=None, family=7)),
        ),
        "the same by two notifications": (kept_members, None),
        "list the MACs of one port": (
            lambda: fdb.fixed(index),
            lambda: decoded(calls.fdb("dump", dump_filter=None, ifindex=index)),
        ),
    }
    print(f"| with {devices} ports, ms | as the agent does | pyroute2's call |\n| --- | --- | --- |")
    for name, (ours, theirs) in pairs.items():
        print(f"| {name} | {median_ms(ours):.2f} | {f'{median_ms(theirs):.2f}' if theirs else ''} |")
    members.close()
    calls.close()


if __name__ == "__main__":
    main()
