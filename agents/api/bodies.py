"""Checks large request bodies in a thread, before the application validates them.

Pydantic validates a body in one call that holds the GIL and so blocks the event loop, and it
creates an error for each of up to a million invalid values.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from pydantic import ValidationError

from netplugin.api.batch_models import BatchPut
from netplugin.api.errors import FieldError, InvalidRequest

#: Bodies up to this size in bytes are always validated within a few milliseconds.
SMALL = 64 * 1024
#: Limits above those of any object and any list of the API.
_WIDEST, _LONGEST = 1024, 4096
#: Maximum number of reported errors of a batch; the rest of the batch is not checked.
_MOST_ERRORS = 100


async def refuse_unfit(request: Request) -> None:
    """Dependency of every route. Raises: InvalidRequest."""
    body = await request.body()
    if len(body) > SMALL:
        await asyncio.to_thread(check, body, is_batch=request.url.path == "/v1/ports:batch")


def check(body: bytes, *, is_batch: bool) -> None:
    """Raises: InvalidRequest for objects or lists that are too large, and for invalid ports of a batch."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return  # the application reports it
    try:
        for place, message in _too_wide(document, ()):
            raise _invalid([_error(place, message)])
    except RecursionError:
        raise _invalid([_error((), "is nested too deeply")]) from None
    puts = document.get("put") if is_batch and isinstance(document, dict) else None
    if not isinstance(puts, list):
        return
    errors: list[FieldError] = []
    for index, entry in enumerate(puts):
        try:
            BatchPut.model_validate(entry)
        except ValidationError as wrong:
            found = wrong.errors(include_url=False, include_context=False, include_input=False)
            errors += [_error(("put", str(index), *map(str, error["loc"])), error["msg"]) for error in found]
        if len(errors) >= _MOST_ERRORS:
            break
    if errors:
        raise _invalid(errors[:_MOST_ERRORS])


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


def _error(place: tuple[str, ...], message: str) -> FieldError:
    """JSON strings may contain lone surrogates, which cannot be encoded in UTF-8."""
    field = ".".join(place).encode(errors="backslashreplace").decode()
    return FieldError(field=field or "body", message=message)


def _invalid(errors: list[FieldError]) -> InvalidRequest:
    detail = "; ".join(f"{error.field[:80]}: {error.message}" for error in errors[:5])
    return InvalidRequest(detail, step="validate", errors=errors)
