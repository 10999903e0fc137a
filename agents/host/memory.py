"""Gives freed memory back to the kernel: a look at all ports takes some for a moment, and malloc keeps it."""

from __future__ import annotations

import asyncio
import ctypes

#: Seconds between two returns. One takes a few milliseconds, and calls need not wait for it.
EVERY_S = 30.0


async def give_back() -> None:
    """Return the free pages within the heap; malloc by itself returns those at its end (malloc_trim(3)).

    It does nothing with a C library other than glibc. What Python's own allocator keeps stays too: the
    systemd unit sets ``PYTHONMALLOC=malloc``, so that it has none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        await asyncio.to_thread(trim, 0)
