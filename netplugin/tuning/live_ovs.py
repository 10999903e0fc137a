"""Asks a running OVS for its settings, ports and PMD threads, without writing to it."""

from __future__ import annotations

import time
from pathlib import Path

from netplugin.errors import NetpluginError
from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovsdb import Ovsdb
from netplugin.host.vswitchd import appctl, parse_pmd
from netplugin.models import PmdCore
from netplugin.tuning.live import OvsLive, OvsPortLive
from netplugin.tuning.root import Fact, Unknown

#: Where Debian and Red Hat have OVS's sockets.
RUNDIR = Path("/run/openvswitch")
_WAIT_S = 5.0
#: Of the interfaces of OVS, those that PMD threads poll.
_POLLED = ("dpdk",)


def read_ovs(rundir: Path = RUNDIR) -> Fact[OvsLive]:
    """An ``Unknown`` where no OVS runs, or it does not answer in time."""
    socket = rundir / "db.sock"
    if not socket.exists():
        return Unknown(str(socket), "there is no such file", missing=True)
    database = Ovsdb(f"unix:{socket}")
    try:
        database.require_online(_WAIT_S)
        root = database.mirror.root
        return OvsLive(
            version=root.ovs_version,
            dpdk_version=root.dpdk_version,
            dpdk_initialized=root.dpdk_initialized,
            other_config=dict(root.other_config),
            ports=_ports(database.mirror),
            pmds=_pmds(rundir) if root.dpdk_initialized else (),
        )
    except NetpluginError as refused:
        return Unknown(str(socket), refused.detail)
    finally:
        database.close()


def _ports(mirror: Mirror) -> tuple[OvsPortLive, ...]:
    return tuple(
        OvsPortLive(i.name, port.name, i.type, i.mtu, port.bond_mode)
        for port in mirror.ports_named(("",))
        for i in port.interfaces
        if i.type.startswith(_POLLED)
    )


def _pmds(rundir: Path) -> tuple[PmdCore, ...]:
    """None as long as there is no bridge: vswitchd refuses the question then."""
    deadline = time.monotonic() + _WAIT_S
    try:
        return parse_pmd(
            appctl(rundir, "dpif-netdev/pmd-rxq-show", deadline=deadline),
            appctl(rundir, "dpif-netdev/pmd-stats-show", deadline=deadline),
        )
    except NetpluginError:
        return ()
