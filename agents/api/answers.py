"""Answers with an entity tag: 304 for what the caller has, pages of lists, and the conditions of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from agents.api.routing import FromRequest
from agents.off_loop import OffLoop
from netplugin.api.conditions import NO_CONDITION, Condition, entity_tag
from netplugin.api.page_models import Page

T = TypeVar("T", bound=BaseModel)
_JSON = "application/json"
#: For the document: the tags of a header, which ``Condition.parse`` reads.
_Tag = Annotated[str, StringConstraints(pattern=r'^(\*|(W/)?"[!#-~]*")$')]
_Values = list[_Tag] | None


def _of(request: Request) -> Condition:
    return Condition.parse((), request.headers.getlist("if-none-match"))


def _of_both(request: Request) -> Condition:
    headers = request.headers
    if "if-match" not in headers and "if-none-match" not in headers:
        return NO_CONDITION
    return Condition.parse(headers.getlist("if-match"), headers.getlist("if-none-match"))


#: The condition of a GET, and that of a change. Raises: InvalidRequest.
IfNoneMatch = Annotated[Condition, FromRequest(_of, {"if_none_match": _Values})]
IfMatch = Annotated[Condition, FromRequest(_of_both, {"if_match": _Values, "if_none_match": _Values})]

#: The documentation of what every GET with a tag may answer.
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "the caller has this answer already"}}


def tagged(body: BaseModel, condition: Condition, intent: str | None = None) -> Response:
    """One object. ``intent``: the part of the tag that stands for what was requested."""
    return _answer(body.model_dump_json().encode(), condition, intent)


async def listed(
    caller: Request,
    page: Page,
    condition: Condition,
    entries: Callable[[], Iterable[T]],
    key: Callable[[T], str],
) -> Response:
    """A page of a list. ``entries`` is called in a thread, because a list may have thousands."""
    off_loop: OffLoop = caller.app.state.off_loop
    return await off_loop.compute(_listed, caller, page, condition, entries, key)


def _listed(
    caller: Request,
    page: Page,
    condition: Condition,
    entries: Callable[[], Iterable[T]],
    key: Callable[[T], str],
) -> Response:
    part = page.of(entries(), key)
    # One by one, so that the event loop gets its turns between them.
    body = b"[" + b",".join(entry.model_dump_json().encode() for entry in part.entries) + b"]"
    more = {}
    if part.next is not None:
        query = [(name, value) for name, value in caller.query_params.multi_items() if name != "after"]
        target = f"{caller.scope['path']}?{urlencode([*query, ('after', part.next)])}"
        more["Link"] = f'<{target}>; rel="next"'
    return _answer(body, condition, None, more)


def _answer(
    body: bytes, condition: Condition, intent: str | None, more: dict[str, str] | None = None
) -> Response:
    tag = entity_tag(body, intent)
    headers = {"ETag": f'"{tag}"', **(more or {})}
    if condition.is_unchanged(tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_JSON, headers=headers)
