"""Errors of planning: the intent does not fit the machine, or a required fact is missing."""

from __future__ import annotations

from typing import TypeVar

from netplugin.api.errors import FieldError, HostError, InvalidRequest
from netplugin.tuning.root import Fact, Unknown

T = TypeVar("T")


def impossible(field: str, message: str, fix: str, step: str = "plan") -> InvalidRequest:
    """The error for an intent field that requests more than there is."""
    return InvalidRequest(
        f"{field}: {message}",
        step=step,
        fix=fix,
        errors=[FieldError(field=field, message=message)],
    )


def needed(fact: Fact[T]) -> T:
    """Return a required fact. Raises: HostError naming the file that cannot be read."""
    if isinstance(fact, Unknown):
        raise HostError(
            f"no plan without {fact.path}: {fact.reason}",
            step="plan",
            fix="run it as root, on the host itself and not in a container",
        )
    return fact
