"""What can be known of an agent that does not answer: its process, its socket, its unit of systemd."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from netplugin.api.client_settings import DEFAULT_URL, UNIX
from netplugin.api.connection import Connection
from netplugin.api.errors import NetpluginError
from netplugin.host.processes import run

_UNIT = "netplugin-agent.service"
#: By proc_pid_stat(5).
_STATES = {
    "T": "is stopped by a signal (kill -CONT lets it go on)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a driver",
    "Z": "has ended",
}
_SYSTEMD_S = 2.0


def known_of(asked: Connection, failed: BaseException) -> str:
    """Clauses to be added to the error of a call that had no answer; none for an agent of another host."""
    if not asked.url.startswith(UNIX):
        return ""
    found = []
    with suppress(OSError, ValueError):
        if asked.peer is not None:
            found.append(_process(asked.peer))
        elif isinstance(failed, ConnectionRefusedError):
            made = Path(asked.url.removeprefix(UNIX)).stat().st_mtime
            found.append(f"the process that made this socket at {_clock(made)} has ended")
    if asked.url == DEFAULT_URL:
        with suppress(NetpluginError):
            found.append(_unit())
    return "".join(f"; {each}" for each in found if each)


def _process(pid: int) -> str:
    """Raises: OSError."""
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(rest[18]) / os.sysconf("SC_CLK_TCK")
    return f"process {pid}, started at {_clock(time.time() - age)}, {_STATES.get(state, 'runs')}"


def _unit() -> str:
    """Raises: NetpluginError, as where systemd does not run."""
    words = ["systemctl", "show", "--property=ActiveState,StateChangeTimestamp", _UNIT]
    shown = run(words, step="systemctl", deadline=time.monotonic() + _SYSTEMD_S)
    values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    since = values.get("StateChangeTimestamp")
    return f"systemd says that {_UNIT} is {values.get('ActiveState')} since {since}" if since else ""


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
