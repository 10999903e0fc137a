"""Routes that are served without FastAPI's solver of dependencies, which takes longest of all in a call.

FastAPI registers them and makes their OpenAPI document. It would also validate each answer a second time, and
read its own source at the first call of each route, on the event loop.
"""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.utils import request_params_to_args
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from agents.api.answers import CONDITIONS
from agents.api.bodies import SMALL, parsed, parsed_json
from agents.api.problems import invalid, problem_response
from agents.off_loop import OffLoop
from netplugin.api.errors import NetpluginError


class Route(APIRoute):
    """A route with parameters in path, query and headers, a body, conditions, and the request itself.

    A large body is validated in a thread.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises: TypeError for an endpoint with anything else."""
        super().__init__(*args, **kwargs)
        known = self.dependant
        #: The name of the endpoint's condition, and how it is made of a request.
        self._conditions = {
            str(each.name): CONDITIONS[each.call] for each in known.dependencies if each.call in CONDITIONS
        }
        if (
            len(self._conditions) < len(known.dependencies)
            or known.cookie_params
            or known.response_param_name
            or known.background_tasks_param_name
            or not iscoroutinefunction(self.endpoint)
        ):
            raise TypeError(f"{self.path}: the endpoint needs more of FastAPI than this route has")

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # 405
            return
        try:
            response = await self._answer(Request(scope, receive, send))
        except NetpluginError as error:
            response = problem_response(error)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        """Raises: NetpluginError."""
        values: dict[str, Any] = {}
        errors: list[Any] = []
        for field in self.dependant.path_params:
            value = request.path_params.get(field.alias)
            values[field.name], wrong = field.validate(value, {}, loc=("path", field.alias))
            errors += wrong or ()
        for fields, sent in (
            (self.dependant.query_params, request.query_params),
            (self.dependant.header_params, request.headers),
        ):
            if fields:
                found, wrong = request_params_to_args(fields, sent)
                values |= found
                errors += wrong
        if self.body_field is not None:
            values[self.body_field.name], wrong = await self._body(request, self.body_field)
            errors += wrong or ()
        if errors:
            raise invalid(errors)
        for name, made_of in self._conditions.items():
            values[name] = made_of(request)
        if self.dependant.request_param_name:
            values[self.dependant.request_param_name] = request
        return _response(await self.endpoint(**values), self.status_code or 200)

    async def _body(self, request: Request, field: Any) -> tuple[Any, Any]:
        """The model, or the errors. Raises: InvalidRequest."""
        body = await request.body()
        if len(body) > SMALL:
            off_loop: OffLoop = request.app.state.off_loop
            return await off_loop.compute(parsed, body, field.field_info.annotation), ()
        if not body and not field.field_info.is_required():
            return field.get_default(), ()
        if not body:
            return None, [{"type": "missing", "loc": ("body",), "msg": "Field required"}]
        found: tuple[Any, Any] = field.validate(parsed_json(body), {}, loc=("body",))
        return found


def _response(made: Any, status: int) -> Response:
    if isinstance(made, Response):
        return made
    if made is None:
        return Response(status_code=status)
    if isinstance(made, BaseModel):
        return Response(made.model_dump_json(), status, media_type="application/json")
    if isinstance(made, list):
        body = b"[" + b",".join(each.model_dump_json().encode() for each in made) + b"]"
        return Response(body, status, media_type="application/json")
    return JSONResponse(made, status)
