"""What is wrong with a field, in words: pydantic's messages have patterns and types of Python.

Every text about a value that a model refuses comes from here, in the API, the commands and the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from netplugin.api.errors import InvalidRequest
from netplugin.api.fields import PATTERN_WORDS
from netplugin.api.problem import FieldError

_M = TypeVar("_M", bound=BaseModel)
#: Maximum number of reported errors; a body of a megabyte could have a million.
MOST_ERRORS: Final = 100
_OBJECT, _LIST, _STRING = "must be an object with named fields", "must be a list", "must be a string"
_WHOLE, _NUMBER, _FLAG = "must be a whole number", "must be a number", "must be true or false"
_TIME = "must be a date and a time such as 2026-01-31T12:00:00Z"
#: What a field must be by the type of the error; ``{...}`` is from the error's context.
_TYPES: Final[Mapping[str, str]] = {
    "missing": "is required",
    "extra_forbidden": "there is no such field",
    "unexpected_keyword_argument": "there is no such field",
    "none_required": "must be null",
    "json_invalid": "must be valid JSON",
    "json_type": "must be valid JSON",
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "dataclass_type": _OBJECT,
    "dict_type": _OBJECT,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "frozen_set_type": _LIST,
    "string_type": _STRING,
    "string_unicode": "must be text in UTF-8",
    "invalid_key": "must have strings as names",
    "bool_type": _FLAG,
    "bool_parsing": _FLAG,
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": "must be a whole number with fewer digits",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "enum": "must be {expected}",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "must have as {discriminator} one of {expected_tags}",
    "union_tag_not_found": "must have {discriminator}",
    "datetime_type": _TIME,
    "datetime_parsing": _TIME,
    "datetime_object_invalid": _TIME,
    "datetime_from_date_parsing": _TIME,
    "timezone_aware": "must have a time zone",
    "ip_v4_address": "must be an IPv4 address such as 192.0.2.5",
    "path_type": "must be a path",
    # The texts of our own validators, and of ``agents.api.bodies``.
    "value_error": "{error}",
    "assertion_error": "{error}",
    "refused": "{msg}",
}


def message(error: Mapping[str, Any]) -> str:
    """``error``: one of pydantic's ``ValidationError.errors()``, with its context."""
    context = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch":
        return PATTERN_WORDS.get(context["pattern"], f"must match {context['pattern']}")
    words = _TYPES.get(error["type"], "is not valid").format(msg=error["msg"], **context)
    return words.replace(" 1 entries", " 1 entry").replace(" 1 characters", " 1 character")


def place(error: Mapping[str, Any]) -> str:
    """The path of the field, with dots between the names; empty for the whole."""
    # JSON strings may contain lone surrogates, which cannot be encoded in UTF-8.
    return ".".join(map(str, error["loc"])).encode(errors="backslashreplace").decode()


def invalid(found: Sequence[Any]) -> InvalidRequest:
    """Convert pydantic's errors to an error that names each field as in the request."""
    errors = [
        FieldError(field=place(finding) or "body", message=message(finding))
        for finding in found[:MOST_ERRORS]
    ]
    detail = "; ".join(f"{error.field[:80]}: {error.message}" for error in errors[:5])
    return InvalidRequest(detail, step="validate", errors=errors)


def valid(kind: type[_M], values: Mapping[str, Any]) -> _M:
    """A model of these values. Raises: InvalidRequest with each field named, as the agent returns it."""
    try:
        return kind.model_validate(values)
    except ValidationError as wrong:
        raise invalid(wrong.errors(include_url=False, include_input=False)) from None
