"""Own netlink messages and pyroute2, call by call on one host in one run: time, and resident memory.

    unshare --net python -m tests.bench.netlink [--devices N]

pyroute2 is called with the kernel's own filters, and all attributes of its answers are decoded, as ours are.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from netplugin.host.fdb import Fdb
from netplugin.host.link_values import Bridge, Ifb
from netplugin.host.links import Links
from netplugin.host.tc import Tc

ROUNDS = 9
MAC = "02:00:00:00:00:01"
_RSS = "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')][0])"
_AGENT = "import agents.main, drivers.linuxbridge.driver"


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
        nests = [value for _, value in message["attrs"] if isinstance(value, dict) and "attrs" in value]
        decoded(nests)


def rss_mb(statements: str) -> float:
    """The resident memory of a process that has executed these."""
    done = subprocess.run([sys.executable, "-c", f"{statements}\n{_RSS}"], check=True, stdout=subprocess.PIPE)
    return int(done.stdout) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1000, help="ports of one bridge")
    devices = parser.parse_args().devices
    from pyroute2 import IPRoute

    logging.getLogger("pyroute2").setLevel(logging.WARNING)  # it logs each call
    links, fdb, tc, other = Links(), Fdb(), Tc(), IPRoute(ext_ack=True, strict_check=True)
    links.create("bench", Bridge(), alias="bench", address=MAC, mtu=1500)
    for number in range(devices):
        links.create(f"bench{number}", Ifb(), alias="bench", address=MAC, mtu=1500)
        links.set(f"bench{number}", master="bench")
    link = links.get("bench0")
    assert link is not None
    index = link.index
    bridges = {"dump_filter": None, "IFLA_LINKINFO": {"attrs": [("IFLA_INFO_KIND", "bridge")]}, "ext_mask": 8}
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "read one device": (
            lambda: links.get("bench0"),
            lambda: decoded(other.link("get", ifname="bench0", ext_mask=8)),
        ),
        "read the qdiscs of one": (
            lambda: tc.read(index, ""),
            lambda: decoded(other.get_qdiscs(index=index)),
        ),
        "list the bridges": (
            lambda: links.of_kind("bridge"),
            lambda: decoded(other.link("dump", **bridges)),
        ),
        "list the ports of bridges": (
            links.bridge_ports,
            lambda: decoded(other.link("dump", dump_filter=None, family=7)),
        ),
        "list the MACs of one port": (
            lambda: fdb.fixed(index),
            lambda: decoded(other.fdb("dump", dump_filter=None, ifindex=index)),
        ),
    }
    print(f"{'with ' + str(devices) + ' devices':28}{'own, ms':>10}{'pyroute2, ms':>14}{'ratio':>8}")
    for name, pair in calls.items():
        own, theirs = map(median_ms, pair)
        print(f"{name:28}{own:10.2f}{theirs:14.2f}{theirs / own:8.1f}")
    print(f"{'an agent after its imports, MB':28}{rss_mb(_AGENT):8.1f}", end="")
    print(f"{rss_mb(f'{_AGENT}, pyroute2; pyroute2.IPRoute()'):14.1f}")


if __name__ == "__main__":
    main()
