"""docs/openapi.json is the document that the agent serves; each change of the API is seen in it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from agents.api.document import routes
from tests.docs.blocks import ROOT
from tests.docs.openapi_changes import changes

DOCUMENT: dict[str, Any] = {
    "paths": {
        "/v1/ports": {
            "get": {
                "parameters": [
                    {"name": "vm_id", "in": "query", "schema": {"type": "string"}},
                    {"name": "state", "in": "query", "schema": {"type": "string"}},
                ]
            }
        }
    },
    "components": {
        "schemas": {"Port": {"required": ["port_id", "state"], "properties": {"mtu": {"maximum": 9000}}}}
    },
}


def test_the_document_of_the_agent_is_the_one_in_the_docs() -> None:
    kept = json.loads((ROOT / "docs/openapi.json").read_text())
    found = list(changes(kept, json.loads(json.dumps(routes().openapi()))))
    if found:
        pytest.fail("\n".join(["python -m netplugin.docgen writes these to docs/openapi.json:", *found]))


def test_equal_documents_and_another_order_are_no_change() -> None:
    other = copy.deepcopy(DOCUMENT)
    other["paths"]["/v1/ports"]["get"]["parameters"].reverse()
    other["components"]["schemas"]["Port"]["required"].reverse()
    assert list(changes(DOCUMENT, other)) == []


def test_a_path_that_is_new_is_added_and_one_that_is_gone_is_removed() -> None:
    found = list(changes({"paths": {"/v1/pmd": {}}}, {"paths": {"/v1/vfs": {"get": {}}}}))
    assert found == ["removed paths > /v1/pmd: {}", 'added   paths > /v1/vfs: {"get": {}}']


def test_a_value_that_differs_is_changed_at_its_path() -> None:
    other = copy.deepcopy(DOCUMENT)
    other["components"]["schemas"]["Port"]["properties"]["mtu"]["maximum"] = 9216
    other["paths"]["/v1/ports"]["get"]["parameters"][1]["schema"]["type"] = "integer"
    assert list(changes(DOCUMENT, other)) == [
        "changed components > schemas > Port > properties > mtu > maximum: 9000 -> 9216",
        "changed paths > /v1/ports > get > parameters > state in query > schema > type: "
        '"string" -> "integer"',
    ]


def test_a_field_that_becomes_required_and_a_parameter_that_goes_are_named() -> None:
    other = copy.deepcopy(DOCUMENT)
    other["components"]["schemas"]["Port"]["required"] += ["mtu"]
    del other["paths"]["/v1/ports"]["get"]["parameters"][0]
    required, parameter = changes(DOCUMENT, other)
    assert required == 'added   components > schemas > Port > required > mtu: "mtu"'
    assert parameter.startswith('removed paths > /v1/ports > get > parameters > vm_id in query: {"name"')


def test_a_value_that_is_long_is_cut() -> None:
    [line] = changes({}, {"paths": {"/" + "long" * 50: {}}})
    assert line.endswith("...") and len(line) < 140
