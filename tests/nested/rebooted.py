"""What runs in a guest before and after its reboot: ports are plugged, and what came back by itself is told.

Only the disk outlives the reboot: the agent's store and Open vSwitch's database are on it, as on a real host.
The reboot is at once, without a sync, as when the power fails.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import tests.lab.agent
from netplugin.host.safe_files import sync
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.steps import host_state
from tests.lab.traffic_taps import TapVm
from tests.nested import machine, nics
from tests.nested.nics import PF
from tests.nested.vfs import functions, pf_with_vfs, vf_info

DISK, KEPT = Path("/dev/vda"), Path("/mnt")
BEFORE = KEPT / "before.json"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
#: Without KVM, on a busy machine, in seconds.
START_S, WAIT_S = 180.0, 120.0
VLAN = {"type": "vlan", "physical_network": "physnet1", "vlan_id": 100}
FLAT = {"type": "flat", "physical_network": "physnet2"}
VXLAN = {"type": "vxlan", "network_id": "blue"}


def spec(number: int, backend: str, network: dict[str, Any], **fields: Any) -> dict[str, Any]:
    mac = f"52:54:00:00:00:{number:02x}"
    return {"vm_id": f"vm{number}", "mac": mac, "backend": backend, "network": network, **fields}


def own(address: str) -> dict[str, Any]:
    return {"allowed_addresses": [{"ip": address}]}


SPECS = {
    "tap1": spec(1, "linuxbridge", FLAT, port_security=own(ADDRESSES[0])),
    "tap2": spec(2, "linuxbridge", FLAT, port_security=own(ADDRESSES[1]), qos={"egress_kbps": 50_000}),
    "tap3": spec(3, "linuxbridge", VXLAN),
    "vhost1": spec(4, "dpdkvhostuser", VLAN, port_security=own("10.0.0.4")),
    "vhost2": spec(5, "dpdkvhostuser", VLAN, qos={"egress_kbps": 50_000}),
    "vf": spec(6, "sriov", VLAN),
    "relayed": spec(7, "vdpa", VLAN),
}


def main() -> None:
    with open(int(os.environ[machine.CHANNEL]), "wb") as channel:
        nics.modprobe("virtio_blk", "ext4")
        wait_for(DISK.exists, WAIT_S, "the disk is there")
        run(["mount", "--no-mtab", DISK, KEPT])
        with host() as (ovs, agent):
            if BEFORE.exists():
                come_back(channel, ovs, agent)
            else:
                plug(channel, ovs, agent)


@contextmanager
def host() -> Iterator[tuple[PrivateOvs, PrivateAgent]]:
    """What an operator starts at each boot: links, VFs and OVS. The agent is left to start."""
    tests.lab.agent.READY_DEADLINE_S = START_S
    with ExitStack() as stack:
        run("ip link add under0 type veth peer name under1".split())
        run("ip address add 10.9.0.1/24 dev under0".split())
        for name in ("under0", "under1"):
            run(["ip", "link", "set", name, "up"])
        pf = stack.enter_context(pf_with_vfs())
        config = {"dpdk-extra": "-a 0000:00:00.0 --in-memory", "per-port-memory": "true"}
        ovs = stack.enter_context(PrivateOvs(KEPT / "ovs", pmd_mask="0x2", other_config=config))
        options = {
            "agent": {"enabled_backends": "linuxbridge,dpdkvhostuser,sriov,vdpa"},
            "linuxbridge": {"physical_interfaces": "physnet2:", "local_ip": "10.9.0.1"},
            "sriov": {"devices": f"physnet1:{pf}#^0"},
            "vdpa": {"guest_hugepages": "false"},
            "ovs": {"vhost_socket_dir": "/run/vhost", "timeout": "60"},
        }
        yield ovs, stack.enter_context(_NotStarted(KEPT / "agent", ovs, options))


class _NotStarted(PrivateAgent):
    def begin(self) -> None:
        pass


def say(channel: BinaryIO, **message: Any) -> None:
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def plug(channel: BinaryIO, ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """Plug all, and reboot."""
    agent.start()
    network = {"type": "vxlan", "vni": 5001, "peers": ["10.9.0.7"]}
    status, body = agent.call("PUT", "/v1/networks/blue", network)
    assert status == 200, body
    for port_id, each in SPECS.items():
        status, body = agent.call("PUT", f"/v1/ports/{port_id}", each)
        assert status == 200, (port_id, body)
    at_rest(agent)
    assert taps_reach_each_other(agent)
    BEFORE.write_text(json.dumps(seen(ovs, agent)))
    sync(BEFORE)
    sync(KEPT)
    say(channel, event="plugged", boot=boot_id())
    Path("/proc/sysrq-trigger").write_text("b")
    time.sleep(START_S)


def come_back(channel: BinaryIO, ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """Nobody calls: what is there after the agent's start is told."""
    began = time.monotonic()
    agent.start()
    at_rest(agent)
    took = time.monotonic() - began
    before, after = json.loads(BEFORE.read_text()), seen(ovs, agent)
    wrong = host_state.differences(frozenset(before["host"]), frozenset(after["host"]))
    say(
        channel,
        event="back",
        boot=boot_id(),
        took_s=took,
        wrong=wrong,
        ports=before["ports"] == after["ports"],
        vfs=[before["vfs"], after["vfs"]],
        reached=taps_reach_each_other(agent),
    )


def at_rest(agent: PrivateAgent) -> None:
    """All ports are active, and the agent itself finds nothing to do."""

    def found() -> bool:
        states = {port["state"] for port in agent.get("/v1/ports")[1]}
        status, report = agent.call("POST", "/v1/reconcile", {"dry_run": True})
        return states == {"active"} and status == 200 and not report["errors"] and not report["changes"]

    wait_for(
        found, WAIT_S, "all ports are active", lambda: f"{agent.get('/v1/ports')}\n{agent.daemon.tail()}"
    )


def seen(ovs: PrivateOvs, agent: PrivateAgent) -> dict[str, Any]:
    """The host and the ports."""
    others = [name for name in os.listdir("/sys/class/net") if Path(f"/sys/class/net/{name}/device").exists()]
    ports = {port["port_id"]: [port["spec"], port["binding"]] for port in agent.get("/v1/ports")[1]}
    used = [json.dumps(binding) for _, binding in ports.values()]
    numbers = [number for number, pci in enumerate(functions()) if any(pci in text for text in used)]
    vfs = vf_info(nics.interface(PF.pci))
    return {
        "host": sorted(
            host_state.compared(
                host_state.of_ovs(ovs),
                host_state.of_links(without=[*others, "under0", "under1"]),
                host_state.of_bridges(),
                host_state.of_files(Path("/run/vhost")),
                host_state.of_store(agent.directory / "state" / "agent.db"),
            )
        ),
        "ports": ports,
        "vfs": {number: [vfs[number]["address"], vfs[number].get("vlan_list")] for number in numbers},
    }


def taps_reach_each_other(agent: PrivateAgent) -> bool:
    """The VMs on the two filtered taps."""
    with ExitStack() as stack:
        vms: Sequence[TapVm] = [
            stack.enter_context(
                TapVm(
                    f"vm-{name}", None, agent.get(f"/v1/ports/{name}")[1]["binding"]["device"], mac, address
                )
            )
            for name, mac, address in zip(
                ("tap1", "tap2"), (SPECS["tap1"]["mac"], SPECS["tap2"]["mac"]), ADDRESSES, strict=True
            )
        ]
        return vms[0].reaches(ADDRESSES[1], deadline_s=WAIT_S)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


if __name__ == "__main__":
    main()
