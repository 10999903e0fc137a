"""Hosts of a fleet with real agents on real Linux bridges, each in a network namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.lab.agent import PrivateAgent
from tests.lab.certificates import ADDRESS
from tests.lab.etcd import PrivateEtcd
from tests.lab.namespaces import namespace, within
from tests.lab.processes import run

_BRIDGE, _MTU = "np-fleet", "9000"


@contextmanager
def network() -> Iterator[str]:
    """The network by which such hosts reach etcd, and its address there. One in a sandbox."""
    run(["ip", "link", "add", _BRIDGE, "mtu", _MTU, "type", "bridge"])
    try:
        run(["ip", "address", "add", f"{ADDRESS}/16", "dev", _BRIDGE])
        run(["ip", "link", "set", _BRIDGE, "up"])
        yield ADDRESS
    finally:
        run(["ip", "link", "delete", _BRIDGE])


@contextmanager
def bridge_hosts(etcd: PrivateEtcd, names: Sequence[str]) -> Iterator[dict[str, PrivateAgent]]:
    """Their agents, which run and follow etcd. VXLAN networks end at an address of their own."""
    agents = {}
    with ExitStack() as stack:
        for number, name in enumerate(names, 1):
            netns = stack.enter_context(namespace(f"np-{name}"))
            address = f"10.99.1.{number}"
            far = ["type", "veth", "peer", "name", "eth0", "mtu", _MTU, "netns", netns]
            run(["ip", "link", "add", f"far-{name}", "mtu", _MTU, *far])
            run(["ip", "link", "set", f"far-{name}", "master", _BRIDGE, "up"])
            run(within(netns, ["ip", "address", "add", f"{address}/16", "dev", "eth0"]))
            run(within(netns, ["ip", "link", "set", "eth0", "up"]))
            user = etcd.credentials(name)
            files = {file: str(getattr(user, file)) for file in ("ca", "cert", "key")}
            options = {
                "linuxbridge": {"physical_interfaces": "physnet1:", "local_ip": address},
                "fleet": {"endpoints": ",".join(etcd.endpoints), "host": name, **files},
            }
            agent = PrivateAgent(etcd.directory / name, None, options, netns=netns)
            agents[name] = stack.enter_context(agent)
        yield agents
