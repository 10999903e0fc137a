"""A VF with a virtio NIC next to it: both or none, whatever fails and wherever the agent dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lxml import etree

from agents.ports import teams
from agents.ports.teams import standby_id, standby_spec
from agents.store.port_table import Record
from agents.store.store import Store
from netplugin.api.batch_models import Batch, BatchPut
from netplugin.api.domain_models import RenderRequest
from netplugin.api.errors import Conflict, HostError, Unsupported
from netplugin.api.migration_models import MigrateRequest
from netplugin.api.models import (
    Binding,
    DomainRequirements,
    Features,
    PortSpec,
    PortState,
    ReconcileRequest,
    VfInfo,
)
from netplugin.backend import Intent, TeamVf
from netplugin.host.usability import Wake
from netplugin.libvirt.interfaces import hostdev_interface
from tests.lab.processes import wait_for
from tests.unit.agent import DEADLINE_S, Agent, agent
from tests.unit.fakes import FakeBackend, FakeHost, Write

SPEC = PortSpec.model_validate(
    {
        "vm_id": "vm-1",
        "mac": "52:54:00:12:34:56",
        "backend": "card",
        "network": {"type": "vlan", "physical_network": "physnet1", "vlan_id": 100},
        "numa_node": 0,
        "queues": 2,
        "qos": {"egress_kbps": 100_000, "min_egress_kbps": 1000},
        "vf": {"teaming": True, "trusted": True},
    }
)
STANDBY = standby_id("p1")


class Card(FakeBackend):
    """A backend whose binding is that of a VF."""

    features: ClassVar[Features] = Features(
        networks=("vlan",), max_queues=2, virtual_functions=True, teaming=True
    )

    def binding(self, intent: Any) -> Binding:
        return Binding(
            vif_type="hostdev",
            interface_xml=hostdev_interface(intent.spec, "0000:03:10.1"),
            domain_requirements=DomainRequirements(vfio=True),
        )


@dataclass
class Hosts:
    card: FakeHost
    soft: FakeHost

    def ports(self) -> set[str]:
        return {*self.card.ports, *self.soft.ports}


@contextmanager
def on(directory: Path, hosts: Hosts, teaming_backend: str = "soft") -> Iterator[Agent]:
    backends = {"card": Card("card", hosts.card), "soft": FakeBackend("soft", hosts.soft)}
    with agent(directory, backends=backends, teaming_backend=teaming_backend) as made:
        yield made


@pytest.fixture
def hosts() -> Hosts:
    return Hosts(FakeHost(), FakeHost())


@pytest.fixture
def running(tmp_path: Path, hosts: Hosts) -> Iterator[Agent]:
    with on(tmp_path, hosts) as made:
        yield made


def put(running: Agent, spec: PortSpec = SPEC, port_id: str = "p1") -> Any:
    """With the states of both ports committed, which is after the answer."""
    port = asyncio.run(running.service.ports.put(port_id, spec))
    for worker in running.service._workers.values():
        worker.job(lambda: None, time.monotonic() + DEADLINE_S).result(DEADLINE_S)
    return port


def delete(running: Agent, port_id: str = "p1") -> None:
    asyncio.run(running.service.ports.delete(port_id))


def refusing(*ports: str, why: str = "it does not go") -> Any:
    def refuse(change: Any) -> None:
        if set(change.ports) & set(ports):
            raise HostError(why, step="apply")

    return refuse


def test_the_standby_gets_what_a_virtio_nic_can_do() -> None:
    spec = standby_spec(SPEC, "soft")
    assert (spec.backend, spec.mac, spec.network) == ("soft", SPEC.mac, SPEC.network)
    assert (spec.vm_id, spec.numa_node, spec.port_security) == ("vm-1", 0, SPEC.port_security)
    assert spec.queues == SPEC.queues == 2
    mine = SPEC.model_copy(update={"qemu_user": 1001})
    assert standby_spec(mine, "soft").qemu_user == 1001, "only this user can open its socket"
    assert (spec.qos.egress_kbps, spec.qos.min_egress_kbps) == (100_000, None)
    assert spec.vf == PortSpec.model_fields["vf"].default


def test_both_come_and_are_reported_as_one(running: Agent, hosts: Hosts) -> None:
    port = put(running)
    assert (set(hosts.soft.ports), set(hosts.card.ports)) == ({STANDBY}, {"p1"})
    assert port.state is PortState.ACTIVE and port.standby_of is None
    stays, goes = etree.fromstring(f"<a>{port.binding.interface_xml}</a>")
    assert (stays.get("type"), goes.get("type")) == ("ethernet", "hostdev")
    alias = stays.find("alias").get("name")
    assert alias.startswith("ua-") and stays.find("teaming").attrib == {"type": "persistent"}
    assert goes.find("teaming").attrib == {"type": "transient", "persistent": alias}
    assert goes.find("alias").get("name") == f"{alias}-vf", "libvirt finds each by its XML"
    assert stays.find("mac").get("address") == goes.find("mac").get("address") == SPEC.mac
    needs = port.binding.domain_requirements
    assert needs.vfio and needs.numa_node == 0
    assert port.binding.model_extra["standby_port_id"] == STANDBY
    assert running.service.ports.get(STANDBY).standby_of == "p1"


def test_a_domain_gets_the_pair_once(running: Agent) -> None:
    put(running)
    xml = "<domain><devices><disk/></devices></domain>"
    once = asyncio.run(asyncio.run(running.service.domains()).render("vm-1", RenderRequest(xml=xml))).xml
    assert once.count("<interface ") == 2 and once.count("<teaming ") == 2
    again = asyncio.run(asyncio.run(running.service.domains()).render("vm-1", RenderRequest(xml=once))).xml
    assert again == once


def test_both_go_and_the_vf_first(running: Agent, hosts: Hosts) -> None:
    put(running)
    order: list[str] = []
    hosts.card.on_apply = hosts.soft.on_apply = lambda change: order.extend(change.ports)
    delete(running)
    assert order == ["p1", STANDBY] and hosts.ports() == set()
    assert running.store.records() == []
    delete(running)  # there is nothing to do


def test_a_batch_has_teams_and_single_ports(running: Agent, hosts: Hosts) -> None:
    alone = SPEC.model_copy(update={"backend": "soft", "vf": PortSpec.model_fields["vf"].default})
    puts = (BatchPut(port_id="p1", spec=SPEC), BatchPut(port_id="p2", spec=alone))
    results = asyncio.run(running.service.ports.batch(Batch(put=puts))).results
    assert [(r.port_id, r.status) for r in results] == [("p1", 200), ("p2", 200)]
    assert hosts.ports() == {"p1", "p2", STANDBY}
    results = asyncio.run(running.service.ports.batch(Batch(delete=("p1", "p2", "p3")))).results
    assert [r.status for r in results] == [204, 204, 204]
    assert hosts.ports() == set()


@pytest.mark.parametrize("broken", ["card", "soft"])
def test_if_one_cannot_be_had_there_is_none(running: Agent, hosts: Hosts, broken: str) -> None:
    getattr(hosts, broken).on_apply = lambda change: refusing(*change.ports)(change) if change.spec else None
    with pytest.raises(HostError, match="it does not go"):
        put(running)
    assert hosts.ports() == set() and running.store.records() == []


def test_a_change_that_fails_on_the_vf_goes_back_on_both(running: Agent, hosts: Hosts) -> None:
    put(running)
    other = SPEC.model_copy(update={"network": SPEC.network.model_copy(update={"vlan_id": 200})})

    def refuse_new(change: Any) -> None:
        if isinstance(change, Write) and change.spec == other:
            raise HostError("no such VLAN", step="apply")

    hosts.card.on_apply = refuse_new
    with pytest.raises(HostError, match="no such VLAN"):
        put(running, other)
    assert hosts.card.ports["p1"].network.vlan_id == 100
    assert hosts.soft.ports[STANDBY].network.vlan_id == 100
    hosts.card.on_apply = lambda change: None
    assert put(running, other).spec.network.vlan_id == 200
    assert hosts.soft.ports[STANDBY].network.vlan_id == 200


def test_a_vf_that_is_in_use_keeps_its_standby(running: Agent, hosts: Hosts) -> None:
    put(running)
    hosts.card.on_apply = refusing("p1", why="a VM has it open")
    with pytest.raises(HostError):
        delete(running)
    assert running.service.ports.get("p1").state is PortState.REMOVING
    asyncio.run(running.service.ports.teams.settle())
    assert hosts.ports() == {"p1", STANDBY}
    hosts.card.on_apply = lambda change: None
    delete(running)
    assert hosts.ports() == set()


def test_a_team_that_goes_and_is_requested_again_alone_leaves_no_standby(
    running: Agent, hosts: Hosts
) -> None:
    put(running)
    hosts.card.on_apply = refusing("p1", why="a VM has it open")
    with pytest.raises(HostError):
        delete(running)
    hosts.card.on_apply = lambda change: None
    alone = SPEC.model_copy(update={"vf": PortSpec.model_fields["vf"].default})
    put(running, alone)
    assert hosts.ports() == {"p1"} == {record.port_id for record in running.store.records()}


def test_a_standby_that_fails_degrades_the_port(running: Agent) -> None:
    put(running)
    standby = running.store.get(STANDBY)
    assert standby is not None
    problem = HostError("its bridge has gone", step="verify").problem()
    running.store.save([replace(standby, state=PortState.FAILED, error=problem)])
    reported = running.service.ports.get("p1")
    assert reported.state is PortState.DEGRADED and reported.error == problem


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: put(a, SPEC, STANDBY), "standby of port p1"),
        (lambda a: delete(a, STANDBY), "standby of port p1"),
        (
            lambda a: put(a, SPEC.model_copy(update={"vf": PortSpec.model_fields["vf"].default})),
            "cannot change on a live port",
        ),
    ],
)
def test_half_a_team_cannot_be_had(running: Agent, hosts: Hosts, call: Any, words: str) -> None:
    put(running)
    before = (dict(hosts.card.ports), dict(hosts.soft.ports))
    with pytest.raises(Conflict, match=words):
        call(running)
    assert (hosts.card.ports, hosts.soft.ports) == before


def test_a_platforms_own_port_of_that_name_is_not_taken(running: Agent, hosts: Hosts) -> None:
    mine = SPEC.model_copy(update={"backend": "soft", "vf": PortSpec.model_fields["vf"].default})
    put(running, mine, STANDBY)
    with pytest.raises(Conflict, match=f"port {STANDBY} is in use"):
        put(running)
    assert hosts.ports() == {STANDBY} and hosts.soft.ports[STANDBY] == mine


def test_without_a_chosen_backend_it_is_refused(tmp_path: Path, hosts: Hosts) -> None:
    with on(tmp_path, hosts, teaming_backend="") as running:
        with pytest.raises(Unsupported) as refused:
            put(running)
        assert "teaming_backend" in str(refused.value.fix) and hosts.ports() == set()


def test_calls_for_one_team_take_turns(running: Agent, hosts: Hosts) -> None:
    async def all_at_once() -> None:
        calls: list[Any] = []
        for _ in range(10):
            calls += [running.service.ports.put("p1", SPEC), running.service.ports.delete("p1")]
        await asyncio.gather(*calls)

    asyncio.run(all_at_once())
    assert running.service.ports.teams.unsettled() == []
    assert hosts.ports() == {r.port_id for r in running.store.records()}
    assert hosts.ports() in (set(), {"p1", STANDBY})


_STATES = [None, PortState.PENDING, PortState.ACTIVE, PortState.REMOVING]


@pytest.mark.parametrize("first", _STATES)
@pytest.mark.parametrize(
    ("second", "old"), [*((state, False) for state in _STATES), (PortState.ACTIVE, True)]
)
def test_whatever_a_crash_left_is_settled(
    tmp_path: Path, hosts: Hosts, first: PortState | None, second: PortState | None, old: bool
) -> None:
    """Each half may be missing, half made, made, or going; the standby may be as it was before."""
    standby = standby_spec(SPEC, "soft")
    if old:
        standby = standby.model_copy(update={"network": SPEC.network.model_copy(update={"vlan_id": 7})})
    left = [Record("p1", SPEC, state=first)] if first else []
    left += [Record(STANDBY, standby, state=second, standby_of="p1")] if second else []
    store = Store(tmp_path / "agent.db")
    store.save(left)
    store.close()
    with on(tmp_path, hosts) as running:
        # What the agent's looks do sooner or later: a port that was to go goes.
        whole = ReconcileRequest(dry_run=False)
        assert asyncio.run(running.service.ports.reconcile(whole)).errors == []
        asyncio.run(running.service.ports.teams.settle())
        assert running.service.ports.teams.unsettled() == []
        desired = {"p1", STANDBY} if first not in (None, PortState.REMOVING) else set()
        assert hosts.ports() == desired == {r.port_id for r in running.store.records()}
        if desired:
            assert hosts.soft.ports[STANDBY] == standby_spec(SPEC, "soft")


def test_what_cannot_be_settled_now_is_settled_later(tmp_path: Path, hosts: Hosts) -> None:
    with on(tmp_path, hosts) as running:
        put(running)
    store = Store(tmp_path / "agent.db")
    store.save([], forget=["p1"])  # its agent died when the VF was gone and the standby was not
    store.close()
    hosts.card.ports.clear()
    hosts.soft.on_apply = refusing(STANDBY)
    with on(tmp_path, hosts) as running:
        asyncio.run(running.service.ports.teams.settle())
        assert hosts.ports() == {STANDBY}
        hosts.soft.on_apply = lambda change: None
        # A standby that its worker still has available is left for the next comparison.
        deadline = time.monotonic() + DEADLINE_S
        while running.store.records() and time.monotonic() < deadline:
            asyncio.run(running.service.ports.teams.settle())
        assert hosts.ports() == set() and running.store.records() == []


def test_comparing_goes_on_after_an_error_that_nobody_expected(
    tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teams, "_COMPARE_S", 0.01)
    with on(tmp_path, hosts) as running:
        put(running)
        broken = True
        is_at = running.service.ports.teams._has_call

        def fails(port_id: str) -> bool:
            if broken:
                raise OSError(24, "Too many open files")
            return is_at(port_id)

        running.service.ports.teams._has_call = fails

        async def compare() -> None:
            nonlocal broken
            supervisor = running.shared.supervisor
            async with asyncio.timeout(DEADLINE_S):
                repairs = asyncio.create_task(running.service.ports.teams.keep())
                while not supervisor.reasons():
                    await asyncio.sleep(0)
                assert "teams" in (await running.service.health.unready())[0]
                broken = False
                # Somebody takes the standby away: it comes back only if the comparing goes on.
                running.store.save([], forget=[STANDBY])
                while running.store.get(STANDBY) is None:
                    await asyncio.sleep(0.01)
                # It counts as going on from the end of that turn, which the standby comes before.
                while await running.service.health.unready():
                    await asyncio.sleep(0.01)
            repairs.cancel()

        asyncio.run(compare())


def test_the_port_of_a_standby_is_stored(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    store.save(
        [
            Record("p1", SPEC, state=PortState.ACTIVE, standby_of="p0"),
            Record("p2", SPEC, state=PortState.ACTIVE),
        ]
    )
    store.close()
    again = Store(tmp_path / "agent.db")
    assert [record.standby_of for record in again.records()] == ["p0", None]
    again.close()


# -- live migration ------------------------------------------------------------------------------------


def step(running: Agent, phase: str, **fields: Any) -> Any:
    request = MigrateRequest.model_validate({"phase": phase, **fields})
    return asyncio.run(running.service.migrations.step("p1", request))


def prepare(running: Agent) -> Any:
    return step(running, "prepare", port=SPEC)


def kinds(port: Any) -> list[str | None]:
    return [nic.get("type") for nic in etree.fromstring(f"<a>{port.binding.interface_xml}</a>")]


def test_a_team_migrates_with_its_standby_and_has_its_vf_before(running: Agent, hosts: Hosts) -> None:
    port = prepare(running)
    assert port.migration.phase == "prepared" and kinds(port) == ["ethernet"]
    assert (set(hosts.card.ports), hosts.soft.shut) == ({"p1"}, {STANDBY})
    assert prepare(running).migration == port.migration
    with pytest.raises(Conflict, match="being migrated"):
        put(running)
    assert step(running, "activate").migration.phase == "activated" and hosts.soft.shut == set()
    port = step(running, "commit")
    assert port.migration is None and kinds(port) == ["ethernet", "hostdev"]
    left = step(running, "leave")
    assert left.migration.phase == "left" and hosts.soft.shut == {STANDBY} and kinds(left) == ["ethernet"]
    assert step(running, "abort").migration is None and hosts.soft.shut == set()
    step(running, "leave")
    assert step(running, "commit") is None and hosts.ports() == set()
    assert step(running, "commit") is None
    assert prepare(running).migration.phase == "prepared"
    assert step(running, "abort") is None and hosts.ports() == set() and running.store.records() == []


def test_nothing_is_prepared_of_a_team_that_gets_no_vf(running: Agent, hosts: Hosts) -> None:
    def refuse(change: Write) -> None:
        if change.spec is not None:
            raise HostError("no VF", step="apply")

    hosts.card.on_apply = refuse
    with pytest.raises(HostError):
        prepare(running)
    assert hosts.ports() == set() and running.store.records() == []


def test_a_team_does_not_leave_while_its_vm_has_the_vf(running: Agent, hosts: Hosts) -> None:
    port = put(running)
    found = [VfInfo(pci_address="0000:03:10.1", pf="pf", state="allocated", port_id="p1")]

    async def vfs() -> list[VfInfo]:
        return found

    running.service.vfs.all = vfs
    with pytest.raises(Conflict, match=r"03:10\.1 is in use"):
        step(running, "leave")
    assert running.service.ports.get("p1") == port
    found.clear()
    assert step(running, "leave").migration.phase == "left"


def test_a_team_that_was_prepared_is_still_so_after_a_kill(hosts: Hosts, tmp_path: Path) -> None:
    with on(tmp_path, hosts) as first:
        prepare(first)
    with on(tmp_path, hosts) as second:
        asyncio.run(second.service.ports.teams.settle())
        assert second.service.ports.get("p1").migration.phase == "prepared" and hosts.soft.shut == {STANDBY}
        assert step(second, "abort") is None and hosts.ports() == set()


# -- the VF in use -------------------------------------------------------------------------------------


def test_the_standby_learns_of_the_vf_that_its_vm_takes_and_releases(
    running: Agent, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, TeamVf] = {}
    plan = FakeBackend.plan

    def noting(self: FakeBackend, intents: Sequence[Intent], observed: Any) -> Any:
        seen.update({intent.port_id: intent.team_vf for intent in intents})
        return plan(self, intents, observed)

    monkeypatch.setattr(FakeBackend, "plan", noting)
    put(running)
    other = SPEC.model_copy(update={"backend": "soft", "vf": PortSpec.model_fields["vf"].default})
    asyncio.run(running.service.ports.put("alone", other))
    card = running.service._workers["card"]
    assert (seen[STANDBY], seen["p1"], seen["alone"]) == (TeamVf.UNKNOWN, TeamVf.NONE, TeamVf.NONE)
    for has_it in (False, True, False):
        hosts.card.guests["p1"] = has_it
        card.wake(Wake("a NIC changed"))
        expected = TeamVf.IN_USE if has_it else TeamVf.FREE
        wait_for(lambda: seen[STANDBY] is expected, DEADLINE_S, "the standby is looked at")  # noqa: B023
        assert (seen["p1"], seen["alone"]) == (TeamVf.NONE, TeamVf.NONE)
    del hosts.card.guests["p1"]
    seen.clear()
    card.wake(Wake("the VF is not reported"))
    running.service._workers["soft"].wake(Wake("a look"))
    wait_for(lambda: {"p1", STANDBY} <= seen.keys(), DEADLINE_S, "both are looked at")
    assert seen[STANDBY] is TeamVf.FREE, "a NIC that is reset says nothing of its VFs"
    delete(running)
    hosts.card.guests["p1"] = True
    put(running)
    wait_for(lambda: seen[STANDBY] is TeamVf.IN_USE, DEADLINE_S, "a team of the same name begins anew")
