"""Programs that a measurement needs, looked for before it begins."""

from __future__ import annotations

import shutil

from netplugin.errors import BackendUnavailable


def needs_program(name: str, package: str, step: str) -> None:
    """``package`` is Debian's. Raises: BackendUnavailable."""
    if shutil.which(name) is None:
        raise BackendUnavailable(
            f"{name} is not installed", step=step, fix=f"apt-get install {package}"
        )
