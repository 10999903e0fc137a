"""Ports made by the agent: PUT over a kept connection, as a platform's client would hold it."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

from tests.bench.ways import Plugged, Way
from tests.functional.conftest import make_spec
from tests.lab.agent import PrivateAgent

#: The parts of ``timings_ms`` that are spent waiting for the host; the rest is the agent's own share.
HOST_PARTS = ("vswitchd", "openflow", "netlink", "nftables")
_VLANS = 4094


def spec_of(number: int, addresses: int = 1, backend: str = "dpdkvhostuser") -> dict[str, Any]:
    """The port of a VM with so many addresses, none of which another has; 0: filtered by its MAC."""
    security = {
        "allowed_addresses": [
            {"ip": f"10.{number >> 8 & 255}.{number & 255}.{last}"} for last in range(1, addresses + 1)
        ]
    }
    vlan_id = None if backend == "linuxbridge" else 1 + number % _VLANS
    return make_spec(number, vlan_id, port_security=security, backend=backend)


class Caller:
    """One kept connection to the agent."""

    def __init__(self, port: int, timeout: float = 120.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        self.send(method, path, body)
        return self.receive()

    def send(self, method: str, path: str, body: Any = None) -> None:
        text = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, text, {"content-type": "application/json"})

    def receive(self) -> tuple[int, Any]:
        answer = self._connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None

    def close(self) -> None:
        self._connection.close()


class ByAgent(Way):
    """``PUT /v1/ports/{id}``: committed to disk, configured, filtered and read back when it answers."""

    name = "agent"

    def __init__(self, agent: PrivateAgent, addresses: int, backend: str = "dpdkvhostuser") -> None:
        self.addresses = addresses
        self._caller = Caller(agent.port)
        self._backend = backend

    def plug(self, number: int) -> Plugged:
        spec = spec_of(number, self.addresses or 0, self._backend)
        start = time.perf_counter()
        status, body = self._caller.call("PUT", f"/v1/ports/one{number}", spec)
        ms = (time.perf_counter() - start) * 1e3
        if status != 200:
            raise RuntimeError(f"PUT of one{number}: {status} {body}")
        parts = {name: body["timings_ms"][name] for name in HOST_PARTS if name in body["timings_ms"]}
        return Plugged(ms, {**parts, "own share": ms - sum(parts.values())})

    def unplug(self, number: int) -> float:
        start = time.perf_counter()
        status, body = self._caller.call("DELETE", f"/v1/ports/one{number}")
        if status != 204:
            raise RuntimeError(f"DELETE of one{number}: {status} {body}")
        return (time.perf_counter() - start) * 1e3
