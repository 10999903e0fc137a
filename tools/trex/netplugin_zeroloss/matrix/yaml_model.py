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
        root = _yaml().compose(text)
        _check_size(name, root)
        data = _yaml().load(text)
    except DuplicateKeyError as error:
        key = str(error.problem).split('"')[1]
        raise UnusableInput(
            f"{name}, line {error.problem_mark.line + 1}", f"{key} is listed twice"
        ) from error
    except YAMLError as error:
        raise _not_yaml(name, error) from error
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


def _check_size(name: str, root: Any) -> None:
    """Count the values of a document, so that one of few lines and many aliases is never built.

    Raises: UnusableInput naming line and field.
    """
    sizes: dict[int, int] = {}

    def size(node: Any, field: str, depth: int) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        where = f"{name}, line {node.start_mark.line + 1}"
        if not depth:
            raise UnusableInput(where, f"{field}: it is nested too deeply")
        total = 1
        if isinstance(node, MappingNode):
            for key, value in node.value:
                total += size(key, field, depth - 1) + size(value, field or str(key.value), depth - 1)
        elif isinstance(node, SequenceNode):
            total += sum(size(each, field, depth - 1) for each in node.value)
        if total > _MOST_VALUES:
            raise UnusableInput(where, f"{field}: it has more than {_MOST_VALUES} values")
        sizes[id(node)] = total
        return total

    if root is not None:
        size(root, "", bounded.DEPTH)


def _yaml() -> YAML:
    """Return a new parser: one is for one document. The pure one is the same on every machine."""
    return YAML(typ="safe", pure=True)


def _not_yaml(name: str, error: YAMLError) -> UnusableInput:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}, line {mark.line + 1}" if mark is not None else name
    why = getattr(error, "problem", None) or str(error)
    return UnusableInput(where, f"it is no YAML: {why}")


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
