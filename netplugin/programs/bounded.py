"""Input that other programs wrote: JSON of bounded depth and numbers, validated, and bounded output."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from netplugin.api import field_errors

T = TypeVar("T")
#: Deepest nesting; no format here has half of it. Python's own limit depends on the caller's stack.
DEPTH = 40
#: Counters are of 64 bits. Sums and products of some floats are finite.
_LARGEST, _LARGEST_FLOAT = 2**64, 1e100
_SHOWN = 100


class Unreadable(ValueError):
    """The text is not what the format has; the message names the field."""


class NoJson(Unreadable):
    """The text is no JSON, as after an incomplete write."""


def check(value: Any) -> None:
    """Check depth and numbers of a parsed value. Raises: Unreadable naming the field."""
    if found := _mistake(value, DEPTH):
        where, why = found
        raise Unreadable(f"{where}: {why}" if where else why)


def _mistake(value: Any, depth: int) -> tuple[str, str] | None:
    """Return the field, as a path, and what is wrong with it; None if nothing is."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, int):
        return None if abs(value) < _LARGEST else ("", "a number of more than 64 bits")
    elif isinstance(value, float):
        return None if abs(value) < _LARGEST_FLOAT else ("", f"{value} is out of range")
    for name, each in items:
        if not depth:
            return "", "it is nested too deeply"
        if found := _mistake(each, depth - 1):
            where, why = found
            return f"{name!s:.40}.{where}".rstrip(".")[:_SHOWN], why
    return None


def parse(text: str | bytes) -> Any:
    """Parse JSON; what is no character (a lone surrogate) is read as "?". Raises: Unreadable."""
    try:
        text = text.encode(errors="replace") if isinstance(text, str) else text
        value = json.loads(text)
        if b"\\ud" in text.lower():
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise NoJson("it is nested too deeply") from error
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise NoJson(f"it is no JSON (line {error.lineno}, column {error.colno})") from error
        raise NoJson("it is no JSON") from error
    check(value)
    return value


def validated(value: Any, model: TypeAdapter[T]) -> T:
    """Validate a parsed value. Raises: Unreadable."""
    try:
        return model.validate_python(value)
    except ValidationError as error:
        raise Unreadable(first_mistake(error)) from error


def first_mistake(error: ValidationError) -> str:
    """Return the first error with its field, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = field_errors.place(first)[:_SHOWN]
    return f"{where}: {field_errors.message(first)}" if where else field_errors.message(first)
