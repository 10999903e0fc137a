"""A hypervisor of each software backend between a wire of physnet1 and a VXLAN peer, where a test listens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.functional import hosts_ovs
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import connect, namespace
from tests.lab.switch import SWITCH, silent_peer, switch
from tests.lab.traffic_hosts import BASE, Host, bare_machine

#: The namespace at the far end of the wire, and the names of both ends.
FAR, FAR_WIRE, WIRE = "np-far", "far2", "eth2"
PEER = "10.9.0.254"


@contextmanager
def wired_linuxbridge() -> Iterator[Host]:
    with _surroundings(), ExitStack() as stack:
        name, address = stack.enter_context(bare_machine(1))
        connect(name, WIRE, FAR, FAR_WIRE)
        options = {"physical_interfaces": f"physnet1:{WIRE}", "local_ip": address}
        stack.callback(shutil.rmtree, BASE / name, ignore_errors=True)
        agent = PrivateAgent(BASE / name, options={"linuxbridge": options}, netns=name)
        yield Host(name, address, stack.enter_context(agent))


@contextmanager
def wired_ovs() -> Iterator[hosts_ovs.Host]:
    with _surroundings(), hosts_ovs.host(1, uplinks=[WIRE], cabled=False, memory_mb=128) as made:
        connect(made.name, WIRE, FAR, FAR_WIRE)
        yield made


def outside(host_name: str, *, overlay: bool) -> tuple[str, str]:
    """Where what leaves the host is heard, as namespace and device: at the VXLAN peer, or on the wire."""
    return (SWITCH, f"{host_name}-eth1") if overlay else (FAR, FAR_WIRE)


@contextmanager
def _surroundings() -> Iterator[None]:
    with switch(), silent_peer(PEER), namespace(FAR):
        yield
