"""Large bodies: what is too wide, and which ports of a batch are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agents.api.bodies import check
from netplugin.api.errors import InvalidRequest
from tests.unit.agent import SPEC


def refused(document: Any, is_batch: bool = True) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        check(json.dumps(document).encode(), is_batch=is_batch)
    return error.value


def test_what_is_fit_passes() -> None:
    check(json.dumps({"put": [{"port_id": "p1", "spec": SPEC}]}).encode(), is_batch=True)
    check(b"no json", is_batch=True)
    check(b"[" * 100_000, is_batch=True)
    check(b"[]", is_batch=True)
    check(json.dumps({"put": [{"port_id": "p1"}]}).encode(), is_batch=False)


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


def test_what_is_nested_too_deeply_is_refused_or_left_to_the_application() -> None:
    for depth in range(100, 1200, 50):
        document = b'{"a":' * depth + b"1" + b"}" * depth
        try:
            check(document, is_batch=True)
        except InvalidRequest as refused:
            assert "nested" in refused.detail
