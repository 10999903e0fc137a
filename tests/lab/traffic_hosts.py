"""Hypervisors with Linux bridges, each in a namespace with an agent, on one switch."""

from __future__ import annotations

import json
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import namespace, within
from tests.lab.processes import run
from tests.lab.switch import wire
from tests.lab.traffic_taps import TapVm

BASE = Path("/run/np")
#: The interface of each host that leads to the switch.
WIRE = "eth1"


@dataclass
class Machine(ABC):
    """One hypervisor, in a namespace. ``address`` is that of its tunnels."""

    name: str
    address: str

    def sh(self, *command: str) -> str:
        """What a program prints that runs on this host."""
        return run(within(self.name, command))

    def json(self, *command: str) -> Any:
        return json.loads(self.sh(*command) or "[]")

    def links(self) -> set[str]:
        return {entry["ifname"] for entry in self.json("ip", "-j", "link")}

    def link(self, name: str) -> dict[str, Any]:
        """One device; empty if there is none."""
        found: list[dict[str, Any]] = self.json("ip", "-j", "-d", "link")
        return next((entry for entry in found if entry["ifname"] == name), {})

    # -- whoever sees to its ports ---------------------------------------------------------------

    @abstractmethod
    def put(self, port_id: str, spec: Mapping[str, Any]) -> tuple[int, Any]:
        """Ask for a port; gives the status and the port, or the problem."""

    @abstractmethod
    def delete(self, port_id: str) -> int: ...

    @abstractmethod
    def network(self, network_id: str, vni: int, peers: Sequence[str], **fields: Any) -> None: ...

    @abstractmethod
    def changes(self) -> list[Any]:
        """What would be changed."""

    @abstractmethod
    def repair(self) -> None:
        """Look at everything."""

    @abstractmethod
    def port(self, port_id: str) -> dict[str, Any]: ...

    @abstractmethod
    def ports(self) -> list[str]: ...

    @abstractmethod
    def changes_made(self) -> object:
        """Something that differs as soon as anything was changed."""

    @abstractmethod
    def begin(self, port_id: str, spec: Mapping[str, Any] | None) -> BackgroundJob:
        """A PUT, or (None) a DELETE, that is not waited for: see ``kill``."""

    @abstractmethod
    def kill(self) -> None:
        """By SIGKILL, whatever it is about."""

    @abstractmethod
    def start(self) -> None:
        """Start it again, and wait until it has looked at everything."""

    def plug(self, port_id: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        status, body = self.put(port_id, spec)
        assert status == 200 and body["state"] == "active", body
        found: dict[str, Any] = body
        return found

    def unplug(self, *port_ids: str) -> None:
        for port_id in port_ids:
            assert self.delete(port_id) == 204

    @contextmanager
    def vm(self, port_id: str, spec: Mapping[str, Any], address: str) -> Iterator[TapVm]:
        """A VM on the port, which is plugged if it is not."""
        body = self.plug(port_id, spec)
        mtu = body["spec"]["network"]["mtu"]
        tap, mac, queues = body["binding"]["device"], body["spec"]["mac"], body["spec"]["queues"]
        name = f"vm-{port_id}"
        with TapVm(name, self.name, tap, mac, address, mtu=mtu, queues=queues) as vm:
            yield vm


class BackgroundJob(Protocol):
    def is_alive(self) -> bool: ...
    def join(self) -> None: ...


@dataclass
class Host(Machine):
    """With an agent, called over HTTP."""

    agent: PrivateAgent

    def put(self, port_id: str, spec: Mapping[str, Any]) -> tuple[int, Any]:
        return self.agent.call("PUT", f"/v1/ports/{port_id}", spec)

    def delete(self, port_id: str) -> int:
        return self.agent.call("DELETE", f"/v1/ports/{port_id}")[0]

    def network(self, network_id: str, vni: int, peers: Sequence[str], **fields: Any) -> None:
        spec = {"type": "vxlan", "vni": vni, "peers": list(peers), **fields}
        status, body = self.agent.call("PUT", f"/v1/networks/{network_id}", spec)
        assert status == 200, body

    def changes(self) -> list[Any]:
        status, report = self.agent.call("POST", "/v1/reconcile", {"dry_run": True})
        assert status == 200 and report["errors"] == [], report
        found: list[dict[str, Any]] = report["changes"]
        return found

    def repair(self) -> None:
        status, report = self.agent.call("POST", "/v1/reconcile", {})
        assert status == 200 and report["errors"] == [], report

    def port(self, port_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.agent.get(f"/v1/ports/{port_id}")[1]
        return found

    def ports(self) -> list[str]:
        return [port["port_id"] for port in self.agent.get("/v1/ports")[1]]

    def changes_made(self) -> object:
        lines = str(self.agent.get("/metrics")[1]).splitlines()
        return [line for line in lines if line.startswith("netplugin_changes")]

    def begin(self, port_id: str, spec: Mapping[str, Any] | None) -> BackgroundJob:
        work = self.delete if spec is None else self.put
        thread = threading.Thread(target=work, args=(port_id,) if spec is None else (port_id, spec))
        thread.start()
        return thread

    def kill(self) -> None:
        self.agent.kill()

    def start(self) -> None:
        self.agent.start()


@contextmanager
def host(
    number: int,
    interfaces: str = "physnet1:,physnet2:",
    *,
    mtu: int = 9600,
    family: int = 4,
    tunnels: bool = True,
    reconcile_s: int = 60,
) -> Iterator[Host]:
    """A hypervisor with an agent, on the switch by ``eth1`` (its tunnels' interface too)."""
    with bare_machine(number, mtu=mtu, family=family) as (name, address), ExitStack() as stack:
        options = {"physical_interfaces": interfaces}
        options |= {"local_ip": address} if tunnels else {}
        directory = BASE / name
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        groups = {"linuxbridge": options, "agent": {"reconcile_interval": str(reconcile_s)}}
        agent = PrivateAgent(directory, options=groups, netns=name)
        yield Host(name, address, stack.enter_context(agent))


@contextmanager
def bare_machine(number: int, *, mtu: int = 9600, family: int = 4) -> Iterator[tuple[str, str]]:
    """The namespace, with its wire to the switch, and the address for tunnels."""
    name = f"np-h{number}"
    address = f"10.9.0.{number}" if family == 4 else f"fd09::{number}"
    with namespace(name):
        wire(name, mtu=mtu)
        prefix, more = ("24", []) if family == 4 else ("64", ["nodad"])
        run(within(name, ["ip", "addr", "add", f"{address}/{prefix}", "dev", WIRE, *more]))
        yield name, address


def make_spec(number: int, network: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "vm_id": f"vm{number}",
        "mac": f"52:54:00:00:00:{number:02x}",
        "backend": "linuxbridge",
        "network": dict(network),
        **fields,
    }


def overlay(network_id: str) -> dict[str, Any]:
    return {"type": "vxlan", "network_id": network_id}
