"""Reads YAML into a pydantic model; errors name file, line and field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode

from netplugin_zeroloss.values import UnusableInput

_M = TypeVar("_M", bound=BaseModel)
#: Maximum number of reported errors.
_SHOWN = 10


def read_text(path: Path) -> str:
    """Read a UTF-8 text file. Raises: UnusableInput."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableInput(str(path), error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UnusableInput(str(path), "it is not UTF-8 text") from error


def parse(text: str, name: str, model: type[_M]) -> _M:
    """Parse and validate; ``name`` is the file name for messages.

    Raises: UnusableInput with all errors (at most ``_SHOWN``).
    """
    try:
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
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise UnusableInput(name, f"a value cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UnusableInput(name, "it must be a mapping: lines of the form `field: value`")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UnusableInput(name, "\n".join(_mistakes(error, _yaml().compose(text)))) from error


def _yaml() -> YAML:
    """Return a new parser: one is for one document. The pure one is the same on every machine."""
    return YAML(typ="safe", pure=True)


def _not_yaml(name: str, error: YAMLError) -> UnusableInput:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}, line {mark.line + 1}" if mark is not None else name
    why = getattr(error, "problem", None) or str(error)
    return UnusableInput(where, f"it is no YAML: {why}")


def _mistakes(error: ValidationError, node: Any) -> Iterator[str]:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    for mistake in found[:_SHOWN]:
        line, path = _find(node, mistake["loc"])
        message = mistake["msg"].removeprefix("Value error, ")
        if mistake["type"] == "extra_forbidden":
            message = "there is no such field"
        yield f"line {line}: {path + ': ' if path else ''}{message}"
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
