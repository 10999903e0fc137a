"""The data models of asynchronous calls."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel


class TaskState(StrEnum):
    ACCEPTED = "accepted"  # journalled, not carried out yet
    DONE = "done"  # carried out, the result not delivered yet
    DELIVERED = "delivered"
    EXPIRED = "expired"  # the callback URL was not reachable within the configured time


class Task(BaseModel):
    """An asynchronous call and its result."""

    taskuuid: str
    state: TaskState
    attempts: int
    result: dict[str, Any] | None
