"""How fast ports are plugged on OVS-DPDK, side by side with ovs-vsctl and os-vif, in one run.

    python -m tests.lab.sandbox --hugepages 200 -- python -m tests.bench.plug [--json FILE]

Ratios are what counts: the absolute figures are this machine's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs

SINGLES = 100
CONCURRENT = 64
ROUNDS = 3
MANY = 1000


@dataclass(frozen=True)
class Figure:
    """Milliseconds of one kind of operation."""

    name: str
    count: int
    p50_ms: float
    p99_ms: float

    @staticmethod
    def of(name: str, seconds: Sequence[float]) -> Figure:
        ordered = sorted(s * 1e3 for s in seconds)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return Figure(name, len(ordered), round(statistics.median(ordered), 2), round(p99, 2))


class Caller:
    """One kept connection to the agent, as a platform's client would hold it."""

    def __init__(self, agent: PrivateAgent) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=120)

    def put(self, port_id: str, spec: dict[str, Any]) -> dict[str, Any]:
        self.send(port_id, spec)
        return self.receive()

    def send(self, port_id: str, spec: dict[str, Any]) -> None:
        self._connection.request("PUT", f"/v1/ports/{port_id}", json.dumps(spec).encode())

    def receive(self) -> dict[str, Any]:
        answer = self._connection.getresponse()
        body: dict[str, Any] = json.loads(answer.read())
        assert answer.status == 200, body
        return body


class OsVif:
    """os-vif's plug of the same port: what nova does on a hypervisor."""

    def __init__(self, ovs: PrivateOvs) -> None:
        import os_vif
        from os_vif import objects
        from oslo_config import cfg

        file = ovs.directory / "os-vif.conf"
        file.write_text(f"[os_vif_ovs]\novsdb_connection = {ovs.connection}\n")
        cfg.CONF([], project="os_vif", default_config_files=[str(file)])
        os_vif.initialize()
        self._os_vif, self._objects = os_vif, objects

    def plug(self, number: int, bridge: str) -> None:
        objects = self._objects
        identity = str(uuid.uuid4())
        network = objects.network.Network(id=identity, bridge=bridge, mtu=1500)
        profile = objects.vif.VIFPortProfileOpenVSwitch(interface_id=identity, datapath_type="netdev")
        vif = objects.vif.VIFVHostUser(
            id=identity,
            address=f"52:54:01:00:{number // 256:02x}:{number % 256:02x}",
            network=network,
            path=f"/run/np/vhost-{identity[:8]}",
            mode="server",
            vif_name=f"vhu{identity[:11]}",
            port_profile=profile,
            plugin="ovs",
        )
        instance = objects.instance_info.InstanceInfo(uuid=identity, name="vm")
        self._os_vif.plug(vif, instance)


def vsctl_plug(ovs: PrivateOvs, number: int, bridge: str) -> None:
    """The one command that the fastest shell script would run."""
    name = f"sh{number}"
    subprocess.run(
        [
            "ovs-vsctl",
            f"--db={ovs.connection}",
            "add-port",
            bridge,
            name,
            "tag=100",
            "vlan_mode=access",
            "--",
            "set",
            "interface",
            name,
            "type=dpdkvhostuserclient",
            f"options:vhost-server-path=/run/np/{name}",
            "mtu_request=1500",
            f"external_ids:iface-id={name}",
        ],
        check=True,
        capture_output=True,
    )


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def singles(ovs: PrivateOvs, agent: PrivateAgent, os_vif: OsVif) -> list[Figure]:
    """One port at a time, the three in turn, so that each meets the same number of neighbours."""
    caller = Caller(agent)
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    for number in range(SINGLES):  # in turn
        start = time.perf_counter()
        body = caller.put(f"one{number}", make_spec(number))
        took = time.perf_counter() - start
        parts = body["timings_ms"]
        vswitchd, openflow = parts["vswitchd"] / 1e3, parts["openflow"] / 1e3
        note("agent: PUT, verified, with filter", took)
        note("- its own share", took - vswitchd - openflow)
        note("- OVSDB and vswitchd", vswitchd)
        note("- OpenFlow (ovs-ofctl, two calls)", openflow)
        note("ovs-vsctl add-port", timed(lambda n=number: vsctl_plug(ovs, n, "br-bench")))
        note("os-vif plug", timed(lambda n=number: os_vif.plug(n, "br-bench")))
    return [Figure.of(name, seconds) for name, seconds in times.items()]


def together(agent: PrivateAgent, os_vif: OsVif, ovs: PrivateOvs) -> dict[str, float]:
    """Seconds for 64 ports: all at once, and one after the other."""
    found: dict[str, list[float]] = {"concurrent": [], "in turn": [], "os-vif": []}
    callers = [Caller(agent) for _ in range(CONCURRENT)]
    for _ in range(ROUNDS):
        found["concurrent"].append(timed(lambda: put_at_once(callers)))
        unplug(agent, "many")
        found["in turn"].append(
            timed(lambda: [callers[0].put(f"turn{n}", make_spec(n)) for n in range(CONCURRENT)])
        )
        unplug(agent, "turn")
        ovs.vsctl("add-br", "br-osvif", "--", "set", "bridge", "br-osvif", "datapath_type=netdev")
        found["os-vif"].append(timed(lambda: [os_vif.plug(n, "br-osvif") for n in range(CONCURRENT)]))
        ovs.vsctl("del-br", "br-osvif", timeout=120)
    return {name: round(statistics.median(seconds), 3) for name, seconds in found.items()}


def put_at_once(callers: Sequence[Caller]) -> None:
    """Every call is sent, each on its own connection, before the first answer is read."""
    for number, caller in enumerate(callers):
        caller.send(f"many{number}", make_spec(number))
    for caller in callers:
        caller.receive()


def unplug(agent: PrivateAgent, prefix: str) -> None:
    ids = [p["port_id"] for p in agent.get("/v1/ports")[1] if p["port_id"].startswith(prefix)]
    status, body = agent.call("POST", "/v1/ports:batch", {"delete": ids}, timeout=300)
    assert status == 200 and {r["status"] for r in body["results"]} <= {204}, body


def reconcile(ovs: PrivateOvs, agent: PrivateAgent) -> dict[str, float]:
    """A cold start with a thousand ports of which none has drifted."""
    batch = [{"port_id": f"r{n}", "spec": make_spec(n, vlan_id=n + 1)} for n in range(MANY)]
    start = time.perf_counter()
    for first in range(0, MANY, 250):
        status, body = agent.call("POST", "/v1/ports:batch", {"put": batch[first : first + 250]}, timeout=600)
        assert status == 200 and {r["status"] for r in body["results"]} == {200}, body
    plugged_s = time.perf_counter() - start
    agent.stop()
    before = ovs.get("Open_vSwitch", ".", "next_cfg"), ovs.database.stat().st_size
    agent.log.write_text("")
    start = time.perf_counter()
    agent.start()
    ready_s = time.perf_counter() - start
    after = ovs.get("Open_vSwitch", ".", "next_cfg"), ovs.database.stat().st_size
    looked = [
        json.loads(line)["message"] for line in agent.log.read_text().splitlines() if "looked at" in line
    ]
    again_s = timed(lambda: agent.call("POST", "/v1/reconcile", {}))
    return {
        f"plug of {MANY} ports in batches of 250, s": round(plugged_s, 2),
        "process start to ready, s": round(ready_s, 3),
        "of this the look at all ports, ms": float(looked[0].split(" in ")[1].split(" ms")[0]),
        "the same again in a running agent, s": round(again_s, 3),
        "writes (next_cfg, bytes)": float(before != after),
        "agent RSS with 1,000 ports, MB": rss_mb(agent.daemon.pid),
    }


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1e3, 1)
    raise LookupError("VmRSS")


def idle(agent: PrivateAgent, seconds: float = 10.0) -> dict[str, float]:
    """CPU of an agent that nobody calls, in percent of a core."""

    def cpu() -> float:
        fields = Path(f"/proc/{agent.daemon.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu()
    time.sleep(seconds)  # what is measured is that nothing happens
    return {
        "idle CPU, % of a core": round((cpu() - before) / seconds * 100, 2),
        "RSS with no port, MB": rss_mb(agent.daemon.pid),
    }


def environment(ovs: PrivateOvs) -> dict[str, str]:
    model = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "CPU": f"{model}, {os.cpu_count()} CPUs",
        "kernel": platform.release(),
        "Open vSwitch": ovs.appctl("version").split()[-1],
        "DPDK": ovs.get("Open_vSwitch", ".", "dpdk_version"),
        "Python": platform.python_version(),
        "ovsdbapp": version("ovsdbapp"),
        "os-vif": version("os-vif"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--peers",
        type=Path,
        help="directory with os-vif, if not in this environment: it brings eventlet, which the ovs "
        "package would then use in the agent too",
    )
    arguments = parser.parse_args()
    if arguments.peers:
        sys.path.append(str(arguments.peers))
    report: dict[str, Any] = {}
    with PrivateOvs(BASE / "ovs") as ovs:
        report["environment"] = environment(ovs)
        os_vif = OsVif(ovs)
        ovs.appctl("vlog/set", "dpif_netdev:file:warn")
        ovs.vsctl("add-br", "br-bench", "--", "set", "bridge", "br-bench", "datapath_type=netdev")
        options = {"DEFAULT": {"log_level": "INFO"}}
        with PrivateAgent(BASE / "agent", ovs, options, as_installed=True) as agent:
            report["idle"] = idle(agent)
            report["single plugs"] = [asdict(f) for f in singles(ovs, agent, os_vif)]
            unplug(agent, "one")
            ovs.vsctl("del-br", "br-bench", timeout=120)
            report["64 ports, s"] = together(agent, os_vif, ovs)
            report["1000 ports"] = reconcile(ovs, agent)
        ovs.kill_vswitchd()
    shutil.rmtree(BASE / "agent")
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))
    return 0


def show(report: dict[str, Any]) -> None:
    for key, value in report["environment"].items():
        print(f"{key}: {value}")
    print(f"\n{'one port':42} {'p50 ms':>8} {'p99 ms':>8}")
    for figure in report["single plugs"]:
        print(f"{figure['name']:42} {figure['p50_ms']:8.2f} {figure['p99_ms']:8.2f}")
    seconds = report["64 ports, s"]
    print(f"\n64 ports, s: {seconds}")
    print(
        f"concurrent is {seconds['in turn'] / seconds['concurrent']:.1f} times faster than in turn, "
        f"{seconds['os-vif'] / seconds['concurrent']:.1f} times faster than os-vif in turn"
    )
    for part in ("1000 ports", "idle"):
        print()
        for key, value in report[part].items():
            print(f"{key}: {value}")


if __name__ == "__main__":
    sys.exit(main())
