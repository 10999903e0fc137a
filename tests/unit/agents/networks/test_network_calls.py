"""Calls on physical networks: each answers for its own network, within its time, and reads the host back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agents.networks.changes import OneAtATime
from agents.worker import GRACE_S
from netplugin.api.client import Client
from netplugin.api.errors import HostError, NetpluginError, OperationTimeout, Unsupported
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Applied, Change
from netplugin.host.physical_networks import PhysicalNetworks
from netplugin.host.usability import Usability
from tests.unit.agent import DEADLINE_S, Agent, agent
from tests.unit.agents.networks.keeper import Keep, Keeper, KeeperHost
from tests.unit.agents.networks.test_physical_networks import kept, network, port, stored


class Timed(Keeper):
    """It notes the deadline of each change."""

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        if any(isinstance(change, Keep) for change in changes):
            self.deadlines.append(deadline)
        return super().apply(changes, deadline)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.deadlines: list[float] = []


@pytest.fixture
def backend() -> Timed:
    return Timed(PhysicalNetworks(), KeeperHost())


@pytest.fixture
def host(backend: Timed) -> KeeperHost:
    return backend.there


@pytest.fixture
def running(tmp_path: Path, backend: Timed) -> Iterator[Agent]:
    with agent(tmp_path, backends={"fake": backend}, networks=backend.networks) as made:
        yield made


def other(**fields: Any) -> Any:
    return kept(ovs={"devices": ["0000:05:00.0"]}, **fields)


def breaks(host: KeeperHost, name: str) -> None:
    """The host loses a network for good."""

    def refuse(change: Change) -> None:
        if isinstance(change, Keep) and change.network == name:
            raise HostError(f"the NIC of {name} died", step="plan")

    host.on_apply = refuse
    host.kept.pop(name, None)


def test_a_broken_network_stops_no_other(client: Client, running: Agent, host: KeeperHost) -> None:
    client.put_physical_network("net-1", kept())
    breaks(host, "net-1")
    made = client.put_physical_network("net-2", other())
    assert made.errors == () and made.findings[1:] == ()
    client.put_physical_network("net-2", other(mtu=9000))
    client.put_port("p2", port("net-2"))
    client.delete_port("p2")
    client.delete_physical_network("net-2")
    assert stored(running) == {"net-1": kept()} and host.kept == {}
    [error] = client.reconcile().errors
    assert error.detail == "the NIC of net-1 died", "whoever looks at all is told"
    with pytest.raises(HostError, match="the NIC of net-1 died"):
        client.put_physical_network("net-1", kept(mtu=9000))
    with pytest.raises(HostError, match="the NIC of net-1 died"):
        client.put_physical_network("net-1", kept())


def test_a_delete_is_done_when_the_host_has_nothing_of_the_network(
    client: Client, running: Agent, host: KeeperHost
) -> None:
    client.put_physical_network("net-1", kept())
    host.stuck = {"net-1"}
    with pytest.raises(HostError, match="physical network net-1: bridge br-net-1 is still there"):
        client.delete_physical_network("net-1")
    assert stored(running) == {"net-1": kept()}
    with pytest.raises(HostError, match="does not keep what was written"):
        client.put_physical_network("net-1", network())
    assert stored(running) == {"net-1": kept()}
    host.stuck = set()
    client.delete_physical_network("net-1")
    assert stored(running) == {} == host.kept


@pytest.mark.parametrize("call", ["put", "delete"])
def test_a_failed_change_is_undone_within_the_time_of_its_call(
    client: Client, backend: Timed, host: KeeperHost, call: str
) -> None:
    client.put_physical_network("net-1", kept())

    def refuse(change: Change) -> None:
        host.kept.pop("net-1", None)
        if isinstance(change, Keep) and change.spec != kept():
            raise HostError("no", step="plan")

    host.on_apply = refuse
    backend.deadlines.clear()
    with pytest.raises(NetpluginError):
        if call == "put":
            client.put_physical_network("net-1", kept(mtu=9000))
        else:
            host.stuck = {"net-1"}
            host.kept["net-1"] = kept()
            client.delete_physical_network("net-1")
    change, *_, undo = backend.deadlines
    assert undo - change == pytest.approx(GRACE_S)


def test_a_call_waits_for_its_turn_no_longer_than_it_may_take() -> None:
    async def scenario() -> None:
        turns = OneAtATime(0.05)
        async with turns.turn():
            with pytest.raises(OperationTimeout, match="other changes"):
                async with turns.turn():
                    pytest.fail("two at once")
        async with turns.turn() as deadline:
            assert isinstance(deadline, float), "who has given up holds nothing"

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


class OfVdpa(Keeper):
    """It uses bridges, and keeps none."""

    network_parts: ClassVar[Mapping[str, bool]] = {"ovs": False, "sriov": False}


class OfLinux(Keeper):
    network_parts: ClassVar[Mapping[str, bool]] = {"linuxbridge": True}


@pytest.mark.parametrize("parts", [{"linuxbridge": {}}, {"linuxbridge": {}, "sriov": {"devices": ["eth1"]}}])
def test_each_part_that_can_be_kept_is_kept_or_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    registry = PhysicalNetworks()
    loaded = {
        "vdpa": OfVdpa(registry, KeeperHost(), "vdpa"),
        "linux": OfLinux(registry, KeeperHost(), "linux"),
    }
    with agent(tmp_path, backends=loaded, networks=registry) as running:
        put = running.service.physical_networks.put
        with pytest.raises(Unsupported, match="no enabled backend keeps ovs"):
            asyncio.run(put("net-1", kept(**parts)))
        assert stored(running) == {}
        asyncio.run(put("net-1", PhysicalNetworkSpec.model_validate({**parts, "keep": True})))
        assert stored(running).keys() == {"net-1"}


def test_a_network_that_an_earlier_version_stored_stays(tmp_path: Path, backend: Timed) -> None:
    """Although a field is refused today."""
    old = PhysicalNetworkSpec.model_validate({"sriov": {"devices": ["eth1"]}, "mtu": 9000})
    for _ in range(2):
        with agent(tmp_path, backends={"fake": backend}, networks=backend.networks) as running:
            if not stored(running):
                running.store.physical_networks.save("net-1", old)
            assert stored(running) == {"net-1": old}


def test_a_network_that_no_backend_looks_after_is_reported(tmp_path: Path, backend: Timed) -> None:
    """What the last look found says nothing any more."""
    with agent(tmp_path, backends={"fake": backend}, networks=backend.networks) as running:
        networks = running.service.physical_networks
        asyncio.run(networks.put("net-1", kept(ovs={})))
        assert networks.get("net-1").findings == ()
        backend.there.usability = Usability(False, "OVS is not there", "start it")
        [finding] = networks.get("net-1").findings
        assert finding.found == "fake, which keeps ovs, is not usable: OVS is not there"
        assert finding.fix == "start it" and finding in networks.findings()
    registry = PhysicalNetworks()
    backends = {"vdpa": OfVdpa(registry, KeeperHost(), "vdpa")}
    with agent(tmp_path, backends=backends, networks=registry) as running:
        [finding] = running.service.physical_networks.get("net-1").findings
        assert finding.found == "no enabled backend keeps ovs of physical network net-1"
    registry = PhysicalNetworks()
    backends = {"linux": OfLinux(registry, KeeperHost(), "linux")}
    with agent(tmp_path, backends=backends, networks=registry) as running:
        [finding] = running.service.physical_networks.get("net-1").findings
        assert finding.found == "no enabled backend uses ovs of physical network net-1"
