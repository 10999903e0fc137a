"""A host with a real OVS-DPDK, on which others have things too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run
from tests.lab.service import service
from tests.lab.steps import host_state, operations
from tests.lab.steps.agent import SteppedAgent
from tests.lab.steps.matrix import OPERATION_S, Scene
from tests.unit.agents.test_tasks import Receiver

#: What others have: rows, flows, a device and a table.
_THEIRS = (
    "add-br br-theirs -- set Bridge br-theirs datapath_type=netdev external_ids:owner=them",
    "add-port br-theirs theirs-i -- set Interface theirs-i type=internal",
    "add-port br-theirs theirs-v tag=7 -- set Interface theirs-v type=dpdkvhostuserclient "
    "options:vhost-server-path=/run/np/theirs.sock",
)
_THEIR_FLOWS = ("priority=7,in_port=theirs-i,actions=drop", "cookie=0x77,priority=9,arp,actions=NORMAL")
_DEVICE = "net_af_packet0,iface=nic0,qdisc_bypass=1"


@contextmanager
def scene(directory: Path) -> Iterator[Scene]:
    """The backend dpdkvhostuser. ``directory`` is short, for sockets."""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        ovs = stack.enter_context(PrivateOvs(directory / "ovs"))
        receiver = Receiver()
        receiver.start()
        stack.callback(receiver.stop)
        served = stack.enter_context(service("np-svc", "svc0", "52:54:00:00:05:01", "10.0.0.5"))
        stack.enter_context(_nics())
        for words in _THEIRS:
            ovs.vsctl(*words.split())
        run("ip address add 10.9.0.1/24 dev br-theirs".split())
        run("ip link set br-theirs up".split())
        for flow in _THEIR_FLOWS:
            ovs.ofctl("add-flow", "br-theirs", flow)
        options = {
            "agent": {"operation_timeout": str(OPERATION_S)},
            "ovs": {"local_ip": "10.9.0.1"},
            "tasks": {"callback_allow": receiver.url, "callback_timeout": "3"},
        }
        agent = SteppedAgent(directory / "agent", ovs, options)
        calls = operations.Calls(agent, "dpdkvhostuser")

        def state() -> host_state.State:
            return host_state.compared(
                host_state.of_ovs(ovs),
                host_state.of_links(without=("nic0",)),
                host_state.of_files(agent.directory / "vhost", agent.directory / "state"),
                host_state.of_store(agent.directory / "state" / "agent.db"),
            )

        def reset() -> None:
            agent.kill()
            for name in ovs.vsctl("list-br").split():
                if name != "br-theirs":
                    ovs.vsctl("del-br", name)
            shutil.rmtree(agent.directory, ignore_errors=True)
            agent.start()
            status, body = calls.put(operations.NEIGHBOUR, 9)()
            assert status == 200, body

        stack.enter_context(agent)
        reset()
        device = "np" + "x"

        def damage() -> None:
            name = ovs.vsctl("--bare", "--columns=name", "find", "Port", "external_ids:netplugin-port=p1")
            ovs.vsctl("--if-exists", "del-port", name.strip() or device)

        storage = {"bridge": "br-storage", "keep": True, "ovs": {"devices": [_DEVICE]}}
        yield Scene(
            "dpdkvhostuser on OVS-DPDK",
            agent,
            [
                *operations.of_ports(calls, damage),
                *operations.of_overlays(calls),
                *operations.of_physical_networks(calls, storage),
                *operations.of_service_ports(calls, served.spec("dpdkvhostuser")),
                *operations.of_callbacks(calls, receiver),
            ],
            state,
            reset,
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
