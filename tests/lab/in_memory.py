"""Where a test has files that need not outlive a crash of the machine: on tmpfs, which is faster."""

from __future__ import annotations

import tempfile
from pathlib import Path

_SHARED = Path("/dev/shm")
#: None: where temporary files usually are.
PLACE = _SHARED if _SHARED.is_dir() else None
#: By these their names begin: they come and go while others look at what is left on the machine.
PREFIX = "netplugin-test-"


def directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=PREFIX, dir=PLACE)
