"""The operations in which faults happen, the same for each backend that has them."""

from __future__ import annotations

import functools
import queue
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.processes import LabError
from tests.lab.steps.agent import SteppedAgent
from tests.lab.steps.matrix import Answer, Call, Operation
from tests.unit.agents.api.test_tasks import Receiver

#: Beside each operation there is a port that nothing happens to.
NEIGHBOUR = "p0"
_FILTER = {"allowed_addresses": [{"ip": "10.0.0.5"}, {"ip": "fd00::5"}]}
_OTHER_FILTER = {"allowed_addresses": [{"ip": "10.0.0.6"}]}
_PEERS, _MORE_PEERS = ["10.9.0.7"], ["10.9.0.7", "10.9.0.8"]
_CALLBACK_S = 60.0


@dataclass(frozen=True)
class Calls:
    """What a platform asks an agent for; each gives a call that may be made again and again."""

    agent: SteppedAgent
    backend: str
    #: Whether ports are on VLANs; else their network is flat (a kernel without VLAN devices).
    vlans: bool = True

    def call(self, method: str, path: str, body: Any = None) -> Call:
        return functools.partial(self.agent.call, method, path, body)

    def spec(self, number: int = 1, vlan_id: int = 100, **fields: Any) -> dict[str, Any]:
        """``network`` replaces the whole network."""
        network: dict[str, Any] = {"type": "flat", "physical_network": "physnet1"}
        if self.vlans:
            network |= {"type": "vlan", "vlan_id": vlan_id}
        return {
            "vm_id": f"vm{number}",
            "mac": f"52:54:00:00:00:{number:02x}",
            "backend": self.backend,
            "network": network,
            **fields,
        }

    def put(self, port_id: str, number: int = 1, **fields: Any) -> Call:
        return self.call("PUT", f"/v1/ports/{port_id}", self.spec(number, **fields))

    def delete(self, port_id: str) -> Call:
        return self.call("DELETE", f"/v1/ports/{port_id}")

    def batch(self, put: Mapping[str, Any], delete: Sequence[str]) -> Call:
        desired = [{"port_id": port_id, "spec": spec} for port_id, spec in put.items()]
        return self.call("POST", "/v1/ports:batch", {"put": desired, "delete": list(delete)})

    def network(self, peers: Sequence[str]) -> Call:
        spec = {"type": "vxlan", "vni": 5001, "peers": list(peers)}
        return self.call("PUT", "/v1/networks/blue", spec)

    def reconcile(self) -> Call:
        return self.call("POST", "/v1/reconcile", {})

    def restart(self) -> Call:
        """The agent is killed and started; a start that fails is told by the status 0."""

        def again() -> Answer:
            self.agent.kill()
            try:
                self.agent.start(ready=False)
            except LabError:
                return 0, None
            return 200, None

        return again

    def by_callback(self, receiver: Receiver, method: str, path: str, body: Any) -> Call:
        """An asynchronous call, whose result has been delivered when this returns."""

        def asked() -> Answer:
            task = str(uuid.uuid4())
            headers = {"taskuuid": task, "callbackurl": receiver.url}
            status, problem = self.agent.call(method, path, body, headers=headers)
            if status != 200:
                return status, problem
            while self.agent.daemon.running:
                try:
                    _, whose, result = receiver.calls.get(timeout=0.2)
                except queue.Empty:
                    if self.agent.get(f"/v1/tasks/{task}")[1] is None:
                        break
                    continue
                if whose == task:
                    return (200, None) if result["success"] else (502, _as_problem(result))
            return 0, None

        return asked


def _as_problem(result: Mapping[str, Any]) -> dict[str, Any]:
    return {"code": "host_error", "step": "callback", "detail": str(result.get("error"))}


def of_ports(calls: Calls, damage: Callable[[], None]) -> list[Operation]:
    """``damage`` breaks the port p1 on the host, behind the agent's back."""
    put, delete = calls.put("p1", port_security=_FILTER), calls.delete("p1")
    changed = calls.put("p1", vlan_id=101, port_security=_OTHER_FILTER, qos={"egress_kbps": 50_000})
    four = {f"p{number}": calls.spec(number) for number in range(1, 4)}

    def damaged() -> Answer:
        damage()
        return calls.reconcile()()

    def damaged_and_restarted() -> Answer:
        calls.agent.kill()
        damage()
        return calls.restart()()

    return [
        Operation("plug", [put], [delete]),
        Operation("change", [changed], [put], [put], [delete]),
        Operation("unplug", [delete], [put], [put], [delete]),
        Operation(
            "batch",
            [calls.batch(four, ["p4"])],
            [calls.batch({"p4": calls.spec(4)}, list(four))],
            [calls.put("p4", 4)],
            [calls.delete("p4")],
        ),
        Operation("reconcile", [damaged], [], [put], [delete]),
        Operation("start", [calls.restart()], [], [put], [delete]),
        Operation("start on a damaged host", [damaged_and_restarted], [], [put], [delete]),
    ]


def of_migrations(calls: Calls) -> list[Operation]:
    """The phases at a destination and at a source, called by the platform."""

    def step(phase: str, **fields: Any) -> Call:
        return calls.call("POST", "/v1/ports/p1:migrate", {"phase": phase, **fields})

    put, delete = calls.put("p1", port_security=_FILTER), calls.delete("p1")
    prepare = step("prepare", port=calls.spec(port_security=_FILTER))
    activate, leave, commit, abort = map(step, ("activate", "leave", "commit", "abort"))

    def phase(name: str, do: Call, undo: Sequence[Call], of: Sequence[Call] = ()) -> Operation:
        return Operation(f"migration: {name}", [do], undo, of, [delete] if of else [], sampled=False)

    return [
        phase("prepare", prepare, [delete]),
        phase("activate", activate, [delete, prepare], [prepare]),
        phase("commit at the destination", commit, [delete, prepare], [prepare]),
        phase("abort at the destination", abort, [prepare], [prepare]),
        phase("leave", leave, [delete, put], [put]),
        phase("commit at the source", commit, [put, leave], [put, leave]),
        phase("abort at the source", abort, [leave], [put, leave]),
    ]


def of_overlays(calls: Calls) -> list[Operation]:
    """A VXLAN network with its first port, and peers that change below it."""
    on_it = calls.put("p1", network={"type": "vxlan", "network_id": "blue"})
    gone = calls.call("DELETE", "/v1/networks/blue")
    few, many, delete = calls.network(_PEERS), calls.network(_MORE_PEERS), calls.delete("p1")
    return [
        Operation("network", [many], [few], [few, on_it], [delete, gone]),
        Operation("first port of an overlay", [on_it], [delete], [few], [gone]),
    ]


def of_physical_networks(calls: Calls, spec: Mapping[str, Any]) -> list[Operation]:
    path = "/v1/physical-networks/storage"
    return [
        Operation("physical network", [calls.call("PUT", path, dict(spec))], [calls.call("DELETE", path)])
    ]


def of_service_ports(calls: Calls, spec: Mapping[str, Any]) -> list[Operation]:
    path = "/v1/service-ports/svc"
    return [Operation("service port", [calls.call("PUT", path, dict(spec))], [calls.call("DELETE", path)])]


def of_callbacks(calls: Calls, receiver: Receiver) -> list[Operation]:
    asked = calls.by_callback(receiver, "PUT", "/v1/ports/p1", calls.spec())
    return [Operation("plug with a callback", [asked], [calls.delete("p1")])]
