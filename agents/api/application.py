"""The application of the agent: FastAPI with our routes and errors, and what its OpenAPI document adds."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from agents.api.bodies import JsonRoute
from agents.api.problems import HANDLERS
from agents.off_loop import OffLoop
from netplugin.api.problem import Problem


class Application(FastAPI):
    """Makes its OpenAPI document when it is requested: that takes longer than all else at start."""

    def __init__(self, off_loop: OffLoop) -> None:
        super().__init__(
            title="netplugin agent",
            version="1",
            description="Configures the network interfaces of VMs on this hypervisor.",
            # Its own route for the document would make it on the event loop, and for everybody.
            openapi_url=None,
            # A redirect would break mutating and asynchronous calls.
            redirect_slashes=False,
            generate_unique_id_function=lambda route: route.name,
            exception_handlers=HANDLERS,
        )
        self.router.route_class = JsonRoute
        self.state.off_loop = off_loop

    def openapi(self) -> dict[str, Any]:
        """Return the document. Two threads that ask first both make it: it is the same."""
        if self.openapi_schema is None:
            made = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=self.routes
            )
            self.openapi_schema = _with_links(_with_problems(made))
        return self.openapi_schema


def _with_links(document: dict[str, Any]) -> dict[str, Any]:
    """Say what can be done with an object that was put or deleted (OpenAPI 3.1, "Link Object")."""
    paths = document["paths"]
    for path, operations in paths.items():
        if "put" not in operations or "{" not in path:
            continue
        names = [each["name"] for each in operations["put"]["parameters"] if each["in"] == "path"]
        same = {name: f"$request.path.{name}" for name in names}
        of_object = [operations.get("get"), operations.get("delete"), operations["put"]]
        of_object += [each.get("post") for other, each in paths.items() if other.startswith(f"{path}:")]
        ids = [each["operationId"] for each in of_object if each is not None]
        links = {name: {"operationId": name, "parameters": same} for name in ids}
        for method, status in (("put", "200"), ("delete", "204")):
            if method in operations:
                operations[method]["responses"].setdefault(status, {"description": ""})["links"] = links
    return document


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
