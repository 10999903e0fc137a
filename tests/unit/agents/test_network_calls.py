"""Calls on physical networks: each answers for its own network, within its time, and reads back what it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.client import Client
from netplugin.api.errors import HostError
from netplugin.backend import Change
from netplugin.host.physical_networks import PhysicalNetworks
from tests.unit.agent import Agent, agent
from tests.unit.agents.keeper import Keep, Keeper, KeeperHost
from tests.unit.agents.test_physical_networks import kept, network, port, stored


@pytest.fixture
def backend() -> Keeper:
    return Keeper(PhysicalNetworks(), KeeperHost())


@pytest.fixture
def host(backend: Keeper) -> KeeperHost:
    return backend.there


@pytest.fixture
def running(tmp_path: Path, backend: Keeper) -> Iterator[Agent]:
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
