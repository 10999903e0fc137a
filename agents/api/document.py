"""The OpenAPI document of the agent's API, which FastAPI makes of the declared routes.

FastAPI serves none of them: its solver of dependencies took longest of all in a call, it validates each
answer a second time, and it reads its own source at the first call of each route, on the event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any, get_args, get_origin

import fastapi
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from agents.api.routing import Declared, FromRequest, Header, Query
from netplugin.api.errors import Problem


def made_of(routes: Iterable[Declared]) -> dict[str, Any]:
    """The document of these routes."""
    document = get_openapi(
        title="netplugin agent",
        version="1",
        description="Configures the network interfaces of VMs on this hypervisor.",
        routes=[_route(each) for each in routes if each.in_document],
    )
    return _with_links(_with_problems(document))


def _route(declared: Declared) -> APIRoute:
    return APIRoute(
        declared.path,
        _stand_in(declared.endpoint),
        methods=[declared.method],
        status_code=None if declared.status_code == 200 else declared.status_code,
        **declared.more,
    )


def _stand_in(endpoint: Any) -> Any:
    """A function with the name, the text and the parameters of an endpoint, in the words of FastAPI."""
    signature = inspect.signature(endpoint, eval_str=True)
    parameters = [
        each.replace(annotation=_in_fastapi(each.annotation)) for each in signature.parameters.values()
    ]

    async def stand_in() -> None:
        """Never called."""

    stand_in.__name__, stand_in.__doc__ = endpoint.__name__, endpoint.__doc__
    stand_in.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return stand_in


def _in_fastapi(annotation: Any) -> Any:
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *marks = get_args(annotation)
    return Annotated[(kind, *map(_mark_in_fastapi, marks))]


def _mark_in_fastapi(mark: Any) -> Any:
    if isinstance(mark, Query):
        return fastapi.Query()
    if isinstance(mark, Header):
        return fastapi.Header()
    if isinstance(mark, FromRequest):
        return fastapi.Depends(_reader(mark))
    return mark


def _reader(mark: FromRequest) -> Any:
    """A dependency that reads the headers of which a value is made."""
    optional = inspect.Parameter.KEYWORD_ONLY

    def reader() -> None:
        """Never called."""

    reader.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, optional, default=None, annotation=Annotated[kind, fastapi.Header()])
            for name, kind in mark.headers.items()
        ]
    )
    return reader


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
