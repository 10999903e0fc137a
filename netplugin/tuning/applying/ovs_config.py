"""Set ``other_config`` of a running OVS, wait until vswitchd has applied it, and read it back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from netplugin.api.errors import BackendUnavailable, HostError
from netplugin.host.cpus import format_list, from_mask, to_mask
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovsdb import Ovsdb
from netplugin.host.ovsdb_replica import SetOtherConfig
from netplugin.host.vswitchd import appctl
from netplugin.pmd.read import parse_threads
from netplugin.tuning.applying.accessor import Raw, SettingAccessor
from netplugin.tuning.steps import OtherConfig

_MASK = "pmd-cpu-mask"
_WAIT_S = 10.0
#: vswitchd's error while it has no bridge, and therefore no PMD threads.
_NO_DATAPATH = "please specify an existing datapath"


class OvsOtherConfig(Protocol):
    """A running OVS. All methods raise: BackendUnavailable, HostError, OperationTimeout."""

    def other_config(self) -> Mapping[str, str]: ...

    def set(self, key: str, value: str | None) -> None:
        """Set a key, or remove it if ``value`` is None. Returns when vswitchd has applied it."""
        ...

    def pmd_cpus(self) -> frozenset[int]:
        """CPUs of the running PMD threads; empty while no port needs one."""
        ...


class RunningOvs:
    """The OVS that listens at these sockets; connects on first use."""

    def __init__(self, sockets: OvsSockets) -> None:
        self._sockets = sockets
        self._database: Ovsdb | None = None

    def other_config(self) -> Mapping[str, str]:
        return dict(self._connected().view.root.other_config)

    def set(self, key: str, value: str | None) -> None:
        # Fail at once if vswitchd does not run, instead of waiting for it until the deadline.
        appctl(self._sockets, "version", deadline=time.monotonic() + _WAIT_S)
        self._connected().write([SetOtherConfig(key, value)], time.monotonic() + _WAIT_S)

    def pmd_cpus(self) -> frozenset[int]:
        deadline = time.monotonic() + _WAIT_S
        try:
            shown = appctl(self._sockets, "dpif-netdev/pmd-rxq-show", deadline=deadline)
        except HostError as refused:
            if _NO_DATAPATH not in refused.detail:
                raise
            return frozenset()
        return frozenset(thread.cpu for thread in parse_threads(shown).threads)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _connected(self) -> Ovsdb:
        if self._database is None:
            socket = self._sockets.database
            # Fail at once instead of retrying until the deadline.
            if socket is not None and not socket.exists():
                detail = f"no Open vSwitch database at {socket}"
                fix = "start ovsdb-server, or say with --ovs-rundir where its sockets are"
                raise BackendUnavailable(detail, step="ovsdb-connect", fix=fix)
            self._database = Ovsdb(self._sockets.connection).start()
        self._database.require_online(_WAIT_S)
        return self._database


class OvsConfig(SettingAccessor[OtherConfig]):
    """Raw value: the text of the key."""

    def __init__(self, ovs: OvsOtherConfig) -> None:
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

    def write(self, target: OtherConfig, desired: str | None) -> None:
        super().write(target, desired)
        if target.key == _MASK:
            running, asked = self._ovs.pmd_cpus(), frozenset(from_mask(desired or ""))
            if running and running != asked:
                cpus = f"{format_list(running)}, not on {format_list(asked)}"
                raise HostError(f"vswitchd runs PMD threads on {cpus}", step="read-back")

    def restore(self, target: OtherConfig, raw: Raw) -> None:
        self._ovs.set(target.key, raw)
