"""The hypervisor that is measured: a private OVS-DPDK with an uplink, and an agent on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.bench.ways.agent import Caller, spec_of
from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run

#: The bridge of all who are compared with the agent; theirs has no uplink.
PEERS = "br-bench"
#: Ports of one batch call.
BATCH = 250
#: How often ports are removed that OVS could not remove in time.
_TRIES = 20
#: A veth whose other end is the wire.
_NIC, _WIRE = "nic0", "wire0"
#: The uplink of each backend; of OVS it is DPDK's AF_PACKET driver on that device.
_UPLINKS = {
    "dpdkvhostuser": {"ovs": {"devices": [f"net_af_packet0,iface={_NIC},qdisc_bypass=1"]}},
    "linuxbridge": {"linuxbridge": {"interface": _NIC}},
}


@dataclass
class Lab:
    """An agent; ``ports`` are those that ``fill`` has made. What is measured comes and goes beside them."""

    agent: PrivateAgent
    backend: str
    ports: int = 0

    def keep(self, desired: bool) -> None:
        """Whether bridge and uplink are there without a port: else the first port makes them too."""
        spec = {"keep": desired, **_UPLINKS[self.backend]}
        status, answer = self.agent.call("PUT", "/v1/physical-networks/physnet1", spec)
        if status != 200 or answer["findings"]:
            raise RuntimeError(f"PUT of physnet1: {status} {answer}")

    def fill(self, ports: int) -> None:
        """Make or remove ports, in batches, until there are so many."""
        while self.ports < ports:
            until = min(ports, self.ports + BATCH)
            numbers = range(self.ports, until)
            batch(
                self.agent,
                {"put": [{"port_id": f"p{n}", "spec": spec_of(n, 1, self.backend)} for n in numbers]},
            )
            self.ports = until
        remove(self.agent, [f"p{n}" for n in range(ports, self.ports)])
        self.ports = ports


@dataclass
class OvsLab(Lab):
    ovs: PrivateOvs = field(kw_only=True)

    def log_queues(self, desired: bool) -> None:
        """Whether vswitchd logs every queue at each change (its default), or only what is wrong.

        To the log of the system too: each message opens a socket there if no daemon listens.
        """
        level = "info" if desired else "warn"
        self.ovs.appctl("vlog/set", f"dpif_netdev:syslog:{level}", f"dpif_netdev:file:{level}")


def batch(agent: PrivateAgent, body: Mapping[str, Any]) -> None:
    """Raises: RuntimeError if one of its ports is refused."""
    refused = _refused(agent, body)
    if refused:
        raise RuntimeError(f"POST /v1/ports:batch: {len(refused)} refused: {refused[0]}")


def remove(agent: PrivateAgent, port_ids: Sequence[str]) -> None:
    """Remove the ports, in batches; what OVS has not removed within a call's time is requested again.

    Raises: RuntimeError for any other answer.
    """
    left, refused = list(port_ids), []
    for _ in range(_TRIES):
        refused = [
            result
            for first in range(0, len(left), BATCH)
            for result in _refused(agent, {"delete": left[first : first + BATCH]})
        ]
        left = [result["port_id"] for result in refused if result["error"]["retryable"]]
        if not left:
            break
    if refused:
        raise RuntimeError(f"{len(refused)} ports are not removed: {refused[0]}")


def _refused(agent: PrivateAgent, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results of a batch that are errors. Raises: RuntimeError if the batch itself is refused."""
    caller = Caller(agent.port, timeout=600)
    with closing(caller):
        status, answer = caller.call("POST", "/v1/ports:batch", body)
    if status != 200:
        raise RuntimeError(f"POST /v1/ports:batch: {status} {answer}")
    return [result for result in answer["results"] if result["status"] not in (200, 204)]


@contextmanager
def wire() -> Iterator[None]:
    """The NIC of the hypervisor, with nobody at the far end."""
    run(["ip", "link", "add", _NIC, "type", "veth", "peer", "name", _WIRE])
    try:
        for name in (_NIC, _WIRE):
            run(["sysctl", "-qw", f"net.ipv6.conf.{name}.disable_ipv6=1"])
            run(["ip", "link", "set", name, "up"])
        yield
    finally:
        run(["ip", "link", "delete", _NIC])


@contextmanager
def on_ovs(
    more: Mapping[str, Mapping[str, str]] | None = None, env: Mapping[str, str] | None = None
) -> Iterator[OvsLab]:
    """A new OVS-DPDK and an agent without a port; ``more`` options, and ``env``, are the agent's.

    Bridge and uplink are not there yet: they come with the first port, or by ``keep``.
    """
    directories = [BASE / "ovs", BASE / "agent"]
    try:
        with wire(), PrivateOvs(directories[0]) as ovs:
            options = {
                "DEFAULT": {"log_level": "INFO"},
                # The network is one of the API, so that a caller may say that it stays.
                "ovs": {"bridge_mappings": ""},
                **(more or {}),
            }
            with PrivateAgent(directories[1], ovs, options, as_installed=True, env=env) as agent:
                lab = OvsLab(agent, "dpdkvhostuser", ovs=ovs)
                lab.keep(False)
                lab.log_queues(False)
                ovs.vsctl("add-br", PEERS, "--", "set", "bridge", PEERS, "datapath_type=netdev")
                yield lab
            # Removing a thousand ports takes OVS long, and it is stopped anyway.
            ovs.kill_vswitchd()
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def on_bridges() -> Iterator[Lab]:
    """An agent with the backend ``linuxbridge`` and no port."""
    directory = BASE / "agent"
    options = {"DEFAULT": {"log_level": "INFO"}}
    run(["ip", "link", "add", PEERS, "type", "bridge"])
    try:
        run(["ip", "link", "set", PEERS, "up"])
        with wire(), PrivateAgent(directory, options=options, as_installed=True) as agent:
            lab = Lab(agent, "linuxbridge")
            lab.keep(True)
            try:
                yield lab
            finally:
                lab.fill(0)
    finally:
        run(["ip", "link", "delete", PEERS])
        shutil.rmtree(directory, ignore_errors=True)
