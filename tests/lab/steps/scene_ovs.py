"""A host with a real OVS-DPDK, on which others have things too."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivers.ovs.remains import ASIDE
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run
from tests.lab.service import service
from tests.lab.steps import host_state, operations
from tests.lab.steps.agent import SteppedAgent
from tests.lab.steps.matrix import OPERATION_S, Scene
from tests.unit.agents.api.test_tasks import Receiver

#: What others have: rows, flows, a device and a table.
_THEIRS = (
    "add-br br-theirs -- set Bridge br-theirs datapath_type=netdev external_ids:owner=them",
    "add-port br-theirs theirs-i -- set Interface theirs-i type=internal",
    "add-port br-theirs theirs-v tag=7 -- set Interface theirs-v type=dpdkvhostuserclient "
    "options:vhost-server-path=/run/np/theirs.sock",
)
_THEIR_FLOWS = ("priority=7,in_port=theirs-i,actions=drop", "cookie=0x77,priority=9,arp,actions=NORMAL")
_DEVICE = "net_af_packet0,iface=nic0,qdisc_bypass=1"


@dataclass(frozen=True)
class OvsHost:
    """A host whose ``agent`` has one backend on ``ovs``; ``damage`` breaks the port p1 on the host.

    ``wires`` are devices that vswitchd takes, and leaves in another state.
    """

    ovs: PrivateOvs
    agent: SteppedAgent
    calls: operations.Calls
    wires: Collection[str]

    def state(self) -> host_state.State:
        host_state.wait_until_cleared(self.agent.directory / "vhost" / ASIDE)
        return host_state.compared(
            host_state.of_ovs(self.ovs),
            host_state.of_links(without=("nic0", *self.wires)),
            host_state.of_files(self.agent.directory / "vhost", self.agent.directory / "state"),
            host_state.of_store(self.agent.directory / "state" / "agent.db"),
        )

    def reset(self) -> None:
        self.agent.kill()
        for name in self.ovs.vsctl("list-br").split():
            if name != "br-theirs":
                self.ovs.vsctl("del-br", name)
        shutil.rmtree(self.agent.directory, ignore_errors=True)
        self.agent.start()
        status, body = self.calls.put(operations.NEIGHBOUR, 9)()
        assert status == 200, body

    def damage(self) -> None:
        name = self.ovs.vsctl("--bare", "--columns=name", "find", "Port", "external_ids:netplugin-port=p1")
        for each in name.split():
            self.ovs.vsctl("--if-exists", "del-port", each)


@contextmanager
def host(
    directory: Path,
    backend: str,
    options: Mapping[str, Mapping[str, str]],
    operation_s: int = OPERATION_S,
    wires: Collection[str] = (),
    **more: Any,
) -> Iterator[OvsHost]:
    """With what others have on it. ``more`` are arguments of the agent."""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        ovs = stack.enter_context(PrivateOvs(directory / "ovs"))
        stack.enter_context(_nics())
        for words in _THEIRS:
            ovs.vsctl(*words.split())
        run("ip address add 10.9.0.1/24 dev br-theirs".split())
        run("ip link set br-theirs up".split())
        for flow in _THEIR_FLOWS:
            ovs.ofctl("add-flow", "br-theirs", flow)
        groups = {"agent": {"enabled_backends": backend, "operation_timeout": str(operation_s)}, **options}
        agent = SteppedAgent(directory / "agent", ovs, groups, **more)
        made = OvsHost(ovs, agent, operations.Calls(agent, backend), wires)
        stack.enter_context(agent)
        made.reset()
        yield made


@contextmanager
def scene(directory: Path, operation_s: int = OPERATION_S) -> Iterator[Scene]:
    """The backend dpdkvhostuser. ``directory`` is short, for sockets."""
    with ExitStack() as stack:
        receiver = Receiver()
        receiver.start()
        stack.callback(receiver.stop)
        served = stack.enter_context(service("np-svc", "svc0", "52:54:00:00:05:01", "10.0.0.5"))
        options = {
            "ovs": {"local_ip": "10.9.0.1"},
            "tasks": {"callback_allow": receiver.url, "callback_timeout": "3"},
        }
        made = stack.enter_context(host(directory, "dpdkvhostuser", options, operation_s))
        calls = made.calls
        storage = {"bridge": "br-storage", "keep": True, "ovs": {"devices": [_DEVICE]}}
        yield Scene(
            "dpdkvhostuser on OVS-DPDK",
            made.agent,
            [
                *operations.of_ports(calls, made.damage),
                *operations.of_migrations(calls),
                *operations.of_overlays(calls),
                *operations.of_physical_networks(calls, storage),
                *operations.of_service_ports(calls, served.spec("dpdkvhostuser")),
                *operations.of_callbacks(calls, receiver),
            ],
            made.state,
            made.reset,
        )


@contextmanager
def _nics() -> Iterator[None]:
    """A device for an uplink, one of others, and a table of others."""
    run("ip link add nic0 mtu 9000 type veth peer name far-nic0".split())
    run("ip link add theirs0 type veth peer name theirs1".split())
    for name in ("nic0", "far-nic0", "theirs0", "theirs1"):
        run(["ip", "link", "set", name, "up"])
    run(["nft", "add", "table", "bridge", "theirs"])
    try:
        yield
    finally:
        run(["nft", "delete", "table", "bridge", "theirs"])
        for name in ("nic0", "theirs0"):
            run(["ip", "link", "delete", name])
