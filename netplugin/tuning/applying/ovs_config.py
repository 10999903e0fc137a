"""``other_config`` of a running OVS: written, carried out by vswitchd, and read back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from netplugin.errors import BackendUnavailable, HostError
from netplugin.host.cpus import format_list, from_mask, to_mask
from netplugin.host.ovs_commands import SetOtherConfig
from netplugin.host.ovsdb import Ovsdb
from netplugin.host.vswitchd import appctl
from netplugin.pmd.threads import parse_threads
from netplugin.tuning.applying.place import Raw
from netplugin.tuning.steps import OtherConfig

_MASK = "pmd-cpu-mask"
_WAIT_S = 10.0
#: What vswitchd says as long as it has no bridge, and so no threads either.
_NO_DATAPATH = "please specify an existing datapath"


class Ovs(Protocol):
    """All of these raise: BackendUnavailable, HostError, OperationTimeout."""

    def other_config(self) -> Mapping[str, str]: ...

    def set(self, key: str, value: str | None) -> None:
        """None takes it away. Ends when vswitchd has carried it out."""
        ...

    def pmd_cpus(self) -> frozenset[int]:
        """Where PMD threads run; empty as long as no port needs them."""
        ...


class RunningOvs:
    """The OVS with its sockets in ``rundir``; connects when it is first asked."""

    def __init__(self, rundir: Path) -> None:
        self._rundir = rundir
        self._database: Ovsdb | None = None

    def other_config(self) -> Mapping[str, str]:
        return dict(self._connected().mirror.root.other_config)

    def set(self, key: str, value: str | None) -> None:
        # A vswitchd that is not there would be waited for until the deadline.
        appctl(self._rundir, "version", deadline=time.monotonic() + _WAIT_S)
        database, deadline = self._connected(), time.monotonic() + _WAIT_S
        done = database.commit([partial(SetOtherConfig, key=key, value=value)], deadline)
        database.wait_configured(done, deadline)

    def pmd_cpus(self) -> frozenset[int]:
        deadline = time.monotonic() + _WAIT_S
        try:
            shown = appctl(self._rundir, "dpif-netdev/pmd-rxq-show", deadline=deadline)
        except HostError as refused:
            if _NO_DATAPATH not in refused.detail:
                raise
            return frozenset()
        return frozenset(thread.cpu for thread in parse_threads(shown).threads)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _connected(self) -> Ovsdb:
        socket = self._rundir / "db.sock"
        if self._database is None:
            if not socket.exists():  # it would be tried again and again until the deadline
                raise BackendUnavailable(
                    f"no Open vSwitch database at {socket}", step="ovsdb-connect",
                    fix="start ovsdb-server, or say with --ovs-rundir where its sockets are",
                )  # fmt: skip
            self._database = Ovsdb(f"unix:{socket}").start()
        self._database.require_online(_WAIT_S)
        return self._database


class OvsConfig:
    """Raw is the text of the key."""

    def __init__(self, ovs: Ovs) -> None:
        self._ovs = ovs

    def read(self, target: OtherConfig) -> Raw:
        return self._ovs.other_config().get(target.key)

    def value(self, target: OtherConfig, raw: Raw) -> str | None:
        if raw is None or not target.key.endswith("-mask"):
            return raw
        try:
            return to_mask(from_mask(raw))
        except ValueError:
            return raw

    def write(self, target: OtherConfig, wanted: str | None) -> None:
        self._ovs.set(target.key, wanted)
        if target.key == _MASK:
            running, asked = self._ovs.pmd_cpus(), frozenset(from_mask(wanted or ""))
            if running and running != asked:
                raise HostError(
                    f"vswitchd runs PMD threads on {format_list(running)}, not on "
                    f"{format_list(asked)}", step="read-back",
                )  # fmt: skip

    def restore(self, target: OtherConfig, raw: Raw) -> None:
        self._ovs.set(target.key, raw)
