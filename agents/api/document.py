"""The OpenAPI document of the agent's API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from netplugin.api.errors import Problem


class Application(FastAPI):
    """Makes its OpenAPI document when it is requested: that takes longer than all else at start."""

    def openapi(self) -> dict[str, Any]:
        """Return the document. Two threads that ask first both make it: it is the same."""
        if self.openapi_schema is None:
            self.openapi_schema = _with_problems(
                get_openapi(
                    title=self.title, version=self.version, description=self.description, routes=self.routes
                )
            )
        return self.openapi_schema


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    """Put the errors' schema in the place of FastAPI's, and add the journal's answer."""
    for operations in document["paths"].values():
        for method in operations.keys() & {"put", "post", "delete"}:
            answer = operations[method]["responses"].setdefault("200", {"description": ""})
            done = "done; " if answer["description"] else ""
            answer["description"] = f"{done}with the header taskuuid: written to the journal, without a body"
    schemas = document["components"]["schemas"]
    schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schemas["Problem"].pop("$defs", {}))
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    return document
