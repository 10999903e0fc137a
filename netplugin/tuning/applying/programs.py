"""Programs of the host, as those that apply run them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from netplugin.host.processes import run

#: An argument list and seconds; what the program printed. Raises: as ``netplugin.host.processes.run``.
Run: TypeAlias = Callable[[Sequence[str], float], str]


def run_program(args: Sequence[str], seconds: float) -> str:
    return run(args, step="apply", deadline=time.monotonic() + seconds)
