"""Hostile and mistaken input: every field of a PortSpec refuses it and is named in the error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from netplugin.api.batch_models import Batch, BatchPut
from netplugin.api.domain_models import DomainPolicy
from netplugin.api.fields import Mac, Name, PciAddress
from netplugin.api.models import Network, PortSpec, ReconcileRequest
from netplugin.api.pmd_models import PmdRequest
from tests.unit.agent import SPEC, agent, caller, served_agent

FULL: dict[str, Any] = {
    **SPEC,
    "vf": {"pci_address": "0000:03:10.1", "allowed_vlans": [100]},
    "qos": {"ingress_kbps": 1000},
    "port_security": {
        "roles": ["router"],
        "allowed_addresses": [{"ip": "10.0.0.5", "mac": "52:54:00:00:00:01"}],
    },
}
Place = tuple[str | int, ...]

TEXTS = (
    "",
    ";",
    "a;reboot",
    "'",
    '"',
    "`id`",
    "$(id)",
    "a b",
    "a\nb",
    "a\n",
    "\n",
    "\x00",
    "../",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "-rf",
    "<x/>",
    "&amp;",
    "%2e%2e",
    "ä",
    "\u202e",
    "x" * 10_000,
)
WRONG_TYPES: tuple[Any, ...] = ([], {}, [[]], {"a": 1}, 1.5, -1, 10**30, float("inf"))


def leaves(model: type[BaseModel], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every field that has no fields of its own, however deep, with its type."""
    for name, info in model.model_fields.items():
        yield from _leaves_of(info.annotation, (*place, name))


def _leaves_of(kind: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    inner = [k for k in get_args(kind) if k is not type(None)]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from leaves(kind, place)
    elif get_origin(kind) is tuple:
        yield from _leaves_of(inner[0], (*place, 0))
    elif get_origin(kind) in (Union, UnionType) and len(inner) == 1:
        yield from _leaves_of(inner[0], place)
    else:
        yield place, kind


def containers(model: type[BaseModel], place: Place = ()) -> Iterator[Place]:
    """Every object that a spec is made of."""
    yield place
    for leaf, _ in leaves(model):
        for end in range(1, len(leaf)):
            if not isinstance(leaf[end], int):
                yield leaf[:end]


LEAVES = dict(leaves(PortSpec))
CONTAINERS = sorted(set(containers(PortSpec)), key=str)


def with_value(place: Place, value: Any) -> dict[str, Any]:
    spec = copy.deepcopy(FULL)
    target: Any = spec
    for part in place[:-1]:
        target = target.setdefault(part, {}) if isinstance(target, dict) else target[part]
    target[place[-1]] = value
    return spec


def refused(place: Place) -> tuple[Any, ...]:
    """What this field must refuse: all of it, but for true and false where they are the answer."""
    flags = () if "bool" in str(LEAVES[place]) else (True, False)
    return (*TEXTS, *WRONG_TYPES, *flags)


def named(place: Place) -> str:
    return ".".join(map(str, place))


def is_named(place: Place, found: str) -> bool:
    """The field itself or, for a value that is an object or a list, a place within it."""
    return found == named(place) or found.startswith(named(place) + ".")


def test_the_walk_finds_the_fields() -> None:
    assert ("vm_id",) in LEAVES
    assert ("network", "vlan_id") in LEAVES
    assert ("port_security", "allowed_addresses", 0, "ip") in LEAVES
    assert len(LEAVES) == 34
    PortSpec.model_validate(FULL)


@pytest.mark.parametrize("place", LEAVES, ids=named)
def test_every_field_refuses_what_is_hostile(place: Place) -> None:
    for value in refused(place):
        with pytest.raises(ValidationError) as caught:
            PortSpec.model_validate(with_value(place, value))
        found = [named(error["loc"]) for error in caught.value.errors()]
        assert all(is_named(place, field) for field in found), (value, found)


@pytest.mark.parametrize("place", CONTAINERS, ids=lambda place: named(place) or "spec")
def test_unknown_fields_are_refused(place: Place) -> None:
    for name in ("colour", "body", "path", "query", "__class__", "x" * 10_000, "a\nb", ""):
        with pytest.raises(ValidationError) as caught:
            PortSpec.model_validate(with_value((*place, name), 1))
        assert [e["loc"] for e in caught.value.errors()] == [(*place, name)]


def test_through_http_each_field_is_named(tmp_path: Path) -> None:
    with agent(tmp_path) as running, served_agent(running) as url:
        with caller(url) as client:
            for place in LEAVES:
                for value in refused(place):
                    _assert_refused(client, place, with_value(place, value))
            for place in CONTAINERS:
                for name in ("colour", "body", "path", "query", "x" * 10_000):
                    field = (*place, name)
                    _assert_refused(client, field, with_value(field, 1))
        assert running.host.written == []
        assert running.store.records() == []


def _assert_refused(client: httpx.Client, place: Place, spec: dict[str, Any]) -> None:
    answer = client.put(
        "/v1/ports/p1", content=json.dumps(spec), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422, (place, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "invalid_request"
    assert len(problem["detail"]) < 1000
    fields = [error["field"] for error in problem["errors"]]
    assert fields, problem
    assert all(is_named(place, field) for field in fields), (place, fields)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"\\ud800": 1}',
        b"[" * 100_000,
        b'{"queues": 1' + b"0" * 5_000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_spec_is_a_problem_document(tmp_path: Path, body: bytes) -> None:
    with agent(tmp_path) as running, served_agent(running) as url, caller(url) as client:
        headers = {"Content-Type": "application/json"}
        answer = client.put("/v1/ports/p1", content=body, headers=headers)
        assert answer.status_code == 422
        assert answer.json()["code"] == "invalid_request"
        assert answer.json()["errors"][0]["field"] == "body"


def test_names_in_paths_and_queries(tmp_path: Path) -> None:
    with agent(tmp_path) as running, served_agent(running) as url:
        with caller(url) as client:
            for name in ("%00", "a%0a", "%2e%2e", "a%20b", "a%3Fb", "a;b", "x" * 65):
                answer = client.put(f"/v1/ports/{name}", json=SPEC)
                assert answer.status_code == 422, name
                assert answer.json()["errors"][0]["field"] in ("path", "port_id")
                assert client.delete(f"/v1/ports/{name}").status_code == 422
                answer = client.get(f"/v1/ports?vm_id={name}")
                assert answer.json()["errors"][0]["field"] == "vm_id"
            for path in ("/v1/ports/a/b", "/nope"):
                assert client.put(path, json=SPEC).status_code == 404
            for path in ("/v1/ports/p1/", "/v1/ports/..%2f"):  # not in the one spelling that a path has
                assert client.put(path, json=SPEC).status_code == 422
        assert running.host.written == []


NETWORKS_REFUSED: tuple[dict[str, Any], ...] = (
    {"type": "flat"},
    {"type": "vlan", "physical_network": "p"},
    {"type": "flat", "physical_network": "p", "vlan_id": 1},
    {"type": "vlan", "physical_network": "p", "vlan_id": 0},
    {"type": "vlan", "physical_network": "p", "vlan_id": 4095},
    {"type": "vxlan"},
    {"type": "vxlan", "network_id": "n", "vlan_id": 1},
    {"type": "vxlan", "network_id": "n", "physical_network": "p"},
    {"type": "gre", "physical_network": "p"},
    {"type": "flat", "physical_network": "p", "mtu": 575},
    {"type": "flat", "physical_network": "p", "mtu": 9217},
)


@pytest.mark.parametrize("network", NETWORKS_REFUSED, ids=str)
def test_networks_that_do_not_fit_together(network: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        PortSpec.model_validate({**SPEC, "network": network})
    assert caught.value.errors()[0]["loc"][0] == "network"


@pytest.mark.parametrize(
    ("mac", "fine"),
    [
        ("52:54:00:AB:cd:ef", True),
        ("00:00:00:00:00:00", False),
        ("ff:ff:ff:ff:ff:ff", False),
        ("01:00:5e:00:00:01", False),
        ("52-54-00-12-34-56", False),
        ("52:54:00:12:34", False),
        ("52:54:00:12:34:5g", False),
        ("52:54:00:12:34:56:78", False),
    ],
)
def test_macs(mac: str, fine: bool) -> None:
    if fine:
        assert TypeAdapter(Mac).validate_python(mac) == mac.lower()
        return
    with pytest.raises(ValidationError):
        TypeAdapter(Mac).validate_python(mac)


@pytest.mark.parametrize(
    ("given_ip", "kept"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("10.0.0.5/32", "10.0.0.5"),
        ("10.0.0.0/24", "10.0.0.0/24"),
        ("2001:0db8::0001", "2001:db8::1"),
        ("2001:DB8::/32", "2001:db8::/32"),
        ("10.0.0.5/24", None),
        ("0.0.0.0/0", None),
        ("::/0", None),
        ("224.0.0.1", None),
        ("ff02::1", None),
        ("10.0.0.256", None),
        ("10.0.0", None),
        ("010.0.0.1", None),
        ("fe80::1%eth0", None),
        ("10.0.0.0/33", None),
        ("10.0.0.0/255.255.255.0", None),
    ],
)
def test_allowed_addresses(given_ip: str, kept: str | None) -> None:
    spec = {**SPEC, "port_security": {"allowed_addresses": [{"ip": given_ip}]}}
    if kept is not None:
        assert PortSpec.model_validate(spec).port_security.allowed_addresses[0].ip == kept
        return
    with pytest.raises(ValidationError):
        PortSpec.model_validate(spec)


def test_other_requests() -> None:
    spec = PortSpec.model_validate(SPEC)
    with pytest.raises(ValidationError, match="once"):
        Batch(put=(BatchPut(port_id="a", spec=spec),), delete=("a",))
    for wrong in ({}, {"cpus": "1", "count": 1}, {"cpus": "1;2"}, {"cpus": "1\n"}, {"count": "2"}):
        with pytest.raises(ValidationError):
            PmdRequest.model_validate(wrong)
    for value in ("false", 0, "no", None):
        with pytest.raises(ValidationError):
            ReconcileRequest.model_validate({"dry_run": value})
        with pytest.raises(ValidationError):
            DomainPolicy.model_validate({"pin": value})


@given(st.text())
def test_a_name_is_harmless_wherever_it_goes(text: str) -> None:
    try:
        name = TypeAdapter(Name).validate_python(text)
    except ValidationError:
        return
    assert name == text
    assert name.isascii()
    assert all(c.isalnum() or c in "._-" for c in name)
    assert name[0] not in ".-"


@given(st.from_regex(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]", fullmatch=True))
def test_pci_addresses_have_one_spelling(text: str) -> None:
    assert TypeAdapter(PciAddress).validate_python(text) == text.lower()


@given(st.builds(Network, type=st.just("flat"), physical_network=st.just("p"), mtu=st.integers(576, 9216)))
def test_a_spec_survives_the_store(network: Network) -> None:
    spec = PortSpec.model_validate({**FULL, "network": network})
    assert PortSpec.model_validate_json(spec.model_dump_json()) == spec
