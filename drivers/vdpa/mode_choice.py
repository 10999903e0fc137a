"""Which mode new ports get: that of ``[vdpa] mode``, or with ``auto`` the best that this host has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drivers.ovs.switch import Switch
from drivers.vdpa.findings import no_pci
from drivers.vdpa.model import NATIVE_TYPE, Mode, lacks_native, lacks_vduse
from drivers.vdpa.vduse_host import VduseHost
from drivers.vf.kernel import VfKernel
from netplugin.api.errors import InvalidRequest, NetpluginError, Unsupported
from netplugin.api.models import Features
from netplugin.host.ovs_rows import OvsRoot
from netplugin.host.usability import Usability


class ModeChoice:
    """The option on this host. Any thread may ask; an answer reads few files and waits for nothing."""

    def __init__(self, option: str, switch: Switch, vfs: VfKernel, vduse: VduseHost) -> None:
        self._option = option
        self._switch = switch
        self._vfs = vfs
        self._vduse = vduse

    @property
    def _is_auto(self) -> bool:
        return self._option == "auto"

    @property
    def preferred(self) -> Mode:
        """The mode of new ports, but for what ``possible`` says."""
        if not self._is_auto:
            return Mode(self._option)
        if NATIVE_TYPE in self._switch.root.iface_types:
            return Mode.NATIVE
        return Mode.RELAY if self._no_vduse() else Mode.VDUSE

    def possible(self) -> tuple[Mode, ...]:
        """The modes that a new port may get, the preferred one first.

        With ``auto`` a port that asks for what mode ``vduse`` has not, or that a VM brings along from another
        host, is relayed, where the host has VFs.
        """
        mode = self.preferred
        has_both = self._is_auto and mode is Mode.VDUSE and self._relay().usable
        return (mode, Mode.RELAY) if has_both else (mode,)

    def usability(self) -> Usability:
        """Whether new ports can be made, on an OVS that is usable."""
        root, mode = self._switch.root, self.preferred
        if mode is Mode.VDUSE:
            return lacks_vduse(root) or self._vduse.usability()
        if mode is Mode.NATIVE:
            return lacks_native(root) or self._vfs.usability(for_dpdk=True)
        relay, no_vduse = self._relay(), self._no_vduse()
        return _neither(relay, no_vduse) if self._is_auto and no_vduse and not relay.usable else relay

    def offered(self, features: Features) -> Features:
        """Of the features of all modes those that a new port may have."""
        modes = self.possible()
        update: dict[str, Any] = {"live_migration": Mode.RELAY in modes}
        if Mode.VDUSE not in modes:
            update |= {"networks": ("flat", "vlan"), "vdpa_devices": False}
        elif len(modes) == 1:
            update |= {"max_queues": self._vduse.pairs, "virtual_functions": False}
        return features.model_copy(update=update)

    def facts(self) -> Mapping[str, str]:
        """``no_vduse``: why ``auto`` has chosen mode ``relay``."""
        mode = self.preferred
        no_vduse = self._no_vduse() if self._is_auto and mode is Mode.RELAY else None
        return {"mode": mode.value, **({"no_vduse": str(no_vduse.reason)} if no_vduse else {})}

    def _relay(self) -> Usability:
        return no_pci(self._switch.root) or self._vfs.usability(for_dpdk=True)

    def _no_vduse(self) -> Usability | None:
        """Why ``auto`` leaves out mode ``vduse``; None if it does not."""
        root = self._switch.root
        usable = _unknown_version(root) or lacks_vduse(root) or self._vduse.usability_for_auto()
        return None if usable.usable else usable


def first_that_has(modes: Sequence[Mode], check: Callable[[Mode], None]) -> Mode:
    """The first mode that has what a port asks for, as ``check`` tells.

    Raises: Unsupported or InvalidRequest, what the first mode says, if none has it.
    """
    refused: NetpluginError | None = None
    for mode in modes:
        try:
            check(mode)
            return mode
        except (Unsupported, InvalidRequest) as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _unknown_version(root: OvsRoot) -> Usability | None:
    """Why it is unknown whether this OVS has VDUSE; None if it is known."""
    if root.ovs_version:
        return None
    return Usability(
        False,
        "OVS does not report its version, and only 3.5 and newer have VDUSE",
        "start OVS with ovs-ctl, which writes ovs_version; or set [vdpa] mode = vduse",
        "ovs-version",
    )


def _neither(relay: Usability, vduse: Usability) -> Usability:
    reason = f"{relay.reason}; without VFs: {vduse.reason}"
    return Usability(False, reason, f"{relay.fix}; or {vduse.fix}", relay.step)
