"""The rules of PortSpec's fields: a field that nobody handles is refused, and nothing drops it silently."""

from __future__ import annotations

import pytest

from agents.ports.teams import standby_spec
from netplugin.api.errors import Unsupported
from netplugin.api.models import Features, FieldRule, PortSpec
from netplugin.backend import Backend
from tests.unit.agent import SPEC
from tests.unit.fakes import FakeBackend

EVERYTHING = Features(
    networks=("flat", "vlan", "vxlan"),
    qos=True,
    min_rate=True,
    port_security=("mac", "ip"),
    max_queues=128,
    needs_shared_memory=True,
    virtual_functions=True,
    teaming=True,
    service_ports=True,
    internal_ports=True,
    port_names=True,
)
NOTHING = Features(networks=("flat", "vlan", "vxlan"), max_queues=128)


class Wider(PortSpec):
    """A PortSpec with a field that somebody has just added."""

    colour: str = "red"


def validate(spec: PortSpec, features: Features) -> None:
    backend = FakeBackend()
    backend.features = features  # type: ignore[misc]
    Backend.validate(backend, spec)


def wider(**fields: object) -> Wider:
    return Wider.model_validate({**SPEC, **fields})


def test_a_new_field_is_refused_by_every_backend_unless_it_has_its_default() -> None:
    validate(wider(), EVERYTHING)
    with pytest.raises(Unsupported, match="has no colour"):
        validate(wider(colour="blue"), EVERYTHING)


def test_a_new_field_cannot_change_on_a_live_port_and_is_not_the_standbys() -> None:
    assert wider(colour="blue").differing(wider()) == {"colour"}
    assert Wider.rules()["colour"] == FieldRule(live=False, standby=False)
    standby = standby_spec(wider(colour="blue"), "soft")
    assert type(standby) is PortSpec and not hasattr(standby, "colour")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("qos", {"egress_kbps": 1000}),
        ("vf", {"trusted": True}),
        ("qemu_user", 1001),
        ("device", "veth0"),
        ("internal", True),
        ("port_name", "vnic0"),
        ("vhost_user_socket", "/run/x/y/z"),
    ],
)
def test_a_field_needs_its_feature(field: str, value: object) -> None:
    spec = wider(**{field: value})
    validate(spec, EVERYTHING)
    with pytest.raises(Unsupported, match=f"has no {field}"):
        validate(spec, NOTHING)


def test_each_field_says_what_holds_for_it() -> None:
    silent = [
        name
        for name, field in PortSpec.model_fields.items()
        if not any(isinstance(each, FieldRule) for each in field.metadata)
    ]
    assert silent == []
