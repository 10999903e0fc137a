"""Fixtures of the functional tests: a private OVS-DPDK for a module, an agent for a test."""

from __future__ import annotations

import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import sandbox
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

BASE = Path("/run/np")
LINKS_GONE_S = 60.0


#: Of the files that take longest, how long in seconds; of the others it is about half a second for a test.
LONG_S = {
    **{"test_playbooks": 150, "test_commands": 140, "test_guests": 100, "test_fleet_operator": 90},
    **{"test_fleet_ovs": 90, "test_live_ports": 70, "test_restart_under_guests": 70, "test_failures_ovs": 70},
    **{"test_fleet_members": 60, "test_fleet_etcd": 60, "test_hostile_input": 50, "test_segments_ovs": 50},
    **{"test_acceptance_matrix": 50, "test_isolation_ovs": 50, "test_live_migration": 40, "test_access": 40},
    **{"test_stalls_ovs": 40, "test_host_verify": 40, "test_unit_powers": 35, "test_guest_playbook": 30},
    **{"test_report_browser": 30, "test_ovs_connection": 30, "test_faults": 30, "test_local_callers": 30},
}


@pytest.hookimpl(trylast=True)  # when those that are not requested (-m, -k) have gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # what takes longest first, so that all sandboxes end at once
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: LONG_S.get(item.path.stem, tests[item.path] / 2), reverse=True)
    if not sandbox.inside() and any(not item.get_closest_marker("outside") for item in items):
        pytest.exit("these tests run in a sandbox: tox -e functional", returncode=2)


@pytest.fixture(scope="module", autouse=True)
def links_given_back() -> Iterator[None]:
    """Fail a module that leaves a link: an agent of a later module takes a port's for an orphan."""
    before = _links()
    yield
    # The kernel removes those of a namespace some time after it.
    wait_for(lambda: _links() == before, LINKS_GONE_S, "the links are those that were there before")


def _links() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    """A private OVS-DPDK, new for each module."""
    directory = BASE / "ovs"
    with PrivateOvs(directory) as private:
        yield private
    shutil.rmtree(directory)


@pytest.fixture
def agent(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    """An agent with nothing plugged, on the module's OVS; what a test plugs is removed."""
    directory = BASE / "agent"
    with PrivateAgent(directory, ovs) as private:
        yield private
        if private.get("/readyz")[0] == 200:
            ids = [port["port_id"] for port in private.get("/v1/ports")[1]]
            if ids:
                private.call("POST", "/v1/ports:batch", {"delete": ids})
    for name in ovs.vsctl("list-br").split():
        ovs.vsctl("del-br", name)
    shutil.rmtree(directory)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for what has sockets in it: below pytest's they can be too long for unix(7)."""
    directory = BASE / "test"
    directory.mkdir(parents=True)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def spec() -> Callable[..., dict[str, Any]]:
    return make_spec


def make_spec(number: int = 1, vlan_id: int | None = 100, **fields: Any) -> dict[str, Any]:
    """A port's spec; ``network`` fields are given as ``network={...}`` over the defaults."""
    kind = "flat" if vlan_id is None else "vlan"
    network = {"type": kind, "physical_network": "physnet1", "vlan_id": vlan_id}
    network.update(fields.pop("network", {}))
    return {
        "vm_id": f"vm{number}",
        "mac": f"52:54:00:00:{number // 256:02x}:{number % 256:02x}",
        "backend": "dpdkvhostuser",
        "network": network,
        **fields,
    }
