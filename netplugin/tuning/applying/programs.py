"""Runs host programs while applying."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from netplugin.host.processes import run

#: (arguments, timeout in seconds) -> standard output. Raises: as ``netplugin.host.processes.run``.
Run: TypeAlias = Callable[[Sequence[str], float], str]


def run_program(args: Sequence[str], seconds: float) -> str:
    return run(args, step="apply", deadline=time.monotonic() + seconds)
