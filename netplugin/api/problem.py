"""An error of the API as a document. Whoever only raises errors imports no pydantic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FieldError(BaseModel):
    """An error in one field of a request; ``field`` is its path, with dots between the names."""

    model_config = ConfigDict(frozen=True)

    field: str
    message: str


class Problem(BaseModel):
    """An error as ``application/problem+json`` (RFC 9457), in responses and in stored ports."""

    model_config = ConfigDict(frozen=True)

    type: str
    title: str
    status: int
    detail: str
    code: str
    step: str
    retryable: bool
    port_id: str | None = None
    fix: str | None = None
    errors: tuple[FieldError, ...] = ()
