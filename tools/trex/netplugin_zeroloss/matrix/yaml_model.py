"""Reads YAML into a pydantic model; errors name file, line and field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

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
    node = _compose(text, name)
    loader = yaml.SafeLoader(text)
    try:
        data = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        raise _not_yaml(name, error) from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise UnusableInput(name, "it must be a mapping: lines of the form `field: value`")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UnusableInput(name, "\n".join(_mistakes(error, node))) from error


def _compose(text: str, name: str) -> Any:
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _not_yaml(name, error) from error
    for key in _repeated(node):
        line = key.start_mark.line + 1
        raise UnusableInput(f"{name}, line {line}", f"{key.value} is listed twice")
    return node


def _not_yaml(name: str, error: yaml.YAMLError) -> UnusableInput:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}, line {mark.line + 1}" if mark is not None else name
    why = getattr(error, "problem", None) or str(error)
    return UnusableInput(where, f"it is no YAML: {why}")


def _repeated(top: Any) -> Iterator[yaml.ScalarNode]:
    """Yield duplicate keys: invalid in YAML, but PyYAML takes the last one."""
    seen: set[int] = set()
    waiting = [top]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias may be recursive
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            names = [key.value for key in keys]
            yield from (key for n, key in enumerate(keys) if key.value in names[:n])
            waiting += [value for _, value in node.value]


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
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None
