"""Errors as ``application/problem+json``, also those of the router and of validation; their documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import netplugin.api.errors as errors
from netplugin.api.errors import NetpluginError, NotFound
from netplugin.api.field_errors import invalid

PROBLEM = "application/problem+json"


def problem_response(
    error: NetpluginError, status: int | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """``status``: if it is not that of the error."""
    problem = error.problem().model_copy(update={"status": status or error.status})
    more = dict(headers or {})
    if isinstance(error, errors.Overloaded):
        more["Retry-After"] = "1"
    if isinstance(error, errors.Unauthorized):
        more["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem.model_dump(), problem.status, headers=more, media_type=PROBLEM)


async def _refused(request: Request, error: Any) -> JSONResponse:
    return problem_response(error)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    """FastAPI puts the part of the request before each field; only that of headers stays."""
    found = [{**each, "loc": each["loc"][each["loc"][0] != "header" :]} for each in error.errors()]
    return problem_response(invalid(found))


async def _of_router(request: Request, error: Any) -> JSONResponse:
    """An unknown path, or an unknown method."""
    wrong = NotFound(f"{request.method} {request.url.path}", step="route")
    return problem_response(wrong, error.status_code, error.headers)


def unexpected() -> JSONResponse:
    """The answer to an internal error."""
    return problem_response(errors.HostError("unexpected; the agent's log says what", step="agent"), 500)


async def _unexpected(request: Request, error: Any) -> JSONResponse:
    """The server logs the traceback."""
    return unexpected()


HANDLERS: dict[int | type[Exception], Any] = {
    NetpluginError: _refused,
    RequestValidationError: _invalid,
    HTTPException: _of_router,
    Exception: _unexpected,
}


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
