"""Query a running OVS for its settings, ports and PMD threads; read-only."""

from __future__ import annotations

import os
import time
from pathlib import Path

from netplugin.errors import NetpluginError
from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovsdb import Ovsdb
from netplugin.models import PmdState
from netplugin.pmd.read import read
from netplugin.tuning.live import OvsLive, OvsPortLive
from netplugin.tuning.root import Fact, Unknown, known

#: Directory of OVS's sockets on Debian and Red Hat.
RUNDIR = Path("/run/openvswitch")
_WAIT_S = 5.0
#: Prefixes of the interface types that PMD threads poll.
_POLLED = ("dpdk",)
_NO_THREADS = PmdState(cpus="", cores=())


def read_ovs(rundir: Path = RUNDIR) -> Fact[OvsLive]:
    """Query OVS; an ``Unknown`` if it does not run or does not answer in time."""
    socket = rundir / "db.sock"
    try:
        socket.stat()
    except FileNotFoundError:
        return Unknown(str(socket), "there is no such file", missing=True)
    except OSError as refused:
        return Unknown(str(socket), str(refused.strerror).lower())
    if not os.access(socket, os.W_OK):  # connect(2) needs write permission
        return Unknown(str(socket), "permission denied")
    database = Ovsdb(f"unix:{socket}").start()
    try:
        database.require_online(_WAIT_S)
        root = database.mirror.root
        pmd = _pmd(database.mirror, rundir) if root.dpdk_initialized else _NO_THREADS
        threads = known(pmd, _NO_THREADS)
        return OvsLive(
            version=root.ovs_version,
            dpdk_version=root.dpdk_version,
            dpdk_initialized=root.dpdk_initialized,
            other_config=dict(root.other_config),
            ports=_ports(database.mirror),
            pmds=threads.cores,
            unpolled=threads.unpolled,
            silent=pmd if isinstance(pmd, Unknown) else None,
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


def _pmd(mirror: Mirror, rundir: Path) -> Fact[PmdState]:
    try:
        return read(mirror, rundir, time.monotonic() + _WAIT_S).state
    except NetpluginError as refused:
        return Unknown("ovs-vswitchd", refused.detail)
