"""Repeats a look at something that changes by itself until it is ready, or its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def polled(look: Callable[[], T], ready: Callable[[T], bool], seconds: float, interval_s: float) -> T:
    """Look every ``interval_s`` seconds until ``ready``, for ``seconds`` at most; returns the last value.

    It looks at least once. The caller decides what a last value that is not ready means.
    """
    deadline = time.monotonic() + seconds
    while not ready(found := look()) and time.monotonic() <= deadline:
        time.sleep(interval_s)
    return found
