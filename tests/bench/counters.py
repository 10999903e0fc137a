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
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agents.telemetry.counter_text import counter_text
from agents.telemetry.port_counters import BackendCounters, Snapshot
from drivers.ovs import filters
from drivers.ovs.counters import read_counters
from drivers.ovs.ports import port_name
from netplugin.api.counter_models import Traffic
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.counters import Key, Readings, Source, Track
from netplugin.host import openflow_messages as m
from netplugin.host.openflow_connection import Connection
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import BACKEND_MARK, PORT_MARK
from netplugin.host.port_stats import request_port_stats
from netplugin.host.shared import Host
from netplugin.options import load
from tests.functional.conftest import make_spec
from tests.lab.ovs import PrivateOvs

BACKEND = "dpdkvhostuser"
BASE, BRIDGE, ROUNDS = Path("/run/np-bench"), "br-phys1", 15


def median_ms(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) * 1e3


#: Another process, which does not wait for the interpreter of the one that reads.
_ASKS = """
import sys, time
from pathlib import Path
from netplugin.host.openflow_connection import Connection
connection, waits = Connection(Path(sys.argv[1]), time.monotonic() + 60), []
sys.stdout.write("ready\\n"); sys.stdout.flush()
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    begun = time.perf_counter()
    connection.exchange([], time.monotonic() + 60)
    waits.append(time.perf_counter() - begun)
    time.sleep(0.001)
print(max(waits) * 1e3, sorted(waits)[int(len(waits) * 0.99)] * 1e3)
"""


def waits_ms(management: Path, seconds: float, call: Callable[[], object]) -> tuple[float, float]:
    """How long barriers of another process take meanwhile: the longest, and the 99th percentile."""
    command = [sys.executable, "-c", _ASKS, str(management), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None and asking.stdout.readline() == "ready\n"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            call()
        longest, most = map(float, asking.stdout.read().split())
    return longest, most


def cpu_ms(call: Callable[[], object]) -> float:
    """The CPU time of this process, which others on the machine do not change."""
    begun = time.process_time()
    for _ in range(ROUNDS):
        call()
    return (time.process_time() - begun) / ROUNDS * 1e3


def filled(snapshot: Snapshot) -> Snapshot:
    """As if each port had a guest: with packets and bytes."""
    values: dict[Key, int] = dict.fromkeys(list(Traffic)[:4], 123456789)
    ports = {
        port_id: replace(port, tracks={**port.tracks, "port": Track(Source(values), 0.0)})
        for port_id, port in snapshot.ports.items()
    }
    return replace(snapshot, ports=ports)


@dataclass(frozen=True)
class _Counts:
    ovs: OvsHost

    def port_counters(self, intents: Sequence[Intent], deadline: float) -> Readings:
        return read_counters(self.ovs, BACKEND, intents, deadline)


def _plug(ovs: PrivateOvs, specs: Mapping[str, PortSpec]) -> None:
    ovs.vsctl("add-br", BRIDGE, "--", "set", "bridge", BRIDGE, "datapath_type=netdev", "fail_mode=secure")
    ids = list(specs)
    for at in range(0, len(ids), 100):
        words: list[str] = []
        for port_id in ids[at : at + 100]:
            name, marks = port_name(port_id, specs[port_id]), {PORT_MARK: port_id, BACKEND_MARK: BACKEND}
            words += ["--", "add-port", BRIDGE, name]
            words += [
                "--",
                "set",
                "port",
                name,
                *(f"external_ids:{key}={value}" for key, value in marks.items()),
            ]
            words += ["--", "set", "interface", name, "type=dpdkvhostuserclient"]
            words += [f"options:vhost-server-path={BASE}/{port_id}.sock"]
        ovs.vsctl(*words, timeout=300.0)


def _filter(ovs: OvsHost, specs: Mapping[str, PortSpec]) -> None:
    for port_id, spec in specs.items():
        row = ovs.view.owned(BACKEND, port_id)
        ofport = row.works_at if row else None
        assert ofport, f"{port_id}: vswitchd has not made its port"
        flows = filters.port_flows(port_id, ofport, spec) | filters.miss_flows(port_id, ofport, spec).keys()
        ovs.flows.replace(BRIDGE, (), flows, time.monotonic() + 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, default=1000)
    count = parser.parse_args().ports
    specs = {f"p{number}": PortSpec.model_validate(make_spec(number)) for number in range(count)}
    with PrivateOvs(BASE / "ovs") as ovs:
        config = BASE / "netplugin.conf"
        config.write_text(f"[ovs]\nconnection = {ovs.connection}\n")
        _plug(ovs, specs)
        host = Host(load([config]))
        while len(host.ovs.view.all_owned(BACKEND)) < count or not host.ovs.answers().usable:
            time.sleep(0.1)
        _filter(host.ovs, specs)
        intents = [Intent(port_id, spec, stamp="s/1") for port_id, spec in specs.items()]
        sockets = host.ovs.settings.sockets
        connection = Connection(sockets.management(BRIDGE), time.monotonic() + 60)
        cookies = sorted(filters.port_cookie(port_id) for port_id in specs)
        requests = [request_port_stats(1)]
        requests += [m.request_flows(xid, cookie, m.WHOLE_COOKIE) for xid, cookie in enumerate(cookies, 2)]
        counters = BackendCounters(BACKEND, _Counts(host.ovs), lambda: intents)

        def raw() -> object:
            return connection.exchange(requests, time.monotonic() + 60)

        def scrape() -> bytes:
            return counter_text([filled(counters.known(60.0))])

        print(f"{count} ports: raw exchange {median_ms(raw):.0f} ms, scrape {median_ms(scrape):.0f} ms")
        print(f"CPU time of it: {cpu_ms(raw):.0f} ms, {cpu_ms(scrape):.0f} ms; {len(scrape()) // 1024} KiB")
        management = sockets.management(BRIDGE)
        for what, call in (("nothing", lambda: time.sleep(0.1)), ("a scrape", scrape)):
            longest, most = waits_ms(management, 5.0, call)
            print(f"another connection waits during {what}: {longest:.0f} ms, 99 % at most {most:.0f} ms")
        host.close()
    shutil.rmtree(BASE)


if __name__ == "__main__":
    main()
