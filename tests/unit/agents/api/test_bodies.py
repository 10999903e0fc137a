"""Large bodies: what is too wide, and which ports of a batch are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agents.api.bodies import validated
from netplugin.api.batch_models import Batch, Retag
from netplugin.api.errors import InvalidRequest
from netplugin.api.models import ReconcileRequest
from tests.unit.agent import SPEC, agent, caller, served_agent
from tests.unit.core.test_field_errors import FOREIGN


def refused(document: Any, model: Any = Batch) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        validated(json.dumps(document).encode(), model)
    return error.value


def test_a_valid_body_is_validated_as_by_its_model() -> None:
    document = {"put": [{"port_id": "p1", "spec": SPEC}], "delete": ["p2"]}
    assert validated(json.dumps(document).encode(), Batch) == Batch.model_validate(document)
    assert validated(b'{"dry_run": true}', ReconcileRequest | None) == ReconcileRequest(dry_run=True)
    assert validated(b"null", ReconcileRequest | None) is None


def test_what_the_model_refuses_is_named() -> None:
    assert [e.field for e in refused({"put": [{"port_id": "p", "spec": SPEC}] * 2}).errors] == ["body"]
    assert [e.field for e in refused({"delete": ["p"], "more": 1}).errors] == ["more"]
    assert [e.field for e in refused({"ports": ["a"]}, Retag).errors] == ["to_vlan"]
    for body in (b"no json", b"[" * 100_000, b"[]", b'{"put": 1}'):
        with pytest.raises(InvalidRequest):
            validated(body, Batch)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({str(n): 1 for n in range(2000)}, "body"),
        ({"put": [{"port_id": "p", "spec": {str(n): 1 for n in range(2000)}}]}, "put.0.spec"),
        ({"put": [1] * 5000}, "put"),
    ],
)
def test_what_is_too_wide_is_one_error(document: Any, field: str) -> None:
    error = refused(document)
    assert [found.field for found in error.errors] == [field]


def test_wrong_ports_are_named_and_not_all_of_them() -> None:
    error = refused({"put": [{"port_id": "p1", "spec": SPEC}, *[{"port_id": "p"}] * 4000]})
    assert error.errors[0].field == "put.1.spec" and len(error.errors) == 100


def test_names_that_are_no_text_are_reported_too() -> None:
    error = refused({"put": [{"port_id": "p", "spec": {"\ud800": 1}}, {"\ud800": [1] * 5000}]})
    assert error.errors[0].field == "put.1.\\ud800"


def test_what_is_nested_too_deeply_is_refused() -> None:
    for depth in range(100, 1200, 50):
        with pytest.raises(InvalidRequest):
            validated(b'{"a":' * depth + b"1" + b"}" * depth, Batch)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with agent(tmp_path_factory.mktemp("agent")) as running, served_agent(running) as made:
        yield made


PORT = {**SPEC, "network": {**SPEC["network"], "vlan_id": 5000}}
SERVICE = {"device": "x", "mac": "52:54:00:00:00:01", "backend": "fake", "network": PORT["network"]}


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("PUT", "/v1/ports/p1", PORT, "network.vlan_id: must be at most 4094"),
        ("PUT", "/v1/ports/p1", None, "body: is required"),
        ("PUT", "/v1/ports/p1", [], "body: must be an object with named fields"),
        ("PUT", "/v1/ports/..p", SPEC, "port_id: must be 1 to 64 letters"),
        (
            "POST",
            "/v1/ports:batch",
            {"put": [{"port_id": "p", "spec": PORT}]},
            "put.0.spec.network.vlan_id",
        ),
        ("POST", "/v1/ports:batch", {"delete": ["../x"] * 2000}, "delete.0: must be 1 to 64 letters"),
        ("POST", "/v1/ports:retag", {"ports": ["p"], "to_vlan": 0}, "to_vlan: must be at least 1"),
        ("PUT", "/v1/service-ports/s1", SERVICE, "network.vlan_id: must be at most 4094"),
        ("PUT", "/v1/networks/n1", {"type": "vxlan", "vni": "many"}, "vni: must be a whole number"),
        (
            "PUT",
            "/v1/networks/n1",
            {"type": "vxlan", "vni": 1, "peers": ["999.1.1.1"]},
            "peers.0: must be",
        ),
        (
            "PUT",
            "/v1/physical-networks/n1",
            {"ovs": {"devices": ["?"]}},
            "ovs.devices.0: must be a PCI",
        ),
        ("GET", "/v1/ports?limit=many", None, "limit: must be a whole number"),
        ("GET", "/v1/ports?state=actve", None, "state: must be "),
        ("GET", "/v1/ports?colour=red", None, "colour: there is no such field"),
        ("GET", "/v1/events?after=-1", None, "after: must be at least 0"),
        ("GET", "/v1/pmd?interval=61", None, "interval: must be at most 60"),
        ("POST", "/v1/reconcile", {"dry_run": "no"}, "dry_run: must be true or false"),
    ],
)
def test_a_wrong_call_gets_an_error_without_words_of_pydantic(
    url: str, method: str, path: str, body: Any, words: str
) -> None:
    with caller(url) as client:
        answer = client.request(method, path, json=body) if body is not None else client.request(method, path)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid_request")
    assert words in problem["detail"], problem
    assert not FOREIGN.search(" ".join(each["message"] for each in problem["errors"]))
