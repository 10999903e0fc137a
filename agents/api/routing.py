"""The routes of the API: how they are declared, and how a request becomes the values of an endpoint.

They are declared as FastAPI's are, and ``document`` has FastAPI make the OpenAPI document of them when it is
requested. An agent whose document nobody reads does without: 7 MB less, and 0.1 s of CPU time at the start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute

from agents.api.bodies import SMALL, parsed, parsed_json
from agents.api.problems import invalid, problem_response
from agents.api.roles import right_of
from agents.off_loop import OffLoop
from netplugin.api.errors import FieldError, InvalidRequest, NetpluginError

E = TypeVar("E", bound=Callable[..., Any])
_SAFE = ("GET", "HEAD", "OPTIONS")

# -- What an annotation of an endpoint's parameter says in addition to its type. A parameter without any of
# these is in the path if the path names it, else it is the body, or the request itself.


@dataclass(frozen=True)
class Query:
    """The query parameters of the call, as one model."""


@dataclass(frozen=True)
class Header:
    """A header of the name of the parameter, with hyphens."""


@dataclass(frozen=True)
class FromRequest:
    """A value that is made of the request. ``headers``: those that it reads, with their types."""

    make: Callable[[Request], Any]
    headers: Mapping[str, Any] = field(hash=False)


# -- The declaration of routes. --------------------------------------------------------------------


@dataclass(frozen=True)
class Declared:
    """An endpoint, and what the document says of it; ``more`` are options of FastAPI."""

    method: str
    path: str
    endpoint: Callable[..., Any]
    status_code: int
    in_document: bool
    more: Mapping[str, Any]


class Routes:
    """Collects the routes, in the order in which requests are compared with them."""

    def __init__(self) -> None:
        self.declared: list[Declared] = []

    def get(self, path: str, **more: Any) -> Callable[[E], E]:
        return self._adding("GET", path, more)

    def put(self, path: str, **more: Any) -> Callable[[E], E]:
        return self._adding("PUT", path, more)

    def post(self, path: str, **more: Any) -> Callable[[E], E]:
        return self._adding("POST", path, more)

    def delete(self, path: str, **more: Any) -> Callable[[E], E]:
        return self._adding("DELETE", path, more)

    def _adding(self, method: str, path: str, more: dict[str, Any]) -> Callable[[E], E]:
        status, in_document = more.pop("status_code", 200), more.pop("include_in_schema", True)

        def add(endpoint: E) -> E:
            self.declared.append(Declared(method, path, endpoint, status, in_document, more))
            return endpoint

        return add


# -- How a route is served. ------------------------------------------------------------------------


class Route(StarletteRoute):
    """A route with parameters in path, query and headers, a body, conditions, and the request itself.

    A large body is validated in a thread.
    """

    def __init__(self, declared: Declared) -> None:
        """Raises: TypeError for an endpoint with anything else, or without a right."""
        super().__init__(declared.path, declared.endpoint)
        self.methods = {declared.method}
        self._status = declared.status_code
        self._values: dict[str, _Value] = {}
        self._made: dict[str, Callable[[Request], Any]] = {}
        self._body: _Body | None = None
        self._has_condition = False
        if not inspect.iscoroutinefunction(declared.endpoint):
            raise TypeError(f"{declared.path}: the endpoint is no coroutine function")
        for name, parameter in inspect.signature(declared.endpoint, eval_str=True).parameters.items():
            self._take(name, parameter)
        right_of(declared.endpoint)

    def _take(self, name: str, parameter: inspect.Parameter) -> None:
        """Add a parameter of the endpoint. Raises: TypeError for a second body."""
        annotation = parameter.annotation
        marks = {type(mark): mark for mark in _marks(annotation)}
        if FromRequest in marks:
            self._made[name] = marks[FromRequest].make
            self._has_condition |= "if_none_match" in marks[FromRequest].headers
        elif annotation is Request:
            self._made[name] = lambda request: request
        elif Query in marks:
            self._values[name] = _OfQuery(_adapter(annotation))
        elif Header in marks:
            header = name.replace("_", "-")
            self._values[name] = _OfHeader(header, _adapter(annotation), parameter.default)
        elif name in self.param_convertors:
            self._values[name] = _OfPath(name, _adapter(annotation))
        elif self._body is None:
            self._body = _Body(name, annotation, parameter.default)
        else:
            raise TypeError(f"{self.path}: {self._body.name} and {name} cannot both be the body")

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
        wrong: list[Any] = []
        for name, value in self._values.items():
            try:
                values[name] = value.of(request)
            except ValidationError as found:
                wrong += _placed(found, value.place)
        if self._body is not None:
            try:
                values[self._body.name] = await self._body.of(request)
            except ValidationError as found:
                wrong += _placed(found, ("body",))
        if wrong:
            raise invalid(wrong)
        for name, make in self._made.items():
            values[name] = make(request)
        if not self._has_condition:
            _refuse_conditions(request)
        return _response(await self.endpoint(**values), self._status)


class _Value(Protocol):
    """A value that is made of the head of a request; ``place`` is where an error says that it is."""

    place: tuple[str, ...]

    def of(self, request: Request) -> Any:
        """Raises: ValidationError."""


class _OfPath:
    def __init__(self, name: str, adapter: TypeAdapter[Any]) -> None:
        self.place: tuple[str, ...] = ("path", name)
        self._name, self._adapter = name, adapter

    def of(self, request: Request) -> Any:
        return self._adapter.validate_python(request.path_params[self._name])


class _OfQuery:
    place: tuple[str, ...] = ("query",)

    def __init__(self, adapter: TypeAdapter[Any]) -> None:
        self._adapter = adapter

    def of(self, request: Request) -> Any:
        return self._adapter.validate_python(dict(request.query_params))


class _OfHeader:
    def __init__(self, name: str, adapter: TypeAdapter[Any], default: Any) -> None:
        self.place: tuple[str, ...] = ("header", name)
        self._name, self._adapter, self._default = name, adapter, default

    def of(self, request: Request) -> Any:
        sent = request.headers.get(self._name)
        return self._default if sent is None else self._adapter.validate_python(sent)


class _Body:
    """The body of a request, as a model."""

    def __init__(self, name: str, annotation: Any, default: Any) -> None:
        self.name, self._annotation, self._default = name, annotation, default
        self._adapter = _adapter(annotation)

    async def of(self, request: Request) -> Any:
        """Raises: ValidationError, InvalidRequest."""
        body = await request.body()
        if len(body) > SMALL:
            off_loop: OffLoop = request.app.state.off_loop
            return await off_loop.compute(parsed, body, self._annotation)
        if body:
            return self._adapter.validate_python(parsed_json(body))
        if self._default is inspect.Parameter.empty:
            raise ValidationError.from_exception_data("body", [{"type": "missing", "input": None}])
        return self._default


def _marks(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()


@lru_cache(maxsize=256)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """Most routes have a name in their path: they share what validates it."""
    return TypeAdapter(annotation)


def _placed(wrong: ValidationError, place: tuple[str, ...]) -> list[Any]:
    return [
        {**error, "loc": (*place, *error["loc"])}
        for error in wrong.errors(include_url=False, include_input=False)
    ]


def _refuse_conditions(request: Request) -> None:
    """For a change whose route has none: a condition must not get lost. Raises: InvalidRequest."""
    for header in ("If-Match", "If-None-Match"):
        if header in request.headers and request.method not in _SAFE:
            message = f"is not for {request.method} of this path"
            raise InvalidRequest(
                f"{header}: {message}",
                step="validate",
                fix="send it without the condition; the ports of a batch have a field if_match",
                errors=[FieldError(field=header, message=message)],
            )


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
