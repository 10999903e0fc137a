"""Whatever a port has: it is as asked, comes back, goes, and leaves what is not ours alone.

The same tests for each attribute of ``attributes_linuxbridge``, through the agent; in a guest by the
driver, as agents start slowly there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.functional.attributes_linuxbridge import (
    ATTRIBUTES,
    FLAT,
    OVERLAYS,
    PEERS,
    PORT,
    UPLINK,
    Attribute,
)
from tests.lab.linuxbridge_strangers import THEIRS
from tests.lab.processes import CommandError, wait_for
from tests.lab.switch import switch, wire
from tests.lab.traffic_driver import driven
from tests.lab.traffic_hosts import Machine, host, make_spec
from tests.lab.traffic_news import news
from tests.nested import machine

EACH = [
    pytest.param(each, id=each.name, marks=pytest.mark.nested if each.nested else ()) for each in ATTRIBUTES
]


@pytest.fixture(scope="module")
def hypervisor() -> Iterator[Machine]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        here = driven if machine.inside() else host
        made = stack.enter_context(here(1, f"physnet1:{UPLINK},physnet2:"))
        wire(made.name, UPLINK)
        for network_id, vni in OVERLAYS.items():
            made.network(network_id, vni, PEERS)
        yield made


@pytest.fixture(autouse=True)
def clean(hypervisor: Machine) -> Iterator[None]:
    before = hypervisor.links()
    yield
    hypervisor.repair()
    hypervisor.unplug(PORT)
    assert hypervisor.links() == before, "every device went with the port"
    assert "netplugin" not in hypervisor.sh("nft", "list", "ruleset")


def spec_of(fields: object) -> dict[str, object]:
    assert isinstance(fields, dict)
    return make_spec(1, fields.get("network", FLAT), **{k: v for k, v in fields.items() if k != "network"})


@pytest.mark.parametrize("attribute", EACH)
def test_it_is_as_asked_and_nothing_is_written_again(hypervisor: Machine, attribute: Attribute) -> None:
    nothing = attribute.read(hypervisor)
    spec = spec_of(attribute.spec_fields)
    hypervisor.plug(PORT, spec)
    value = attribute.read(hypervisor)
    assert value and value != nothing
    with news(hypervisor.name) as reported:
        wait_for(lambda: at_rest(hypervisor), 30, "the kernel has followed every carrier")
        reported.wait(1000)
        made = hypervisor.changes_made()
        hypervisor.plug(PORT, spec)
        hypervisor.repair()
        assert hypervisor.changes() == [] and hypervisor.changes_made() == made
        assert reported.wait(1) == 0, "the kernel says that something was written"
    assert attribute.read(hypervisor) == value


def at_rest(host: Machine) -> bool:
    """Whether each port of a bridge forwards if it has a carrier, and each bridge is up if one of its does.

    The kernel brings this about in its own time, up to a second later, and reports it.
    """
    links = host.json("ip", "-j", "-d", "link")
    states = {link["ifname"]: link["operstate"] for link in links}
    forwarding: dict[str, bool] = {}
    for link in links:
        data = link.get("linkinfo", {})
        if data.get("info_slave_kind") == "bridge":
            forwards = data["info_slave_data"]["state"] == "forwarding"
            if forwards != ("LOWER_UP" in link["flags"]):
                return False
            forwarding[link["master"]] = forwarding.get(link["master"], False) or forwards
    return all((states[bridge] == "UP") == up for bridge, up in forwarding.items())


@pytest.mark.parametrize("attribute", [p for p in EACH if p.values[0].changed_fields])  # type: ignore[union-attr]
def test_it_changes_and_goes_back(hypervisor: Machine, attribute: Attribute) -> None:
    hypervisor.plug(PORT, spec_of(attribute.spec_fields))
    value = attribute.read(hypervisor)
    hypervisor.plug(PORT, spec_of(attribute.changed_fields))
    assert attribute.read(hypervisor) != value
    hypervisor.plug(PORT, spec_of(attribute.spec_fields))
    assert attribute.read(hypervisor) == value


@pytest.mark.parametrize("attribute", EACH)
def test_what_another_process_breaks_is_repaired(hypervisor: Machine, attribute: Attribute) -> None:
    hypervisor.plug(PORT, spec_of(attribute.spec_fields))
    value = attribute.read(hypervisor)
    hypervisor.kill()
    attribute.break_it(hypervisor)
    assert attribute.read(hypervisor) != value
    hypervisor.start()
    assert attribute.read(hypervisor) == value, "an agent that starts puts it right"
    attribute.break_it(hypervisor)
    hypervisor.repair()
    assert attribute.read(hypervisor) == value and hypervisor.changes() == []
    assert hypervisor.port(PORT)["state"] == "active"


@pytest.mark.parametrize("attribute", EACH)
def test_what_is_not_ours_stays_as_it_is(hypervisor: Machine, attribute: Attribute) -> None:
    for command in THEIRS:
        hypervisor.sh(*command.split(maxsplit=2 if command.startswith("nft") else -1))
    try:
        # The kernel sees a moment later that the other end of the pair is down.
        wait_for(lambda: hypervisor.link("theirs0")["operstate"] == "LOWERLAYERDOWN", 30, "it is seen")
        before = theirs(hypervisor)
        hypervisor.plug(PORT, spec_of(attribute.spec_fields))
        assert theirs(hypervisor) == before
        attribute.break_it(hypervisor)
        hypervisor.repair()
        assert theirs(hypervisor) == before
        hypervisor.unplug(PORT)
        assert theirs(hypervisor) == before
    finally:
        for device in ("theirs-br", "theirs0", "theirs-vx", "theirs-ifb", "theirs-tap"):
            hypervisor.sh("ip", "link", "delete", device)
        hypervisor.sh("nft", "delete table bridge theirs")


def theirs(host: Machine) -> object:
    """All that is theirs, as the system's tools tell it."""
    volatile = ("hello_timer", "gc_timer", "tcn_timer", "topology_change_timer")
    links = [e for e in host.json("ip", "-j", "-d", "link") if e["ifname"].startswith("theirs")]
    for entry in links:
        data = entry.get("linkinfo", {}).get("info_data", {})
        for name in volatile:
            data.pop(name, None)
    qdiscs = [q for q in host.json("tc", "-j", "qdisc") if q["dev"].startswith("theirs")]
    entries = host.sh("bridge", "fdb", "show", "dev", "theirs-vx")
    return links, qdiscs, entries, host.sh("nft", "list", "table", "bridge", "theirs")


@pytest.mark.parametrize("attribute", EACH)
def test_an_agent_that_is_killed_midway_finishes_when_it_is_back(
    hypervisor: Machine, attribute: Attribute
) -> None:
    """It is killed at the first, the fourth and the ninth event that the kernel reports."""
    spec = spec_of(attribute.spec_fields)
    hypervisor.plug(PORT, spec)
    value = attribute.read(hypervisor)
    hypervisor.unplug(PORT)
    for count in (1, 4, 9):
        with news(hypervisor.name) as reported:
            asked = hypervisor.begin(PORT, spec)
            reported.wait(count, asked.is_alive)
            hypervisor.kill()
            asked.join()
        hypervisor.start()
        assert hypervisor.port(PORT)["state"] == "active", "its intent was committed before"
        assert attribute.read(hypervisor) == value and hypervisor.changes() == []
        with news(hypervisor.name) as reported:
            gone = hypervisor.begin(PORT, None)
            reported.wait(count, gone.is_alive)
            hypervisor.kill()
            gone.join()
        hypervisor.start()
        hypervisor.unplug(PORT)
        try:
            left = attribute.read(hypervisor)
        except CommandError:
            left = None  # the device is gone
        assert left != value and hypervisor.changes() == []
