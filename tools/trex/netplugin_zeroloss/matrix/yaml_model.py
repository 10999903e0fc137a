"""Reads YAML into a pydantic model; errors name file, line and field."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode

from netplugin.api.field_errors import message
from netplugin.programs import bounded
from netplugin_zeroloss.values import UnusableInput

_M = TypeVar("_M", bound=BaseModel)
#: Maximum number of reported errors.
_SHOWN = 10
#: Bytes of a text, and values of a document with its aliases and merge keys replaced by what they stand for.
LONGEST = 1 << 16
_MOST_VALUES = 50_000


def read_text(path: Path) -> str:
    """Read a UTF-8 text file. Raises: UnusableInput."""
    try:
        # Not blocked by a FIFO, which has no text.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return (file.read(LONGEST + 1) or b"").decode()
    except OSError as error:
        raise UnusableInput(str(path), error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UnusableInput(str(path), "it is not UTF-8 text") from error


def parse(text: str, name: str, model: type[_M]) -> _M:
    """Parse and validate; ``name`` is the file name for messages.

    Raises: UnusableInput with all errors (at most ``_SHOWN``).
    """
    if len(text) > LONGEST:
        raise UnusableInput(name, f"it is longer than {LONGEST} characters")
    try:
        # A parser is for one document. The pure one is the same on every machine.
        root = YAML(typ="safe", pure=True).compose(text)
        if root is not None:
            _check_size(name, root, "", bounded.DEPTH, {})
        data = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f"{name}, line {mark.line + 1}" if mark is not None else name
        if isinstance(error, DuplicateKeyError):
            key = str(error.problem).split('"')[1]
            raise UnusableInput(where, f"{key} is listed twice") from error
        raise UnusableInput(where, f"it is no YAML: {why}") from error
    except RecursionError as error:
        raise UnusableInput(name, "it is nested too deeply") from error
    except ValueError as error:
        raise UnusableInput(name, "it has a date that is none, or a number of thousands of digits") from error
    if not isinstance(data, dict):
        raise UnusableInput(name, "it must be a mapping: lines of the form `field: value`")
    try:
        found = model.model_validate(data)
        bounded.check(data)
        return found
    except bounded.Unreadable as error:
        raise UnusableInput(name, str(error)) from error
    except ValidationError as error:
        raise UnusableInput(name, "\n".join(_mistakes(error, root))) from error


def _check_size(name: str, node: Any, field: str, depth: int, sizes: dict[int, int]) -> int:
    """Count the values of a document, so that one of few lines and many aliases is never built.

    ``sizes``: of the nodes that were counted. Raises: UnusableInput naming line and field.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    where = f"{name}, line {node.start_mark.line + 1}"
    if not depth:
        raise UnusableInput(where, f"{field}: it is nested too deeply")
    children: list[tuple[Any, str]] = []
    if isinstance(node, MappingNode):
        children = [(each, field or str(key.value)) for key, value in node.value for each in (key, value)]
    elif isinstance(node, SequenceNode):
        children = [(each, field) for each in node.value]
    total = 1 + sum(_check_size(name, child, below, depth - 1, sizes) for child, below in children)
    if total > _MOST_VALUES:
        raise UnusableInput(where, f"{field}: it has more than {_MOST_VALUES} values")
    sizes[id(node)] = total
    return total


def _mistakes(error: ValidationError, node: Any) -> Iterator[str]:
    found = error.errors(include_url=False, include_input=False)
    for mistake in found[:_SHOWN]:
        line, path = _find(node, mistake["loc"])
        yield f"line {line}: {path + ': ' if path else ''}{message(mistake)}"
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN} more"


def _find(node: Any, location: Sequence[str | int]) -> tuple[int, str]:
    """Return the line of a field, or of its deepest existing ancestor, and its path as text.

    A part that is in neither mapping nor list is the name of a union variant, which is not in the file.
    """
    line = node.start_mark.line + 1
    words = ""
    for position, part in enumerate(location):
        below = _child(node, part)
        if below is not None:
            key, node = below
            line = key.start_mark.line + 1
        elif position < len(location) - 1:
            continue
        words += f"[{part}]" if isinstance(part, int) else f".{part}" if words else str(part)
    return line, words


def _child(node: Any, part: str | int) -> tuple[Any, Any] | None:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key, value
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None
