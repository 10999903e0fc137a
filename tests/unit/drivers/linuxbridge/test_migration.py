"""A port whose VM runs elsewhere: on its bridge, and closed, on a model of the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivers.linuxbridge.guard import NOTHING, port_guard
from netplugin.backend import Intent
from netplugin.host.link_values import PortOptions
from netplugin.host.names import TAP, device_name
from tests.unit.drivers.linuxbridge.model import Model
from tests.unit.drivers.linuxbridge.strategies import converge, make_spec, planned, queueing

NAME = device_name(TAP, "p")
OPEN = Intent("p", make_spec())
CLOSED, WAITING = replace(OPEN, closed=True), replace(OPEN, closed=True, follows_guest=True)


def gate(model: Model) -> tuple[bool, bool, bool]:
    """Whether the VM's frames pass, the bridge floods to its tap, and it has the MAC there."""
    link = model.links.links[NAME]
    assert link.master, "the tap is on its bridge in any case"
    guard = queueing(model, NAME).guard
    assert guard in (NOTHING, port_guard(make_spec()))
    return guard != NOTHING, link.port.flooding, bool(model.fdb.fixed(link.index))


STATES = {CLOSED: (False, False, False), WAITING: (True, False, False), OPEN: (True, True, True)}


@pytest.mark.parametrize("first", STATES)
@pytest.mark.parametrize("then", STATES)
def test_a_port_is_opened_and_closed(first: Intent, then: Intent) -> None:
    model = Model()
    for intent in (first, then):
        converge(model, [intent])
        assert gate(model) == STATES[intent]
        assert planned(model, [intent]) == planned(model, [intent], whole=False) == ()


def test_what_others_open_is_closed_again() -> None:
    model = Model()
    converge(model, [CLOSED])
    model.links.links[NAME] = replace(model.links.links[NAME], port=PortOptions(flooding=None))
    assert [type(change).__name__ for change in planned(model, [CLOSED])] == ["SetMacs"]
    model.fdb.fix(model.links.links[NAME].index, make_spec().mac)
    converge(model, [CLOSED])
    assert gate(model) == STATES[CLOSED]


def test_the_guest_is_known_by_its_first_frame_and_gone_with_the_carrier() -> None:
    model = Model()
    converge(model, [WAITING])

    def guest() -> bool | None:
        return model.driver.observe(["p"], 1e9).ports["p"].guest

    assert guest() is None, "nobody asked"
    model.driver.follow_guest(WAITING)
    link = model.links.links[NAME]
    model.links.links[NAME] = replace(link, carrier=False)
    assert guest() is False
    model.links.links[NAME] = replace(link, carrier=True)
    assert guest() is None, "QEMU has opened the tap"
    model.fdb.learn(link.index)
    assert guest() is True
    model.driver.follow_guest(OPEN)
    assert guest() is None
