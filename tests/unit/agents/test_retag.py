"""Ports whose VLAN changes: which they are, in one batch, and each with a result of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from agents.ports.teams import standby_id
from netplugin.api.batch_models import Batch, BatchPut, BatchResults, Retag
from netplugin.api.errors import HostError
from netplugin.api.models import Features, PortSpec, PortState
from netplugin.backend import Change
from tests.unit.agent import SPEC, Agent, agent
from tests.unit.fakes import FakeBackend, FakeHost

DEADLINE_S = 90.0
ALL = Retag(network="physnet1", from_vlan=100, to_vlan=200)


def on(number: int, vlan: int | None = 100, physnet: str = "physnet1", **fields: Any) -> PortSpec:
    network = {"type": "vlan" if vlan else "flat", "physical_network": physnet, "vlan_id": vlan}
    return PortSpec.model_validate(
        {**SPEC, "mac": f"52:54:00:00:{number >> 8:02x}:{number & 255:02x}", "network": network, **fields}
    )


def put(running: Agent, **specs: PortSpec) -> None:
    puts = tuple(BatchPut(port_id=port_id, spec=spec) for port_id, spec in specs.items())
    results = asyncio.run(running.service.ports.batch(Batch(put=puts))).results
    assert {result.status for result in results} == {200}


def retag(running: Agent, desired: Retag) -> dict[str, int]:
    results = asyncio.run(running.service.ports.retag(desired)).results
    return {result.port_id: result.status for result in results}


def vlans(running: Agent) -> dict[str, int | None]:
    return {port_id: spec.network.vlan_id for port_id, spec in sorted(running.host.ports.items())}


def test_the_ports_of_one_vlan_of_one_network_change(running: Agent) -> None:
    put(running, a=on(1), b=on(2, queues=2), c=on(3, 101), d=on(4, None), e=on(5, 100, "physnet2"))
    assert retag(running, ALL) == {"a": 200, "b": 200}
    assert vlans(running) == {"a": 200, "b": 200, "c": 101, "d": None, "e": 100}
    assert running.host.ports["b"] == on(2, 200, queues=2), "nothing else of a port"
    written = len(running.host.written)
    assert retag(running, ALL) == {} and len(running.host.written) == written


def test_ports_that_are_named_change_and_the_others_say_why_not(running: Agent) -> None:
    put(running, a=on(1), b=on(2, 300), flat=on(3, None))
    desired = Retag(ports=("a", "b", "flat", "none"), to_vlan=200)
    assert retag(running, desired) == {"a": 200, "b": 200, "flat": 409, "none": 404}
    assert vlans(running) == {"a": 200, "b": 200, "flat": None}
    written = len(running.host.written)
    assert retag(running, desired)["a"] == 200 and len(running.host.written) == written, "the same again"


def test_a_port_that_fails_keeps_its_vlan_and_no_other_does(running: Agent) -> None:
    put(running, a=on(1), b=on(2), c=on(3))

    def refuses(change: Any) -> None:
        if change.ports == ("b",) and change.spec.network.vlan_id == 200:
            raise HostError("no", step="apply")

    running.host.on_apply = refuses
    assert retag(running, ALL) == {"a": 200, "b": 502, "c": 200}
    assert vlans(running) == {"a": 200, "b": 100, "c": 200}
    assert running.service.ports.get("b").state is PortState.ACTIVE
    running.host.on_apply = lambda change: None
    assert retag(running, ALL) == {"b": 200}, "the same call again is for those that are left"


def test_a_call_before_it_in_the_queue_keeps_its_effect(running: Agent) -> None:
    """The spec is amended when its turn comes, not replaced by what it was when the call came."""
    busy, go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        busy.set()
        assert go_on.wait(DEADLINE_S)

    async def scenario() -> BatchResults:
        running.host.on_observe = hold
        first = asyncio.create_task(running.service.ports.put("first", on(9, 7)))
        await asyncio.to_thread(busy.wait, DEADLINE_S)
        calls: list[Any] = [
            running.service.ports.put("rate", on(1, qos={"egress_kbps": 1000})),
            running.service.ports.put("moved", on(2, 300)),
            running.service.ports.delete("gone"),
            running.service.ports.retag(ALL),
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(first, *tasks)
        results: BatchResults = tasks[-1].result()
        return results

    put(running, rate=on(1), moved=on(2), gone=on(3))
    answer = asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    assert {r.port_id: r.status for r in answer.results} == {"rate": 200, "moved": 409, "gone": 404}
    assert running.host.ports["rate"] == on(1, 200, qos={"egress_kbps": 1000})
    assert vlans(running) == {"first": 7, "moved": 300, "rate": 200}


def test_all_of_a_backend_change_in_one_batch_however_many(tmp_path: Path) -> None:
    class Counting(FakeBackend):
        applied: ClassVar[list[int]] = []

        def apply(self, changes: Any, deadline: float) -> Any:
            self.applied.append(len(changes))
            return super().apply(changes, deadline)

    one, two = Counting("one"), Counting("two", FakeHost())
    with agent(tmp_path, backends={"one": one, "two": two}) as running:
        many = {f"p{n}": on(n, backend="one" if n % 3 else "two") for n in range(300)}
        put(running, **many)
        Counting.applied.clear()
        assert set(retag(running, ALL).values()) == {200}
        assert sorted(Counting.applied) == [100, 200]


def test_all_are_stored_before_the_first_changes(tmp_path: Path) -> None:
    """So after a kill in the middle the next start finishes all of them."""
    host = FakeHost()

    with agent(tmp_path, backends={"fake": FakeBackend("fake", host)}) as running:
        put(running, a=on(1), b=on(2), c=on(3))
        stored: list[int | None] = []

        def look(change: Change) -> None:
            if not stored:
                stored.extend(record.spec.network.vlan_id for record in running.store.records())

        host.on_apply = look
        assert retag(running, ALL) == {"a": 200, "b": 200, "c": 200}
        assert stored == [200, 200, 200]


class Card(FakeBackend):
    features = Features(networks=("vlan",), max_queues=2, virtual_functions=True, teaming=True)


def test_a_team_changes_with_its_standby(tmp_path: Path) -> None:
    card, soft = FakeHost(), FakeHost()
    backends = {"card": Card("card", card), "soft": FakeBackend("soft", soft)}
    with agent(tmp_path, backends=backends, teaming_backend="soft") as running:
        put(running, team=on(1, backend="card", vf={"teaming": True}))
        assert retag(running, ALL) == {"team": 200}
        (vf,), (standby,) = card.ports.values(), soft.ports.values()
        assert vf.network.vlan_id == standby.network.vlan_id == 200
        assert retag(running, Retag(ports=(standby_id("team"),), to_vlan=300)) == {standby_id("team"): 409}


@pytest.mark.parametrize(
    "wrong",
    [
        {"to_vlan": 200},
        {"to_vlan": 200, "network": "physnet1"},
        {"to_vlan": 200, "from_vlan": 100},
        {"to_vlan": 200, "network": "physnet1", "from_vlan": 100, "ports": ["a"]},
        {"to_vlan": 200, "from_vlan": 100, "ports": ["a"]},
        {"to_vlan": 200, "ports": ["a", "a"]},
        {"to_vlan": 100, "network": "physnet1", "from_vlan": 100},
        {"to_vlan": 4095, "ports": ["a"]},
        {"to_vlan": "200", "ports": ["a"]},
        {"network": "physnet1", "from_vlan": 100},
    ],
)
def test_what_does_not_say_which_ports_or_which_vlan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Retag.model_validate(wrong)
