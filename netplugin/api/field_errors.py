"""What is wrong with a field, in words: pydantic's messages have patterns and names of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from netplugin.api import fields
from netplugin.api.errors import FieldError, InvalidRequest

_CHARACTERS: Final = "letters, digits, dots, dashes and underscores, of which the first is a letter or digit"
#: Maximum number of reported errors; a body of a megabyte could have a million.
MOST_ERRORS: Final = 100
#: What a field with this pattern must be.
_WANTED: Final[Mapping[str, str]] = {
    fields.NAME_PATTERN: f"must be 1 to 64 {_CHARACTERS}",
    fields.DEVICE_PATTERN: f"must be 1 to 15 {_CHARACTERS}",
    fields.MAC_PATTERN: "must be a MAC address such as 52:54:00:12:34:56",
    fields.ADDRESS_PATTERN: "must be an IP address or prefix such as 192.0.2.5 or 192.0.2.0/24",
    fields.PEER_PATTERN: "must be an IP address such as 192.0.2.5",
    fields.PCI_PATTERN: "must be a PCI address such as 0000:03:00.1",
}


def message(error: Mapping[str, Any]) -> str:
    """``error``: one of pydantic's ``ValidationError.errors()``, with its context."""
    match error["type"]:
        case "value_error":
            return str(error["msg"]).removeprefix("Value error, ")
        case "extra_forbidden":
            return "there is no such field"
        case "string_pattern_mismatch":
            pattern = error["ctx"]["pattern"]
            return _WANTED.get(pattern, f"must match {pattern}")
    return str(error["msg"])


def invalid(found: Sequence[Any]) -> InvalidRequest:
    """Convert pydantic's errors to an error that names each field as in the request."""
    errors = []
    for finding in found[:MOST_ERRORS]:
        # JSON strings may contain lone surrogates, which cannot be encoded in UTF-8.
        name = ".".join(map(str, finding["loc"])).encode(errors="backslashreplace").decode()
        errors.append(FieldError(field=name or "body", message=message(finding)))
    detail = "; ".join(f"{error.field[:80]}: {error.message}" for error in errors[:5])
    return InvalidRequest(detail, step="validate", errors=errors)
