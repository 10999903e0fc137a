"""A hypervisor whose driver runs in the test's own process: there at once, where an agent needs to start.

In a guest without KVM an agent takes most of a minute to start. The loop is the agent's own; what
stands for its store are the intents that were put.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from oslo_config import cfg

from agents.ports.converge import Converged
from drivers.linuxbridge.driver import LinuxBridge
from drivers.linuxbridge.options import GROUP, OPTIONS
from netplugin.api.errors import HostError, NetpluginError
from netplugin.api.models import Finding, NetworkSpec, PortSpec
from netplugin.backend import Intent, Overlay
from tests.lab.loop import converge_alone
from tests.lab.namespaces import entered
from tests.lab.traffic_hosts import BackgroundJob, Machine, bare_machine


@dataclass
class Driven(Machine):
    interfaces: Mapping[str, str]
    intents: dict[str, Intent] = field(default_factory=dict)
    overlays: dict[str, Overlay] = field(default_factory=dict)
    _made: int = 0
    _children: list[Child] = field(default_factory=list)

    @contextmanager
    def driver(self) -> Iterator[LinuxBridge]:
        """A driver on this host, for this thread."""
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[], default_config_dirs=[])
        conf.register_opts(OPTIONS, group=GROUP)
        conf.set_override("physical_interfaces", self.interfaces, group=GROUP)
        conf.set_override("local_ip", self.address, group=GROUP)
        with entered(self.name):
            made = LinuxBridge(conf, None)
            try:
                yield made
            finally:
                made.close()

    def put(self, port_id: str, spec: Mapping[str, Any]) -> tuple[int, Any]:
        before = self.intents.get(port_id)
        self._want(port_id, spec)
        intent = self.intents[port_id]
        assert intent.spec is not None
        try:
            with self.driver() as driver:
                driver.validate(intent.spec)
                binding = driver.binding(intent)
            result = self._converge([port_id])
            fault = result.observed[port_id].fault if port_id in result.observed else None
            error = result.failed.get(port_id) or (HostError(fault, step="verify") if fault else None)
        except NetpluginError as refused:
            error = refused
        if error is not None:
            self.intents[port_id] = before or Intent(port_id, None)
            self._converge([port_id])
            return error.status, error.problem().model_dump()
        spec_now, details = intent.spec.model_dump(), dict(result.observed[port_id].details)
        return 200, {
            "state": "active",
            "spec": spec_now,
            "binding": binding.model_dump(),
            "observed": details,
        }

    def delete(self, port_id: str) -> int:
        self.intents[port_id] = Intent(port_id, None)
        assert self._converge([port_id]).failed == {}
        del self.intents[port_id]
        return 204

    def network(self, network_id: str, vni: int, peers: Sequence[str], **fields: Any) -> None:
        values = {"type": "vxlan", "vni": vni, "peers": peers, **fields}
        spec = NetworkSpec.model_validate(values)
        self.overlays[network_id] = Overlay(network_id, spec, 1)
        for port_id, intent in self.intents.items():
            if intent.overlay is not None and intent.overlay.network_id == network_id:
                self.intents[port_id] = replace(intent, overlay=self.overlays[network_id])
                self._converge([port_id])

    def changes(self) -> list[Any]:
        with self.driver() as driver:
            plan = driver.plan(list(self.intents.values()), driver.observe(None, _soon()))
        assert plan.refused == {}
        return list(plan.changes)

    def repair(self) -> None:
        assert self._converge(None).failed == {}

    def port(self, port_id: str) -> dict[str, Any]:
        with self.driver() as driver:
            seen = driver.observe([port_id], _soon()).ports[port_id]
        state = "degraded" if seen.fault else "active"
        return {"state": state, "error": {"detail": seen.fault}, "observed": seen.details}

    def ports(self) -> list[str]:
        return list(self.intents)

    def findings(self) -> dict[str, Finding]:
        with self.driver() as driver:
            return {found.id: found for found in driver.findings((), driver.observe(None, _soon()))}

    def changes_made(self) -> object:
        return self._made

    def begin(self, port_id: str, spec: Mapping[str, Any] | None) -> BackgroundJob:
        """In a process of its own, that can be killed."""
        self._want(port_id, spec)
        pid = os.fork()
        if pid == 0:
            try:
                self._converge([port_id])
            finally:
                os._exit(0)
        self._children.append(Child(pid))
        return self._children[-1]

    def kill(self) -> None:
        for child in self._children:
            child.kill()
        self._children.clear()

    def start(self) -> None:
        self.repair()
        self.intents = {i: intent for i, intent in self.intents.items() if intent.spec is not None}

    def _want(self, port_id: str, spec: Mapping[str, Any] | None) -> None:
        asked = PortSpec.model_validate(spec) if spec is not None else None
        if asked is None or asked.overlay_id is None:
            self.intents[port_id] = Intent(port_id, asked)
            return
        overlay = self.overlays[asked.overlay_id]
        network = asked.network.model_copy(update={"mtu": overlay.spec.mtu})
        asked = asked.model_copy(update={"network": network})
        self.intents[port_id] = Intent(port_id, asked, overlay=overlay)

    def _converge(self, ports: Sequence[str] | None) -> Converged:
        desired = self.intents if ports is None else {i: self.intents[i] for i in ports}
        with self.driver() as driver:
            result = converge_alone(driver, list(desired.values()), whole=ports is None)
        self._made += len(result.changes)
        return result


class Child:
    """A process that was forked."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def is_alive(self) -> bool:
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
        return self._pid != 0

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self._pid, signal.SIGKILL)
            self.join()

    def join(self) -> None:
        if self._pid:
            os.waitpid(self._pid, 0)
            self._pid = 0


def _soon() -> float:
    return time.monotonic() + 60


@contextmanager
def driven(number: int, interfaces: str, *, mtu: int = 9600) -> Iterator[Driven]:
    """A hypervisor on the switch by ``eth1``; ``interfaces`` as in the configuration."""
    pairs = (pair.partition(":") for pair in interfaces.split(","))
    with bare_machine(number, mtu=mtu) as (name, address):
        yield Driven(name, address, {network: device for network, _, device in pairs})
