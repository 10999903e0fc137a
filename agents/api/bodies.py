"""Validates large request bodies in a thread.

Pydantic validates a body in one call that holds the GIL and so blocks the event loop, and it
creates an error for each of up to a million invalid values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from netplugin.api import field_errors
from netplugin.api.batch_models import Batch, BatchPut
from netplugin.api.errors import FieldError, InvalidRequest

#: Bodies up to this size in bytes are always validated within a few milliseconds, whatever is wrong in them.
#: That of a port is smaller.
SMALL = 4 * 1024
#: Limits above those of any object and any list of the API.
_WIDEST, _LONGEST = 1024, 4096
#: Maximum number of reported errors of a batch; the rest of the batch is not checked.
_MOST_ERRORS = 100


def parsed_json(body: bytes) -> Any:
    """Raises: InvalidRequest."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise _invalid([_error((), "could not be parsed as JSON")]) from None


def parsed(body: bytes, model: Any) -> Any:
    """An instance of the model from a large body.

    Raises: InvalidRequest, also for objects or lists that are larger than any of the API.
    """
    document = parsed_json(body)
    try:
        for place, message in _too_wide(document, ()):
            raise _invalid([_error(place, message)])
    except RecursionError:
        raise _invalid([_error((), "is nested too deeply")]) from None
    if model is Batch:
        document = _with_puts(document)
    try:
        return TypeAdapter(model).validate_python(document)
    except ValidationError as wrong:
        raise _invalid(list(_errors(wrong, ()))[:_MOST_ERRORS]) from None


def _with_puts(document: Any) -> Any:
    """The batch with its ports as models: one at a time, because pydantic holds the GIL in each call."""
    puts = document.get("put") if isinstance(document, dict) else None
    if not isinstance(puts, list):
        return document
    errors: list[FieldError] = []
    models: list[BatchPut] = []
    for index, entry in enumerate(puts):
        try:
            models.append(BatchPut.model_validate(entry))
        except ValidationError as wrong:
            errors += _errors(wrong, ("put", str(index)))
        if len(errors) >= _MOST_ERRORS:
            break
    if errors:
        raise _invalid(errors[:_MOST_ERRORS])
    return {**document, "put": models}


def _errors(wrong: ValidationError, place: tuple[str, ...]) -> Iterator[FieldError]:
    for error in wrong.errors(include_url=False, include_input=False):
        yield _error((*place, *map(str, error["loc"])), field_errors.message(error))


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
