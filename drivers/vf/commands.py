"""The changes that can be made to a virtual function: what each does, and what its refusal means."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from drivers.vf.inventory import libvirt_file
from netplugin.api.errors import NetpluginError
from netplugin.backend import Change, Claim
from netplugin.host.vf_messages import GROUPS, NicLink, VfAttributes
from netplugin.host.vfs import VfBusy, VfInvalid, VfRefuses, Vfs, VfStuck, is_beyond, unsupported

#: The claim kind of VFs; the claim key is the VF's PCI address.
KIND = "vf"
#: Where libvirt saves the MAC and VLAN of a VF while its VM runs, in one file PF_vfN each. It removes
#: the file just before it restores the values (virNetDevSaveNetConfig and virNetDevReadNetConfig in
#: src/util/virnetdev.c). It restores them after QEMU has closed the VF, with or without
#: ``managed='yes'`` (virHostdevReAttachPCIDevicesImpl in src/hypervisor/virhostdev.c).
LIBVIRT_STATE = Path("/run/libvirt/hostdevmgr")


class VfHost:
    """What a change uses of the host."""

    def __init__(self, vfs: Vfs, libvirt_state: Path = LIBVIRT_STATE) -> None:
        self.vfs = vfs
        self._libvirt_state = libvirt_state

    def saved(self) -> frozenset[str]:
        """Return the names of the files in which libvirt has settings of VFs to restore."""
        with contextlib.suppress(OSError):
            return frozenset(os.listdir(self._libvirt_state))
        return frozenset()


@dataclass(frozen=True)
class VfChange(Change, ABC):
    """A change to one VF. If the VF refuses it, or it does not persist, the VF is quarantined."""

    address: str
    #: The interface index of the PF, and the number of the VF on it.
    pf_index: int = field(compare=False)
    number: int

    @property
    def claimed(self) -> Claim:
        return Claim(KIND, self.address)

    def touches(self) -> frozenset[str]:
        """Return the PCI addresses and interface names whose events the change causes."""
        return frozenset({self.address})

    @abstractmethod
    def apply(self, host: VfHost) -> None:
        """Make the change, if the host's network does not use the VF.

        Raises: Unsupported, Conflict, VfBusy, VfRefuses, HostError, OperationTimeout.
        """

    def _require_unused(self, host: VfHost, *, may_be_up: bool = True) -> None:
        """Ask who has the VF, before each write.

        VFs that are made again have the addresses and numbers of those before, and a container may have
        got this one since the plan. ``may_be_up``: see ``Vf.host_hold``.

        Raises: Conflict.
        """
        use = host.vfs.host_use(self.address, may_be_up=may_be_up)
        if use is not None:
            raise use.conflict(self.address, "vf")

    @contextlib.contextmanager
    def _judging(self, host: VfHost, group: str = "") -> Iterator[None]:
        """Translate a kernel error: ``VfBusy`` (NIC not ready), ``Unsupported``, or a faulty VF.

        Drivers return EINVAL in all three cases. They run the same readiness check before they report
        a VF's settings (ice_check_vf_ready_for_cfg of ice, i40e_validate_vf of i40e), so a VF that is
        reported is not being reset.
        """
        try:
            yield
        except (VfRefuses, VfBusy) as refused:
            link = host.vfs.link(self.pf_index)
            in_order = link is not None and link.up and self.number in link.vfs
            if isinstance(refused, VfBusy):
                if not in_order:
                    raise
                raise VfStuck(refused.detail, step=refused.step, fix=refused.fix) from refused
            if link is None or not in_order:
                detail = f"{refused.detail} (its NIC is being reset, or is down)"
                raise VfBusy(detail, step=refused.step) from refused
            raise self._judged(link, group, refused) from refused

    def _judged(self, link: NicLink, group: str, refused: VfRefuses) -> NetpluginError:
        """Return what a refusal means although the NIC is ready."""
        return refused


@dataclass(frozen=True)
class SetVf(VfChange):
    """Write these attribute groups (see ``GROUPS``) through the PF.

    ``optional``: if the NIC does not support the attribute, it is left unchanged and no port fails.
    ``unless_up``: an interface of the VF that is merely up is a use of it too.
    ``unless_with_vm``: skip the change if a VM has the VF or is about to get it. Used when the MAC of
    a teamed VF is removed from the NIC; the next read-back then determines the right MAC.
    """

    pf: str
    groups: tuple[str, ...]
    attributes: VfAttributes
    optional: bool = False
    unless_up: bool = False
    unless_with_vm: bool = False

    def describe(self) -> str:
        names = (name for group in self.groups for name in GROUPS[group])
        values = ", ".join(f"{name} {getattr(self.attributes, name)}" for name in names)
        return f"set VF {self.number} of {self.pf} ({self.address}): {values}"

    def touches(self) -> frozenset[str]:
        return frozenset({self.address, self.pf})

    def apply(self, host: VfHost) -> None:
        saved_as = libvirt_file(self.pf, self.number)
        # Like ``Vf.is_with_vm``, read now.
        if self.unless_with_vm and (saved_as in host.saved() or host.vfs.is_open(self.address)):
            return
        for group in self.groups:
            self._require_unused(host, may_be_up=not self.unless_up)
            with self._judging(host, group):
                host.vfs.set(self.pf_index, self.number, group, self.attributes)

    def _judged(self, link: NicLink, group: str, refused: VfRefuses) -> NetpluginError:
        if not isinstance(refused, VfInvalid):
            return refused
        if group == "rate" and not link.carrier:  # igb_ndo_set_vf_bw, ixgbe_ndo_set_vf_bw
            detail = f"{refused.detail} (its NIC has no carrier)"
            # The carrier may never come back, and every port sets its own rates: do not wait for it.
            return unsupported(detail, group) if self.optional else VfBusy(detail, step="set-vf")
        return unsupported(refused.detail, group) if is_beyond(group, self.attributes) else refused


@dataclass(frozen=True)
class UnbindVf(VfChange):
    """Unbind the VF from its driver."""

    driver: str

    def describe(self) -> str:
        return f"unbind VF {self.address} from {self.driver}"

    def apply(self, host: VfHost) -> None:
        self._require_unused(host)
        with self._judging(host):
            host.vfs.unbind(self.address)


@dataclass(frozen=True)
class BindVf(VfChange):
    """Reset the VF and bind it to ``driver`` with ``driver_override``.

    ``driver``: None for no driver, empty for the kernel's choice. ``override``: None for none.
    ``rebind`` false: only write the override; the driver is already right.
    """

    driver: str | None
    override: str | None
    rebind: bool = True

    def describe(self) -> str:
        to = "the driver the kernel chooses" if self.driver == "" else self.driver or "no driver"
        what = f"reset VF {self.address}, bind it to {to}" if self.rebind else f"VF {self.address}"
        return f"{what}, driver_override {self.override or 'none'}"

    def apply(self, host: VfHost) -> None:
        self._require_unused(host, may_be_up=not self.rebind)
        vfs = host.vfs
        with self._judging(host):
            if self.rebind:
                vfs.unbind(self.address)
                vfs.reset(self.address)  # remove the state of the previous user
                if self.driver is not None:
                    vfs.override(self.address, self.driver or None)
                    vfs.probe(self.address)
            vfs.override(self.address, self.override)
