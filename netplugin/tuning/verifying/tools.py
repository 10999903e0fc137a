"""Checks for the programs that a measurement needs."""

from __future__ import annotations

import shutil

from netplugin.errors import BackendUnavailable


def needs_program(name: str, package: str, step: str) -> None:
    """Check that a program is installed; ``package`` is its Debian package. Raises: BackendUnavailable."""
    if shutil.which(name) is None:
        raise BackendUnavailable(
            f"{name} is not installed", step=step, fix=f"apt-get install {package}"
        )
