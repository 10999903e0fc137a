"""The names of the workloads: those of ``--only``, and the first part of a figure's identity."""

from __future__ import annotations

RESOURCES = "resources"
ONE_PORT = "one-port"
#: One port with vswitchd's own settings of its log, which then writes every queue at each change.
DEFAULT_LOG = "default-log"
TOGETHER = "together"
OPEN_LOOP = "open-loop"
FROM_NOTHING = "from-nothing"
START = "start"
RECOVERY = "recovery"
LINUXBRIDGE = "linuxbridge"

ALL = (RESOURCES, ONE_PORT, DEFAULT_LOG, TOGETHER, OPEN_LOOP, FROM_NOTHING, START, RECOVERY, LINUXBRIDGE)
#: The kinds of open loop: nothing is unplugged, or as much as is plugged.
PLUGS, TURNOVER = KINDS = "plugs", "turnover"
