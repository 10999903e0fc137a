"""Large bodies: what is too wide, and which ports of a batch are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agents.api.bodies import validated
from netplugin.api.batch_models import Batch, Retag
from netplugin.api.errors import InvalidRequest
from netplugin.api.models import ReconcileRequest
from tests.unit.agent import SPEC


def refused(document: Any, model: Any = Batch) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        validated(json.dumps(document).encode(), model)
    return error.value


def test_what_is_fit_is_what_the_model_makes_of_it() -> None:
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


def test_names_that_are_no_text_are_told_all_the_same() -> None:
    error = refused({"put": [{"port_id": "p", "spec": {"\ud800": 1}}, {"\ud800": [1] * 5000}]})
    assert error.errors[0].field == "put.1.\\ud800"


def test_what_is_nested_too_deeply_is_refused() -> None:
    for depth in range(100, 1200, 50):
        with pytest.raises(InvalidRequest):
            validated(b'{"a":' * depth + b"1" + b"}" * depth, Batch)
