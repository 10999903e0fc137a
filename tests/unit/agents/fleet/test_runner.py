"""A host that follows an etcd in memory: what it makes, reports and refuses, and what it does on its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.api.audit import AuditLog
from agents.api.roles import BodyRules, Role
from agents.fleet import carry, runner
from agents.fleet.runner import Fleet
from agents.fleet.settings import FleetSettings
from agents.store.fleet import CLAIM, Known
from netplugin import options
from netplugin.api.batch_models import Batch, BatchPut, Retag
from netplugin.api.client import Client as ApiClient
from netplugin.api.conditions import Condition
from netplugin.api.errors import Conflict, HostError
from netplugin.api.models import NetworkSpec, PortSpec, PortState
from netplugin.fleet.names import Credentials, Kind, Ref
from tests.unit.agent import DEADLINE_S, SPEC, Agent, agent
from tests.unit.agents.fleet.etcd import Client, MemoryEtcd

HOST = "h1"
DESIRED, REPORTED = f"/netplugin/v1/desired/{HOST}", f"/netplugin/v1/reported/{HOST}"
NETWORK = {"type": "vxlan", "vni": 5001, "peers": ["10.0.0.2"]}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No random waits, and short ones between two tries."""
    chance = SimpleNamespace(uniform=lambda least, most: 0.01, shuffle=lambda names: None)
    monkeypatch.setattr(runner, "random", chance)
    monkeypatch.setattr(runner, "_REPORT_S", 0.2)
    monkeypatch.setattr(carry, "_FIRST_S", 0.05)


def settings(role: Role = Role.PLUG, host: str = HOST) -> FleetSettings:
    return FleetSettings(("h:1",), host, Credentials(Path("ca")), role)


@asynccontextmanager
async def following(
    host: Agent, etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch, role: Role = Role.PLUG
) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(runner, "Etcd", lambda *_: Client(etcd))
    rules = BodyRules((), host.service.ports.moved_by)
    audit = AuditLog(None)
    fleet = Fleet(settings(role), host.service, host.store, rules, audit, host.shared.supervisor)
    task = asyncio.create_task(fleet.keep())
    try:
        yield fleet
        assert not task.done(), task
        assert not host.shared.supervisor.failures()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        audit.close()


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while not (found := condition()):
            await asyncio.sleep(0.01)
    return found


async def desire(etcd: MemoryEtcd, path: str, generation: int, spec: Any = None, **more: Any) -> int:
    what = {"deleted": True, **more} if spec is None else {"spec": spec}
    return await etcd.put(f"{DESIRED}/{path}", {"generation": generation, **what})


def summary(etcd: MemoryEtcd) -> dict[str, Any]:
    found: dict[str, Any] = etcd.value(f"{REPORTED}/summary") or {"revision": -1, "counts": {}}
    return found


def owned(running: Agent) -> int:
    """What was carried out, beyond the claims."""
    return sum(known.generation > 0 for known in running.store.fleet.known.values())


def spec(number: int, **fields: Any) -> dict[str, Any]:
    return SPEC | {"mac": f"52:54:00:00:00:{number:02x}"} | fields


def run(work: Awaitable[None]) -> None:
    async def within() -> None:
        await work

    asyncio.run(within())


def test_what_etcd_has_is_made_in_order_verified_and_reported(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        on = {"network": {"type": "vxlan", "network_id": "net"}}
        await desire(etcd, "port/p1", 1, spec(1, **on))
        await desire(etcd, "network/net", 1, NETWORK)
        async with following(running, etcd, monkeypatch) as fleet:
            written = await desire(etcd, "port/p2", 1, spec(2))
            await until(lambda: summary(etcd)["revision"] >= written)
            assert set(running.host.ports) == {"p1", "p2"} and fleet.connected
            assert summary(etcd)["counts"] == {"owned": 3, "open": 0}
            assert etcd.under(REPORTED) == [f"{REPORTED}/summary"]
            assert etcd.value(f"/netplugin/v1/alive/{HOST}")["identity"] == running.store.identity
            await desire(etcd, "network/net", 2)  # first the port, in whatever order they are written
            removed = await desire(etcd, "port/p1", 2)
            await until(
                lambda: summary(etcd)["revision"] >= removed and not summary(etcd)["counts"].get("failed")
            )
            assert set(running.host.ports) == {"p2"} and running.store.networks() == []
            # The writer takes the removals away.
            await etcd.write([(f"{DESIRED}/port/p1", None), (f"{DESIRED}/network/net", None)])
            await until(lambda: list(running.store.fleet.known) == [Ref(Kind.PORT, "p2")])

    run(work())


def test_a_port_that_the_host_refuses_is_reported_and_tried_again(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = True

    def apply(change: Any) -> None:
        if refuses and "p1" in change.ports:
            raise HostError("the kernel says no", step="apply")

    running.host.on_apply = apply

    async def work() -> None:
        nonlocal refuses
        etcd = MemoryEtcd()
        async with following(running, etcd, monkeypatch):
            await desire(etcd, "port/p1", 1, spec(1))
            await desire(etcd, "port/p2", 1, spec(2))
            fault = await until(lambda: etcd.value(f"{REPORTED}/port/p1"))
            assert fault["state"] == "failed" and "says no" in fault["error"]["detail"]
            await until(lambda: running.store.get("p2"))
            refuses = False
            await until(lambda: not etcd.under(f"{REPORTED}/port/"))
            assert set(running.host.ports) == {"p1", "p2"}

    run(work())


def test_the_last_of_several_changes_counts_while_the_host_is_slow(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, free = threading.Event(), threading.Event()

    def apply(change: Any) -> None:
        if "p1" in change.ports:
            entered.set()
            assert free.wait(DEADLINE_S)

    running.host.on_apply = apply

    async def work() -> None:
        etcd = MemoryEtcd()
        async with following(running, etcd, monkeypatch) as fleet:
            await until(lambda: fleet.connected)
            await desire(etcd, "port/p1", 1, spec(1))
            await until(entered.is_set)
            await desire(etcd, "port/p1", 2, spec(1, qos={"egress_kbps": 5}))
            await desire(etcd, "port/p1", 1, spec(1))  # of a writer that is late
            await desire(etcd, "port/p1", 3, spec(1, qos={"egress_kbps": 7}))
            written = await desire(etcd, "port/p2", 1, spec(2))
            await until(lambda: len(fleet._carrier.open) == 2)
            assert summary(etcd)["revision"] < written
            free.set()
            await until(lambda: summary(etcd)["revision"] >= written)
            assert running.host.ports["p1"].qos.egress_kbps == 7 and "p2" in running.host.ports
            assert {known.generation for known in running.store.fleet.known.values()} == {3, 1}

    run(work())


def test_a_value_that_is_corrected_is_not_reported_with_the_error_before(
    running: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried, corrected, free = 0, False, threading.Event()

    def apply(change: Any) -> None:
        nonlocal tried
        assert change.ports == ("p1",)
        if not corrected:
            tried += 1
            raise HostError("the kernel says no", step="apply")
        assert free.wait(DEADLINE_S)

    running.host.on_apply = apply

    async def work() -> None:
        nonlocal corrected
        etcd = MemoryEtcd()
        async with following(running, etcd, monkeypatch):
            await desire(etcd, "port/p1", 1, spec(1))
            await until(lambda: etcd.value(f"{REPORTED}/port/p1") and tried >= 3)
            await etcd.fall()  # what fails goes on as it was after a new connection
            await etcd.fall(False)
            lines = [each.message for each in caplog.records if "says no" in each.message]
            assert len(lines) == 1 and lines[0].startswith("fleet: port/p1"), lines
            corrected, written = True, await desire(etcd, "port/p1", 2, spec(1))
            await until(lambda: not etcd.under(f"{REPORTED}/port/"))
            assert summary(etcd)["revision"] < written
            free.set()
            await until(lambda: summary(etcd)["revision"] >= written)

    run(work())


def test_a_revision_is_not_reported_before_its_steps_are_known(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store is slow to forget a removal whose key has gone in the same revision."""
    saved, free = running.store.fleet.save, threading.Event()

    def save(*of: Any, gone: frozenset[Ref] = frozenset(), **more: Any) -> None:
        assert not gone or free.wait(DEADLINE_S)
        saved(*of, gone=gone, **more)

    async def work() -> None:
        etcd = MemoryEtcd()
        await desire(etcd, "port/old", 2)
        async with following(running, etcd, monkeypatch):
            await until(lambda: owned(running) == 1)
            monkeypatch.setattr(running.store.fleet, "save", save)
            running.host.on_apply = lambda change: assert_free(free)
            value = json.dumps({"generation": 1, "spec": spec(1)}).encode()
            written = await etcd.write([(f"{DESIRED}/port/old", None), (f"{DESIRED}/port/p1", value)])
            await asyncio.sleep(0.6)
            assert summary(etcd)["revision"] < written
            free.set()
            await until(lambda: summary(etcd)["revision"] >= written)
            assert set(running.host.ports) == {"p1"}

    run(work())


def assert_free(free: threading.Event) -> None:
    assert free.wait(DEADLINE_S)


def test_a_port_that_fails_later_is_reported(running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        async with following(running, etcd, monkeypatch):
            await desire(etcd, "port/p1", 1, spec(1))
            record = await until(lambda: running.store.get("p1"))
            await until(lambda: running.store.get("p1").state is PortState.ACTIVE)
            running.host.faults["p1"] = "its link is down"
            await running.service.ports.put("p1", record.spec, Condition(override=True))
            fault = await until(lambda: etcd.value(f"{REPORTED}/port/p1"))
            assert fault["state"] == "degraded" and "link" in fault["error"]["detail"]

    run(work())


def test_the_fleet_has_the_role_that_the_host_gives_it(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_port = spec(1, port_security={"enabled": False})

    async def work() -> None:
        etcd = MemoryEtcd()
        await desire(etcd, "port/p1", 1, open_port)
        await desire(etcd, "physical-network/physnet9", 1, {"ovs": {}})
        await desire(etcd, "service-port/s1", 1, {**service, "device": "tap9"})
        async with following(running, etcd, monkeypatch):
            await until(lambda: len(etcd.under(f"{REPORTED}/")) == 4)
            for key in etcd.under(f"{REPORTED}/"):
                if not key.endswith("summary"):
                    assert etcd.value(key)["error"]["code"] == "forbidden", key
        async with following(running, etcd, monkeypatch, Role.OPERATE):
            await until(lambda: "p1" in running.host.ports)
        made = {Ref(Kind.PHYSICAL_NETWORK, "physnet8"): Known(1, "value", "tag")}
        running.store.fleet.save(known=made)
        await desire(etcd, "physical-network/physnet8", 2)
        async with following(running, etcd, monkeypatch):
            key = f"{REPORTED}/physical-network/physnet8"
            error = await until(lambda: (etcd.value(key) or {}).get("error"))
            assert error["code"] == "forbidden"

    service = {name: SPEC[name] for name in ("backend", "network", "mac")}
    run(work())


def test_what_the_fleet_has_made_is_changed_locally_by_those_who_mean_it(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports, override = running.service.ports, Condition(override=True)
    other = PortSpec.model_validate(spec(1, qos={"egress_kbps": 5}))

    async def work() -> None:
        etcd = MemoryEtcd()
        await desire(etcd, "port/p1", 1, spec(1))
        await desire(etcd, "network/net", 1, NETWORK)
        async with following(running, etcd, monkeypatch):
            await until(lambda: owned(running) == 2)
            net = NetworkSpec.model_validate(NETWORK | {"vni": 7})
            for refused in (
                ports.put("p1", other),
                ports.delete("p1"),
                running.service.networks.put("net", net),
                running.service.networks.delete("net"),
            ):
                with pytest.raises(Conflict, match="--override") as found:
                    await refused
                assert "fleet's" in found.value.detail
            batch = Batch(put=(BatchPut(port_id="p1", spec=other),), delete=())
            retag = Retag(to_vlan=7, ports=("p1",))
            assert [r.status for r in (await ports.batch(batch)).results] == [409]
            assert [r.status for r in (await ports.retag(retag)).results] == [409]
            assert [
                r.status for r in (await ports.batch(batch.model_copy(update={"override": True}))).results
            ] == [200]
            fault = await until(lambda: etcd.value(f"{REPORTED}/port/p1"))
            assert fault["state"] == "overridden" and fault["generation"] == 1
            await ports.delete("p1", override)
            await asyncio.sleep(0.3)
            assert running.host.ports == {}, "the fleet made it again before it was changed there"
            await desire(etcd, "port/p1", 2, spec(1))
            await until(lambda: not etcd.under(f"{REPORTED}/port/") and running.host.ports)

    run(work())
    running.store.fleet.is_on = False  # as without [fleet] endpoints
    run(ports.delete("p1"))


def test_a_removal_of_what_the_fleet_could_not_make_removes_nothing(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        await running.service.ports.put("p1", PortSpec.model_validate(spec(1, queues=2)))
        async with following(running, etcd, monkeypatch):
            await desire(etcd, "port/p1", 1, spec(1))  # queues cannot change
            await until(lambda: etcd.value(f"{REPORTED}/port/p1"))
            await desire(etcd, "port/p1", 2)
            await until(lambda: not etcd.under(f"{REPORTED}/port/"))
            assert set(running.host.ports) == {"p1"}

    run(work())


def test_a_port_that_was_being_made_when_the_agent_was_killed_is_the_fleets(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its value may be a removal by then."""
    saved, killed = running.store.fleet.save, False

    def save(memory: Any = None, known: Any = None, **more: Any) -> None:
        if not killed or known is None or CLAIM in known.values():
            saved(memory, known, **more)

    monkeypatch.setattr(running.store.fleet, "save", save)

    async def work() -> None:
        nonlocal killed
        etcd = MemoryEtcd()
        killed = True
        async with following(running, etcd, monkeypatch):
            await desire(etcd, "port/p1", 1, spec(1))
            await until(lambda: "p1" in running.host.ports)
        assert list(running.store.fleet.known.values()) == [CLAIM]
        killed = False
        await desire(etcd, "port/p1", 2)
        async with following(running, etcd, monkeypatch):
            await until(lambda: running.host.ports == {})
            await etcd.write([(f"{DESIRED}/port/p1", None)])
            await until(lambda: running.store.fleet.known == {})

    run(work())


def test_a_port_of_a_claim_without_a_key_is_unlisted(running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        await running.service.ports.put("p1", PortSpec.model_validate(spec(1)))
        running.store.fleet.save(known={Ref(Kind.PORT, "p1"): CLAIM})
        async with following(running, etcd, monkeypatch):
            fault = await until(lambda: etcd.value(f"{REPORTED}/port/p1"))
            assert fault["state"] == "unlisted" and set(running.host.ports) == {"p1"}

    run(work())


def test_what_was_made_here_while_there_was_no_fleet_is_not_removed_by_it(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        etcd, store = MemoryEtcd(), running.store
        for number in range(3):
            await desire(etcd, f"port/p{number}", 1, spec(number))
        async with following(running, etcd, monkeypatch):
            await until(lambda: owned(running) == 3)
        store.fleet.is_on = False
        store.fleet.turn_off()
        await running.service.ports.delete("p1")
        other = PortSpec.model_validate(spec(1, qos={"egress_kbps": 5}))
        await running.service.ports.put("p1", other)
        await running.service.ports.put("p2", PortSpec.model_validate(spec(2, qos={"egress_kbps": 5})))
        await desire(etcd, "port/p0", 2)
        await desire(etcd, "port/p1", 2)
        async with following(running, etcd, monkeypatch):
            await until(lambda: set(running.host.ports) == {"p1", "p2"})
            fault = await until(lambda: etcd.value(f"{REPORTED}/port/p2"))
            assert "no fleet" in fault["error"]["detail"] and running.host.ports["p2"].qos.egress_kbps == 5
            await desire(etcd, "port/p2", 2, spec(2))
            await until(lambda: running.host.ports["p2"].qos.egress_kbps is None)
            assert not store.fleet.memory.was_off and running.host.ports["p1"].qos.egress_kbps == 5

    run(work())


def test_a_claim_for_a_port_that_never_came_goes_with_its_key(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        await desire(etcd, "port/p1", 1, spec(1, network={"type": "vxlan", "network_id": "none"}))
        async with following(running, etcd, monkeypatch):
            await until(lambda: etcd.value(f"{REPORTED}/port/p1"))
            assert summary(etcd)["counts"]["owned"] == 0
        await etcd.write([(f"{DESIRED}/port/p1", None)])
        async with following(running, etcd, monkeypatch):
            await until(lambda: running.store.fleet.known == {})

    run(work())


def test_without_etcd_the_host_goes_on_and_merges_later(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        async with following(running, etcd, monkeypatch) as fleet:
            for number in range(3):
                await desire(etcd, f"port/p{number}", 1, spec(number))
            await until(lambda: owned(running) == 3)
            await etcd.fall()
            await until(lambda: not fleet.connected)
            assert "nobody listens" in fleet.findings()[0].found
            await desire(etcd, "port/p0", 2)
            await desire(etcd, "port/p9", 1, spec(9))
            assert set(running.host.ports) == {"p0", "p1", "p2"}
            await etcd.fall(False)
            await until(lambda: set(running.host.ports) == {"p1", "p2", "p9"})
            await until(lambda: fleet.connected and fleet.findings() == [])

    run(work())


def test_many_removals_that_are_read_wait_for_an_operator(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        for number in range(8):
            await desire(etcd, f"port/p{number}", 1, spec(number))
        async with following(running, etcd, monkeypatch):
            await until(lambda: owned(running) == 8)
        for number in range(7):
            await desire(etcd, f"port/p{number}", 2)
        async with following(running, etcd, monkeypatch):
            await until(lambda: summary(etcd)["counts"].get("waiting") == 7)
            assert len(running.host.ports) == 8
            await desire(etcd, "port/p7", 2)  # that one comes by the watch
            await until(lambda: len(running.host.ports) == 7)
            name = f"{etcd.cluster_id:x}"
            word = {"number": 1, "cluster": name, "replaces": name, "revision": etcd.revision}
            await etcd.put(f"/netplugin/v1/accepted/{HOST}", word)
            await until(lambda: running.host.ports == {})

    run(work())


def test_an_older_copy_is_refused_however_far_it_grows(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        await desire(etcd, "port/p1", 1, spec(1))
        async with following(running, etcd, monkeypatch):
            await until(lambda: summary(etcd)["counts"].get("owned") == 1)
            old, revision = dict(etcd.keys), etcd.revision
            await desire(etcd, "port/p2", 1, spec(2))
            await until(lambda: running.store.fleet.memory.reported > revision)
            await until(lambda: len(running.host.ports) == 2)
        etcd.keys, etcd.revision, etcd.leases = old, revision, {1: set()}
        for number in range(100):
            await etcd.put("/others", number)
        await desire(etcd, "port/p1", 2)
        for _ in range(2):  # and after a restart of the agent, which has reported there since
            async with following(running, etcd, monkeypatch) as fleet:
                await until(fleet.findings)
                assert "older copy" in fleet.findings()[0].found and not fleet.connected
                await until(lambda: (summary(etcd).get("refused") or {}).get("code") == "conflict")
                assert set(running.host.ports) == {"p1", "p2"}
        name = f"{etcd.cluster_id:x}"
        word = {"number": 1, "cluster": name, "replaces": name, "revision": etcd.revision}
        await etcd.put("/netplugin/v1/accepted", word)
        async with following(running, etcd, monkeypatch):
            await until(lambda: summary(etcd)["counts"].get("unlisted") == 1)
            await until(lambda: set(running.host.ports) == {"p2"})

    run(work())


def test_a_thousand_lost_keys_are_few_keys_more(running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        for number in range(100):
            await desire(etcd, f"port/p{number}", 1, spec(number))
        async with following(running, etcd, monkeypatch):
            await until(lambda: owned(running) == 100)
            await etcd.write([(key, None) for key in etcd.under(f"{DESIRED}/")])
            await until(lambda: summary(etcd)["counts"].get("unlisted") == 100)
            assert len(etcd.under(f"{REPORTED}/")) == 65 and len(running.host.ports) == 100

    run(work())


def test_two_agents_with_one_name_are_not_both_in_the_fleet(
    running: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        await desire(etcd, "port/p1", 1, spec(1))
        async with following(running, etcd, monkeypatch) as first:
            await until(lambda: first.connected)
            with agent(tmp_path / "second") as other:
                async with following(other, etcd, monkeypatch) as second:
                    await until(lambda: second.refused)
                    assert "another agent" in second.findings()[0].found and other.host.ports == {}
                    etcd.leases.clear()  # the first has died
                    await etcd.write([(f"/netplugin/v1/alive/{HOST}", None)])
                    await until(lambda: second.connected or first.connected)

    run(work())


def test_a_copy_of_a_store_is_no_second_agent_of_its_name(
    running: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def work() -> None:
        etcd = MemoryEtcd()
        await desire(etcd, "port/p1", 1, spec(1))
        async with following(running, etcd, monkeypatch) as first:
            await until(lambda: owned(running) == 1 and first.connected)
            with agent(tmp_path / "copy") as other:
                monkeypatch.setattr(other.store, "identity", running.store.identity)
                async with following(other, etcd, monkeypatch) as second:
                    await until(lambda: second.refused)
                    assert "a copy of the store" in second.findings()[0].found
                    await desire(etcd, "port/p2", 1, spec(2))
                    await until(lambda: set(running.host.ports) == {"p1", "p2"})
                    assert other.host.ports == {} and not second.connected
        # The agent that has the store is not kept out by itself, when it was killed, nor by an older version.
        async with following(running, etcd, monkeypatch) as first:
            await until(lambda: first.connected)
        key = f"/netplugin/v1/alive/{HOST}"
        await etcd.put(key, {"identity": running.store.identity, "version": "1.0"})
        async with following(running, etcd, monkeypatch) as first:
            await until(lambda: first.connected)

    run(work())


def test_an_acceptance_for_another_cluster_is_read_once(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        etcd, reads = MemoryEtcd(), 0
        await desire(etcd, "port/p1", 1, spec(1))
        async with following(running, etcd, monkeypatch) as fleet:
            await until(lambda: fleet.connected)
        etcd.cluster_id = 0xBAD
        read = Client.read

        async def counted(client: Client, prefix: str) -> Any:
            nonlocal reads
            reads += prefix.startswith(DESIRED)
            return await read(client, prefix)

        monkeypatch.setattr(Client, "read", counted)
        monkeypatch.setattr(runner, "_ACCEPT_S", 5.0)
        async with following(running, etcd, monkeypatch) as fleet:
            await until(lambda: fleet.refused and reads)
            word = {"number": 7, "cluster": "dead", "replaces": "beef", "revision": 1}
            await etcd.put("/netplugin/v1/accepted", word)
            await until(lambda: reads == 2)
            await asyncio.sleep(1)  # some 20 looks
            assert reads == 2 and not fleet.connected
            word |= {"number": 8, "cluster": "bad", "replaces": "c0ffee", "revision": etcd.revision}
            await etcd.put("/netplugin/v1/accepted", word)
            await until(lambda: fleet.connected)

    run(work())


def test_an_agent_without_a_fleet_imports_nothing_of_it() -> None:
    names = "('netplugin.fleet.etcd', 'netplugin.fleet.values', 'agents.fleet.runner')"
    found = f"[m for m in sys.modules if m.startswith(('grpc', 'google.protobuf')) or m in {names}]"
    code = f"import sys, agents.main; found = {found}; sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"endpoints": ["etcd1"]}, "host:port"),
        ({"endpoints": ["http://etcd1:2379"]}, "host:port"),
        ({"cert": None}, "cert: is required"),
        ({"cert": None, "key": None}, "cert: is required"),
        ({"cert": None, "key": None, "user": "h1"}, "password_file: is required"),
        ({"user": "h1", "password_file": "f", "ca": None}, "ca: is required"),
        ({"host": "a/b"}, "host"),
    ],
)
def test_wrong_options_are_sentences(changed: dict[str, Any], message: str) -> None:
    conf = options.load([])
    values = {
        "endpoints": ["etcd1:2379", "https://etcd2:2379"],
        "host": "h1",
        "ca": "a",
        "cert": "b",
        "key": "c",
    }
    assert FleetSettings.read(conf) is None
    for name, value in values.items():
        conf.set_override(name, value, group="fleet")
    read = FleetSettings.read(conf)
    assert read is not None and read.endpoints == ("etcd1:2379", "etcd2:2379") and read.role is Role.PLUG
    for name, value in changed.items():
        conf.set_override(name, value, group="fleet")
    with pytest.raises(ValueError, match=message):
        FleetSettings.read(conf)


def test_the_client_overrides_when_it_is_requested(running: Agent, client: ApiClient) -> None:
    port = client.put_port("p1", PortSpec.model_validate(spec(1)))
    fleet = running.store.fleet
    known = Known(3, "v", "t")
    fleet.save(known={Ref(Kind.PORT, "p1"): known})
    fleet.is_on = True
    with pytest.raises(Conflict, match="generation 3"):
        client.put_port("p1", port.spec)
    client.override = True
    assert client.put_port("p1", port.spec).state is PortState.ACTIVE
    client.delete_port("p1")
