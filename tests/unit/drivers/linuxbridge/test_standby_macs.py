"""A bridge has the MAC of a VM at its standby, but while the VM has its VF."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netplugin.backend import Intent, TeamVf
from netplugin.host.link_values import Link
from netplugin.host.names import TAP, device_name
from tests.unit.drivers.linuxbridge.model import Model
from tests.unit.drivers.linuxbridge.strategies import converge, make_spec, planned

MAC = "52:54:00:00:00:01"
VLAN: dict[str, Any] = {"type": "vlan", "physical_network": "net2", "vlan_id": 7}
FREE = Intent("s", make_spec(network=VLAN), team_vf=TeamVf.FREE)
IN_USE, UNKNOWN = replace(FREE, team_vf=TeamVf.IN_USE), replace(FREE, team_vf=TeamVf.UNKNOWN)


def tap_of(model: Model) -> Link:
    return model.links.links[device_name(TAP, "s")]


def is_fixed(model: Model) -> bool:
    tap = tap_of(model)
    assert not tap.port.learning, "what the guest sends while its VF comes would keep frames from the VF"
    assert model.fdb.fixed(tap.index) in (frozenset(), frozenset({MAC}))
    return bool(model.fdb.fixed(tap.index))


@pytest.mark.parametrize("whole", [True, False])
def test_the_mac_follows_the_vf_and_nothing_has_drifted(whole: bool) -> None:
    model = Model()
    converge(model, [FREE])
    assert is_fixed(model)
    for intent in (IN_USE, FREE, IN_USE):
        (change,) = planned(model, [intent], whole=whole)
        assert change.follows_guest, "no operator has to look"
        reported = "left to the VF" if intent is IN_USE else "fixed"
        assert f"MAC {MAC} {reported}" in change.describe()
        converge(model, [intent], whole=whole)
        assert is_fixed(model) is (intent is FREE)
        assert planned(model, [intent], whole=whole) == ()


def test_what_others_did_has_drifted() -> None:
    model = Model()
    converge(model, [FREE, Intent("a", make_spec(network=VLAN, mac="52:54:00:00:00:02"))])
    model.links.set(tap_of(model).name, mtu=1400)
    assert [change.follows_guest for change in planned(model, [IN_USE])] == [True, False]
    converge(model, [FREE])
    model.fdb.release(tap_of(model).index, MAC)
    for learning in (False, True):
        model.links.set(tap_of(model).name, learning=learning)
        of_guest = planned(model, [FREE])[0].follows_guest
        assert of_guest is not learning, "without the MAC and learning it is as with a VF"
    converge(model, [FREE])
    other = model.links.links[device_name(TAP, "a")]
    model.fdb.release(other.index, "52:54:00:00:00:02")
    alone = Intent("a", make_spec(network=VLAN, mac="52:54:00:00:00:02"))
    assert [change.follows_guest for change in planned(model, [alone], whole=False)] == [False]


@pytest.mark.parametrize("before", [FREE, IN_USE])
def test_until_the_vf_was_seen_the_mac_stays_where_it_is(before: Intent) -> None:
    """An agent that starts again must not take frames from a VF that it has not looked at yet."""
    model = Model()
    converge(model, [before])
    assert planned(model, [UNKNOWN]) == ()
    assert is_fixed(model) is (before is FREE)
    model.links.set(tap_of(model).name, mtu=1400)
    assert "MACs as they are" in planned(model, [UNKNOWN])[0].describe()
    converge(model, [UNKNOWN])
    assert tap_of(model).mtu == 1500 and is_fixed(model) is (before is FREE)


def test_a_standby_that_is_opened_has_the_mac_until_its_vf_was_seen() -> None:
    model = Model()
    converge(model, [replace(UNKNOWN, closed=True)])
    converge(model, [UNKNOWN])
    assert is_fixed(model)


def test_a_new_standby_has_the_mac() -> None:
    """Its VF is claimed after it."""
    model = Model()
    converge(model, [UNKNOWN])
    assert is_fixed(model)


def test_a_standby_that_is_made_again_leaves_its_vf_the_mac() -> None:
    model = Model()
    converge(model, [IN_USE])
    assert not is_fixed(model)


@pytest.mark.parametrize("team_vf", list(TeamVf))
def test_a_standby_that_migrates_is_closed_whatever_its_vf_does(team_vf: TeamVf) -> None:
    model = Model()
    converge(model, [IN_USE])
    closed = replace(FREE, team_vf=team_vf, closed=True)
    converge(model, [closed])
    assert model.fdb.fixed(tap_of(model).index) == frozenset() and not tap_of(model).port.flooding
    assert planned(model, [closed]) == ()


def test_a_mac_that_was_learned_is_forgotten() -> None:
    """A VM that may use other MACs has none fixed."""
    model = Model()
    free = replace(FREE, spec=make_spec(network=VLAN, port_security={"enabled": False}))
    converge(model, [free])
    tap = tap_of(model)
    assert tap.port.learning and model.fdb.fixed(tap.index) == frozenset()
    released: list[str] = []
    model.fdb.release = lambda index, mac: released.append(mac)  # type: ignore[method-assign]
    converge(model, [replace(free, team_vf=TeamVf.IN_USE)])
    assert not tap_of(model).port.learning and released == [MAC]
