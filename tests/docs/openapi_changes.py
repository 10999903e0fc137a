"""What differs between two OpenAPI documents, one line for each difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def changes(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yield ``added``, ``removed`` or ``changed``, each with the path of what differs and its value.

    The order of parameters and of plain values in a list is no difference.
    """
    if isinstance(before, list) and isinstance(after, list):
        before, after = _by_name(before), _by_name(after)
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after:
            yield f"changed {where}: {_shown(before)} -> {_shown(after)}"
        return
    for key in sorted({*before, *after}):
        path = f"{where} > {key}" if where else key
        if key not in before:
            yield f"added   {path}: {_shown(after[key])}"
        elif key not in after:
            yield f"removed {path}: {_shown(before[key])}"
        else:
            yield from changes(before[key], after[key], path)


def _by_name(values: list[Any]) -> dict[str, Any]:
    """The values of a list by what names each: parameters, plain values, and others by their position."""
    named = {}
    for number, value in enumerate(values):
        if not isinstance(value, Mapping | list):
            named[str(value)] = value
        elif isinstance(value, Mapping) and "name" in value:
            named[f"{value['name']} in {value.get('in')}"] = value
        else:
            named[f"[{number}]"] = value
    return named


def _shown(value: Any, length: int = 120) -> str:
    """A value on one line, cut if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= length else f"{text[:length]}..."
