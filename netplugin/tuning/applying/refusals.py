"""Convert an OSError of a write into a HostError with the kernel's error text and a fix."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from netplugin.errors import HostError

_NOT_ROOT = "run it as root, on the host itself and not in a container"
_FIXES = {
    errno.EACCES: _NOT_ROOT,
    errno.EPERM: _NOT_ROOT,
    errno.EROFS: "run it on the host itself: what is read-only here belongs to somebody else",
}


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Convert OSError to HostError with the step ``write``."""
    try:
        yield
    except OSError as refused:
        raise refusal(what, refused) from refused


def refusal(what: str, refused: OSError) -> HostError:
    words = refused.strerror or str(refused)
    return HostError(
        f"{what}: {words[:1].lower()}{words[1:]}", step="write", fix=_FIXES.get(refused.errno or 0)
    )
