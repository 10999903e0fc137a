"""Events of physical networks: what the API makes of them, and what becomes of what they keep."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.api.client import Client
from netplugin.api.errors import Conflict, HostError
from netplugin.api.event_models import Event, EventFilter, EventKind
from netplugin.api.models import ReconcileRequest
from netplugin.cli.main import main
from netplugin.host.physical_networks import PhysicalNetworks
from tests.unit.agent import Agent, agent, served_agent
from tests.unit.agents.networks.keeper import Keeper, KeeperHost
from tests.unit.agents.networks.test_physical_networks import kept, network

OF_NETWORKS = EventFilter(follow=False, kind=EventKind.PHYSICAL_NETWORK)


@pytest.fixture
def host() -> KeeperHost:
    return KeeperHost()


@pytest.fixture
def running(tmp_path: Path, host: KeeperHost) -> Iterator[Agent]:
    networks = PhysicalNetworks()
    with agent(tmp_path, backends={"fake": Keeper(networks, host)}, networks=networks) as made:
        yield made


def reported(client: Client) -> list[tuple[str, str | None, str | None]]:
    return [(event.state, event.subject, event.backend) for event in events(client)]


def events(client: Client) -> list[Event]:
    return list(client.events(OF_NETWORKS))


def look(client: Client) -> None:
    """Let the agent look at the whole host."""
    client.reconcile(ReconcileRequest())


def test_a_network_is_created_changed_and_deleted(client: Client) -> None:
    for spec in (network(), network(), network(mtu=9000, keep=True)):
        client.put_physical_network("net-1", spec)
    client.put_physical_network("net-2", network(ovs={"devices": []}))
    for _ in range(2):
        client.delete_physical_network("net-1")
    api = [("created", "net-1"), ("changed", "net-1"), ("created", "net-2"), ("deleted", "net-1")]
    assert reported(client) == [(state, name, None) for state, name in api]
    assert [event.detail for event in events(client) if event.state == "changed"] == ["mtu, keep"]


def test_a_refused_call_is_no_event_and_an_undone_one_is(client: Client, host: KeeperHost) -> None:
    client.put_physical_network("net-1", network())
    with pytest.raises(Conflict):
        client.put_physical_network("net-2", network())
    host.lost = {"net-1"}
    with pytest.raises(HostError):
        client.put_physical_network("net-1", kept())
    assert [state for state, _, _ in reported(client)] == [
        "created",
        "changed",
        "degraded",
        "changed",
        "recovered",
    ]


def test_what_is_not_committed_is_no_event(running: Agent) -> None:
    store = running.store
    store.database.sql.execute("PRAGMA query_only=ON")
    with pytest.raises((HostError, sqlite3.Error)):
        store.physical_networks.save("net-1", network())
    store.database.sql.execute("PRAGMA query_only=OFF")
    assert store.events.page(0, 10).events == () and store.physical_networks.all() == {}


def test_what_it_keeps_is_degraded_once_and_recovers(client: Client, host: KeeperHost) -> None:
    client.put_physical_network("net-1", kept())
    host.broken = {"net-1"}
    for _ in range(3):
        look(client)
    host.broken = set()
    for _ in range(2):
        look(client)
    assert reported(client)[1:] == [("degraded", "net-1", "fake"), ("recovered", "net-1", "fake")]
    assert [event.detail for event in events(client)[1:]] == ["the uplink of net-1 does not work", ""]


def test_a_restarted_agent_repeats_nothing_and_tells_what_it_missed(tmp_path: Path, host: KeeperHost) -> None:
    for broken in ({"net-1"}, {"net-1"}, set[str]()):
        networks = PhysicalNetworks()
        with (
            agent(tmp_path, backends={"fake": Keeper(networks, host)}, networks=networks) as running,
            served_agent(running) as url,
            Client(url) as client,
        ):
            if not reported(client):
                client.put_physical_network("net-1", kept())
            host.broken = broken
            look(client)
            found = [state for state, _, _ in reported(client)]
    assert found == ["created", "degraded", "recovered"]


def test_a_network_that_was_deleted_does_not_recover(client: Client, host: KeeperHost) -> None:
    """One of its name begins anew."""
    for _ in range(2):
        client.put_physical_network("net-1", kept())
        host.broken = {"net-1"}
        look(client)
        client.delete_physical_network("net-1")
        host.broken = set()
        look(client)
    assert [state for state, _, _ in reported(client)] == ["created", "degraded", "deleted"] * 2


def test_the_command_names_the_network(
    running: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_agent(running) as url, Client(url) as client:
        monkeypatch.setenv("NETPLUGIN_URL", url)
        client.put_physical_network("net-1", network())
        assert main(["events", "--no-follow", "--kind", "physical_network"]) == 0
    assert " physical_network net-1 created" in capsys.readouterr().out
