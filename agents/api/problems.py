"""Errors as ``application/problem+json``, also those of the router and of validation; their documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

import netplugin.api.errors as errors
from netplugin.api.errors import FieldError, InvalidRequest, NetpluginError, NotFound
from netplugin.api.field_errors import message

PROBLEM = "application/problem+json"
# Maximum number of reported errors; a body of a megabyte could have a million.
_MOST_ERRORS = 100


def problem_response(error: NetpluginError) -> JSONResponse:
    headers = {}
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = "1"
    if isinstance(error, errors.Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.problem().model_dump(), error.status, headers=headers, media_type=PROBLEM)


def documented(*kinds: type[NetpluginError]) -> dict[int | str, dict[str, Any]]:
    """The documented errors of a route: its own, and those of the guard, of validation and of threads."""
    guard = (errors.InvalidRequest, errors.Unauthorized, errors.Forbidden, errors.Overloaded)
    return responses(*kinds, *guard, errors.OperationTimeout)


def responses(*kinds: type[NetpluginError]) -> dict[int | str, dict[str, Any]]:
    """The documentation of these errors; one status may have several codes."""
    titles: dict[int, list[str]] = {}
    for kind in dict.fromkeys(kinds):
        titles.setdefault(kind.status, []).append(kind.code)
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": ", ".join(codes), "content": {PROBLEM: {"schema": schema}}}
        for status, codes in titles.items()
    }


ANY_ERROR = documented(*errors.ALL)


async def http_error(request: Request, error: Exception) -> JSONResponse:
    """Convert errors of the router: unknown path, unknown method."""
    assert isinstance(error, HTTPException)
    wrong: NetpluginError = NotFound(f"{request.method} {request.url.path}", step="route")
    problem = wrong.problem().model_copy(update={"status": error.status_code})
    return JSONResponse(problem.model_dump(), error.status_code, headers=error.headers, media_type=PROBLEM)


async def unexpected(request: Request, error: Exception) -> JSONResponse:
    """An internal error. The server logs its traceback."""
    wrong = errors.HostError("unexpected; the agent's log says what", step="agent")
    problem = wrong.problem().model_copy(update={"status": 500})
    return JSONResponse(problem.model_dump(), 500, media_type=PROBLEM)


def invalid(found: Sequence[Any]) -> InvalidRequest:
    """Convert pydantic's errors to an error that names each field as in the request."""
    fields = []
    for finding in found[:_MOST_ERRORS]:
        place = [str(part) for part in finding["loc"]]
        if place and place[0] in ("body", "path", "query"):
            del place[0]
        if finding["type"] == "json_invalid":
            place = []
        fields.append(FieldError(field=".".join(place) or "body", message=message(finding)))
    detail = "; ".join(f"{field.field[:80]}: {field.message}" for field in fields[:5])
    return InvalidRequest(detail, step="validate", errors=fields)
