"""What a scrape of the counters of many ports on OVS costs, and how long vswitchd's main loop waits for it.

    python -m tests.lab.sandbox --hugepages 200 -- python -m tests.bench.counters [--ports N]

Ports are rows of OVS with the flows of a filter; no guest is connected. Three figures, as medians: the
raw exchange (the same requests, answers received and not read), the reading with the text of a scrape, and
the time until vswitchd answers a barrier on another connection while it answers the reading.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from agents.telemetry.counter_text import counter_text
from agents.telemetry.port_counters import BackendCounters
from drivers.dpdkvhostuser.driver import DpdkVhostUser
from drivers.ovs import filters
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.host import openflow_messages as m
from netplugin.host.openflow_connection import Connection
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.port_stats import request_port_stats
from netplugin.host.shared import Host
from netplugin.options import load
from tests.functional.conftest import make_spec
from tests.functional.test_plug_ovs import plug_all
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs

BASE, BRIDGE, ROUNDS = Path("/run/np-bench"), "br-phys1", 15


def median_ms(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) * 1e3


def waits_ms(sockets: OvsSockets, call: Callable[[], object]) -> tuple[float, float]:
    """How long barriers on a connection of their own take: while nothing else is asked, and meanwhile."""
    other = Connection(sockets.management(BRIDGE), time.monotonic() + 60)
    found: list[list[float]] = []
    for work in (lambda: time.sleep(0.5), lambda: [call() for _ in range(ROUNDS)]):
        waits, done = [], threading.Event()

        def ask(waits: list[float] = waits, done: threading.Event = done) -> None:
            while not done.is_set():
                begun = time.perf_counter()
                other.exchange([], time.monotonic() + 60)
                waits.append(time.perf_counter() - begun)
                time.sleep(0.001)

        thread = threading.Thread(target=ask)
        thread.start()
        work()
        done.set()
        thread.join()
        found.append(waits)
    other.close()
    return max(found[0]) * 1e3, max(found[1]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, default=1000)
    count = parser.parse_args().ports
    with PrivateOvs(BASE / "ovs") as ovs, PrivateAgent(BASE / "agent", ovs) as agent:
        specs = {f"p{number}": make_spec(number) for number in range(count)}
        ids = list(specs)
        for at in range(0, count, 200):
            plug_all(agent, {port_id: specs[port_id] for port_id in ids[at : at + 200]})
        host = Host(load([agent.config]))
        backend = DpdkVhostUser(load([agent.config]), host)
        backend.watch(lambda wake: None)
        intents = [Intent(i, PortSpec.model_validate(spec), stamp="s/1") for i, spec in specs.items()]
        while len(host.ovs.view.all_owned("dpdkvhostuser")) < count:
            time.sleep(0.1)
        sockets = host.ovs.settings.sockets
        connection = Connection(sockets.management(BRIDGE), time.monotonic() + 60)
        cookies = sorted(filters.port_cookie(port_id) for port_id in specs)
        requests = [request_port_stats(1)]
        requests += [m.request_flows(xid, cookie, m.WHOLE_COOKIE) for xid, cookie in enumerate(cookies, 2)]
        counters = BackendCounters("dpdkvhostuser", backend, lambda: intents)
        raw = median_ms(lambda: connection.exchange(requests, time.monotonic() + 60))
        read = median_ms(lambda: backend.port_counters(intents, time.monotonic() + 60))
        scrape = median_ms(lambda: counter_text([counters.known(60.0)]))
        idle, busy = waits_ms(sockets, lambda: counters.known(60.0))
        print(f"{count} ports: raw exchange {raw:.0f} ms, reading {read:.0f} ms, scrape {scrape:.0f} ms")
        print(f"longest wait of another connection: {idle:.0f} ms without, {busy:.0f} ms with readings")
        print(f"text: {len(counter_text([counters.known(60.0)])) / 1024:.0f} KiB")
        host.close()
    shutil.rmtree(BASE)


if __name__ == "__main__":
    main()
