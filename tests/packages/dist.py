"""What `make dist` makes, built once for a run of the tests; or all of it in the directory NETPLUGIN_DIST."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.docs.blocks import ROOT
from tests.lab.kernel import locked
from tests.lab.processes import run


@cache
def built(part: str) -> Path:
    """The directory with one part: deb12, deb13, rpm or archive."""
    if given := os.environ.get("NETPLUGIN_DIST"):
        return Path(given)
    directory = Path(tempfile.mkdtemp(prefix="netplugin-dist-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with locked("dist"):
        run([sys.executable, "-m", "tools.dist", "--only", part, "--out", directory / part], 1800, cwd=ROOT)
    return directory / part
