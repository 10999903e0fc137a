"""Answers with an entity tag: 304 for what the caller has, and pages of lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import Request, Response
from pydantic import BaseModel

from agents.api.problems import documented
from agents.off_loop import OffLoop
from netplugin.api.conditions import NO_CONDITION, Condition, entity_tag
from netplugin.api.errors import NotFound
from netplugin.api.page_models import Page

T = TypeVar("T", bound=BaseModel)
_JSON = "application/json"
#: The documentation of what a GET with a tag may answer: in general, of a list, and of one object.
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "the caller has this answer already"}}
LISTED = NOT_MODIFIED | documented()
FOUND = NOT_MODIFIED | documented(NotFound)


def tagged(body: BaseModel, intent: str, condition: Condition = NO_CONDITION) -> Response:
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

    def made() -> Response:
        part = page.of(entries(), key)
        more = {}
        if part.next is not None:
            query = [(name, value) for name, value in caller.query_params.multi_items() if name != "after"]
            target = f"{caller.scope['path']}?{urlencode([*query, ('after', part.next)])}"
            more["Link"] = f'<{target}>; rel="next"'
        return _answer(joined(part.entries), condition, None, more)

    return await off_loop.compute(made)


def joined(models: Iterable[BaseModel]) -> bytes:
    """A list as JSON. One by one, so that the event loop gets its turns between them."""
    return b"[" + b",".join(model.model_dump_json().encode() for model in models) + b"]"


def _answer(
    body: bytes, condition: Condition, intent: str | None, more: dict[str, str] | None = None
) -> Response:
    tag = entity_tag(body, intent)
    headers = {"ETag": f'"{tag}"', **(more or {})}
    if condition.is_unchanged(tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_JSON, headers=headers)
