"""Events with a real OVS-DPDK: VMs that connect, drift, and an OVS that comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from netplugin.api.client import Client
from netplugin.api.errors import NetpluginError
from netplugin.api.event_models import Event, EventFilter, EventKind
from netplugin.api.event_reader import EventReader
from tests.functional.conftest import make_spec
from tests.functional.test_plug_ovs import plug
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.lab.testpmd import Testpmd, TestpmdOptions

DEADLINE_S = 60.0


class Followed:
    """The events of an agent, read in a thread for as long as the agent runs."""

    def __init__(self, agent: PrivateAgent, after: int = 0) -> None:
        self._client = Client(agent.url, timeout_s=DEADLINE_S)
        self.reader: EventReader = self._client.events(EventFilter(after=after))
        self.events: list[Event] = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for event in self.reader:
                self.events.append(event)
        except NetpluginError:
            pass  # the agent was killed
        finally:
            self._client.close()

    def wait(self, kind: EventKind, state: str, port_id: str | None = None, after: int = 0) -> Event:
        def found() -> Event | None:
            for event in list(self.events):
                if (event.kind, event.state) == (kind, state) and event.id > after:
                    if port_id in (None, event.port_id):
                        return event
            return None

        event = wait_for(found, DEADLINE_S, f"{kind} {port_id or ''} {state}", lambda: str(self.events))
        assert event is not None
        return event


@contextmanager
def vm(port: dict[str, object], mac: str) -> Iterator[None]:
    binding = port["binding"]
    assert isinstance(binding, dict)
    with Testpmd(Path(binding["socket_path"]), TestpmdOptions(mac=mac)):
        yield


def test_a_vm_connects_and_goes(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """The names are of this test alone: the agent, and so its events, are those of tests before it."""
    followed = Followed(agent)
    port = plug(agent, "comes", make_spec(1))
    plug(agent, "stays", make_spec(2))
    with vm(port, make_spec(1)["mac"]):
        connected = followed.wait(EventKind.CONNECTION, "connected", "comes")
    gone = followed.wait(EventKind.CONNECTION, "disconnected", "comes", after=connected.id)
    assert agent.call("DELETE", "/v1/ports/comes")[0] == 204
    removed = followed.wait(EventKind.PORT, "removed", "comes")
    assert connected.id < gone.id < removed.id
    assert not [e for e in followed.events if e.kind is EventKind.CONNECTION and e.port_id == "stays"]


def test_a_ports_state_follows_its_vm(ovs: PrivateOvs, short_path: Path) -> None:
    """What removes NICs without a VM, as the API for ZStack does, must not go by what was true before."""
    options = {"agent": {"reconcile_interval": "3600"}}
    with PrivateAgent(short_path / "agent", ovs, options) as agent:

        def wait_until_shown(*, connected: bool) -> None:
            def shown() -> bool:
                return agent.get("/v1/ports/p1")[1]["observed"]["connected"] is connected

            wait_for(shown, DEADLINE_S, f"the port shows connected={connected}")

        port = plug(agent, "p1", make_spec(1))
        wait_until_shown(connected=False)
        with vm(port, make_spec(1)["mac"]):
            wait_until_shown(connected=True)
        wait_until_shown(connected=False)
        assert agent.call("DELETE", "/v1/ports/p1")[0] == 204


def test_a_vm_that_connects_while_the_agent_is_away_is_reported_by_the_next(
    ovs: PrivateOvs, agent: PrivateAgent
) -> None:
    followed = Followed(agent)
    port = plug(agent, "p1", make_spec(1))
    followed.wait(EventKind.PORT, "active", "p1")
    agent.kill()
    followed.thread.join(DEADLINE_S)
    last = followed.reader.last
    assert last is not None
    with vm(port, make_spec(1)["mac"]):
        ovs.wait_connected(port["binding"]["device"])
        agent.start()
        followed = Followed(agent, last)
        followed.wait(EventKind.CONNECTION, "connected", "p1")
        agent.stop()
        agent.start()
        again = Followed(agent, last)
        again.wait(EventKind.CONNECTION, "connected", "p1")
    again.wait(EventKind.CONNECTION, "disconnected", "p1")
    states = [e.state for e in again.events if e.kind is EventKind.CONNECTION]
    assert states == ["connected", "disconnected"], "the restart repeats none"


def test_drift_and_an_ovs_that_comes_and_goes(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    followed = Followed(agent)
    port = plug(agent, "p1", make_spec(1))
    ovs.vsctl("del-port", port["binding"]["device"])
    found = followed.wait(EventKind.DRIFT, "found", "p1")
    repaired = followed.wait(EventKind.DRIFT, "repaired", "p1", after=found.id)
    assert found.detail == repaired.detail and port["binding"]["device"] in found.detail
    ovs.kill_vswitchd()
    gone = followed.wait(EventKind.BACKEND, "unusable", after=repaired.id)
    assert (gone.backend, "ovs-vswitchd does not run" in gone.detail) == ("dpdkvhostuser", True)
    ovs.start_vswitchd()
    followed.wait(EventKind.BACKEND, "usable", after=gone.id)


def test_the_agents_end_ends_the_stream(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    followed = Followed(agent)
    plug(agent, "p1", make_spec(1))
    followed.wait(EventKind.PORT, "active", "p1")
    agent.stop()
    agent.start()
    followed.thread.join(DEADLINE_S)
    assert not followed.thread.is_alive()
