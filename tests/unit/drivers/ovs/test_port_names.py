"""Names of ports that the caller chooses: used if they are free, and never taken from another port."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from drivers.ovs import row_changes as c
from drivers.ovs.placing import bridge_refusal, port_refusal
from drivers.ovs.plan import port_changes
from netplugin.api.errors import Conflict
from netplugin.backend import NAME_CLAIM, NOBODY, Claim, Intent, claim_name
from tests.unit.drivers.ovs.conftest import Ports, spec_of, vhost
from tests.unit.ovs import port, settings_of, soon


def test_a_port_has_the_name_that_was_chosen(ports: Ports) -> None:
    named = vhost("p1", port_name="vnic0.1")
    ports.plug(named, port_name="vnic0.1")
    ports.plug(vhost("p2"))
    assert "vnic0.1" in ports.switch.vsctl("list-ports", "br-net1").split()
    seen = ports.seen()
    assert seen.rows["p1"].name == "vnic0.1"
    desired = {"p1": named, "p2": vhost("p2")}
    changes = port_changes(desired, set(), seen)
    assert [change.describe() for change in changes if "vnic0.1" in change.describe()] == []
    removal = port_changes({}, {"p1"}, seen)
    assert "remove port vnic0.1 from br-net1" in [change.describe() for change in removal]


def test_a_name_of_others_is_refused_whatever_is_observed(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    ports.ovs.db.write([port("br-net1", "theirs")], soon())
    for seen in (ports.seen(), ports.seen("p2")):
        refused = port_refusal(vhost("p2", port_name="theirs"), seen, 1)
        assert isinstance(refused, Conflict) and "theirs" in refused.detail
        assert port_refusal(vhost("p2", port_name="free"), seen, 1) is None
        assert isinstance(port_refusal(vhost("p2", port_name="br-net1"), seen, 1), Conflict), "of a bridge"


def test_the_name_of_a_port_of_ours_is_refused_also_without_its_record(ports: Ports) -> None:
    """An orphan, or a port that is still being removed."""
    ports.plug(vhost("p1", port_name="vnic0"), port_name="vnic0")
    for seen in (ports.seen(), ports.seen("p2")):
        assert port_refusal(vhost("p1", port_name="vnic0"), seen, 1) is None
        refused = port_refusal(vhost("p2", port_name="vnic0"), seen, 1)
        assert isinstance(refused, Conflict) and "that of port p1" in refused.detail


def test_a_name_is_not_that_of_a_bridge_to_come(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    refused = bridge_refusal(settings_of(ports.switch), vhost("p2", port_name="br-later"), ports.seen())
    assert refused is None
    settings = replace(settings_of(ports.switch), bridge_mappings={"net1": "br-net1", "net2": "br-later"})
    refused = bridge_refusal(settings, vhost("p2", port_name="br-later"), ports.seen())
    assert isinstance(refused, Conflict) and "bridge_mappings" in refused.detail


def test_a_device_of_the_kernel_keeps_its_name(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    named, other = vhost("p2", port_name="lo"), vhost("p3")
    failed = dict(ports.apply(c.AddPort(("p2",), named), c.AddPort(("p3",), other)).failed)
    assert isinstance(failed.pop("p2"), Conflict) and failed == {}
    assert "lo" not in ports.switch.vsctl("list-ports", "br-net1").split()


def test_a_name_is_that_of_one_port() -> None:
    intent = Intent("p2", spec_of(port_name="vnic0"))
    claim = Claim(NAME_CLAIM, "vnic0")
    for holder in ({}, {claim: "p2"}, {claim: NOBODY}):
        assert claim_name(intent, holder) == (claim,)
    assert claim_name(Intent("p2", spec_of()), {claim: "p1"}) == ()
    with pytest.raises(Conflict, match="port_name vnic0 is that of port p1"):
        claim_name(intent, {claim: "p1"})


OF_THE_AGENT, OF_LIBVIRT, OF_SYSCTL = ["npv1", "np"], ["vnet0", "macvtap1"], ["all", "default"]
MALFORMED = ["", "x" * 16, ".", "..", "-x", "a/b", "a b", "a\n", 5]


@pytest.mark.parametrize("name", [*OF_THE_AGENT, *OF_LIBVIRT, *OF_SYSCTL, *MALFORMED])
def test_names_that_cannot_be_are_refused(name: object) -> None:
    with pytest.raises(ValidationError):
        spec_of(port_name=name)
