"""What a request becomes for its endpoint: its conditions, and its body, parsed in a thread if it is large.

Pydantic validates a body in one call that holds the GIL and so blocks the event loop, and it
creates an error for each of up to a million invalid values.
"""

from __future__ import annotations

import inspect
import json
import linecache
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError, WithJsonSchema
from starlette.datastructures import Headers

from agents.api.roles import right_of
from agents.off_loop import OffLoop
from netplugin.api.batch_models import Batch, BatchPut
from netplugin.api.conditions import Condition
from netplugin.api.errors import InvalidRequest
from netplugin.api.field_errors import MOST_ERRORS, invalid

#: Bodies up to this size in bytes are always validated within a few milliseconds, whatever is wrong in them.
#: That of a port is smaller.
SMALL = 4 * 1024
#: Limits above those of any object and any list of the API.
_WIDEST, _LONGEST = 1024, 4096
_SAFE = ("GET", "HEAD", "OPTIONS")

#: ``Condition.parse`` reads the tags; the pattern is for the document.
_Tag = Annotated[str, WithJsonSchema({"type": "string", "pattern": r'^(\*|(W/)?"[!#-~]*")$'})]
_Tags = Annotated[list[_Tag] | None, Header()]


async def _of_read(if_none_match: _Tags = None) -> Condition:
    return Condition.parse((), if_none_match or ())


async def condition_of_change(
    if_match: _Tags = None, if_none_match: _Tags = None, netplugin_override: Annotated[bool, Header()] = False
) -> Condition:
    """Raises: InvalidRequest."""
    return replace(Condition.parse(if_match or (), if_none_match or ()), override=netplugin_override)


IfNoneMatch = Annotated[Condition, Depends(_of_read)]
IfMatch = Annotated[Condition, Depends(condition_of_change)]


def refuse_conditions(headers: Headers, why: str, *, step: str, fix: str) -> None:
    """For a change that would lose its condition. Raises: InvalidRequest."""
    for header in ("If-Match", "If-None-Match", "Netplugin-Override"):
        if header in headers:
            raise InvalidRequest.of_field(header, why, step=step, fix=fix)


class JsonRequest(Request):
    """A request whose body is parsed already: FastAPI would parse it on the event loop."""

    parsed: Any = None

    async def json(self) -> Any:
        return self.parsed


class JsonRoute(APIRoute):
    """A route that reads its body off the event loop if that is large, and takes no condition by accident."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Raises: TypeError for an endpoint that does not declare who may call it."""
        right_of(endpoint)
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        # FastAPI looks at the source of an endpoint at its first call, on the event loop. Without a time of
        # change the lines stay in memory, also when an upgrade replaces the file meanwhile.
        file = inspect.getfile(self.endpoint)
        lines = linecache.getlines(file)
        linecache.cache[file] = (len(lines), None, lines, file)
        model = self.body_field and self.body_field.field_info.annotation
        has_condition = any(part.call is condition_of_change for part in self.dependant.dependencies)

        async def handled(request: Request) -> Response:
            if not has_condition and request.method not in _SAFE:
                why = f"is not for {request.method} of this path"
                fix = "send it without the condition; the ports of a batch have if_match, and it has override"
                refuse_conditions(request.headers, why, step="validate", fix=fix)
            if model is not None:
                request = await _parsed(JsonRequest(request.scope, request.receive), model)
            return await handle(request)

        return handled


async def _parsed(request: JsonRequest, model: Any) -> JsonRequest:
    """Raises: InvalidRequest."""
    body = await request.body()
    if len(body) > SMALL:
        off_loop: OffLoop = request.app.state.off_loop
        # A model, which FastAPI does not validate again.
        request.parsed = await off_loop.compute(validated, body, model)
    elif body:
        request.parsed = parsed_json(body)
    return request


def parsed_json(body: bytes) -> Any:
    """Raises: InvalidRequest."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise _refused((), "could not be parsed as JSON") from None


def validated(body: bytes, model: Any) -> Any:
    """An instance of the model from a large body.

    Raises: InvalidRequest, also for objects or lists that are larger than any of the API.
    """
    document = parsed_json(body)
    try:
        for place, message in _too_wide(document, ()):
            raise _refused(place, message)
    except RecursionError:
        raise _refused((), "is nested too deeply") from None
    if model is Batch:
        document = _with_puts(document)
    try:
        return TypeAdapter(model).validate_python(document)
    except ValidationError as wrong:
        raise invalid(wrong.errors(include_url=False, include_input=False)) from None


def _with_puts(document: Any) -> Any:
    """The batch with its ports as models: one at a time, because pydantic holds the GIL in each call."""
    puts = document.get("put") if isinstance(document, dict) else None
    if not isinstance(puts, list):
        return document
    errors: list[Any] = []
    models: list[BatchPut] = []
    for index, entry in enumerate(puts):
        try:
            models.append(BatchPut.model_validate(entry))
        except ValidationError as wrong:
            found = wrong.errors(include_url=False, include_input=False)
            errors += [{**error, "loc": ("put", index, *error["loc"])} for error in found]
        if len(errors) >= MOST_ERRORS:
            break
    if errors:
        raise invalid(errors)
    return {**document, "put": models}


def _too_wide(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict):
        if len(value) > _WIDEST:
            yield place, f"has {len(value)} members, no object has more than {_WIDEST}"
            return
        for name, member in value.items():
            yield from _too_wide(member, (*place, name[:80]))
    elif isinstance(value, list):
        if len(value) > _LONGEST:
            yield place, f"has {len(value)} entries, no list has more than {_LONGEST}"
            return
        for index, member in enumerate(value):
            yield from _too_wide(member, (*place, str(index)))


def _refused(place: tuple[str, ...], message: str) -> InvalidRequest:
    return invalid([{"type": "refused", "loc": place, "msg": message}])
