"""Access to the host's VFs: check usability, read the inventory and counters, apply one change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from drivers.vf.abilities import max_queues
from drivers.vf.commands import BindVf, SetVf, UnbindVf, VfChange
from drivers.vf.inventory import (
    Inventory,
    find_pfs,
    interface_index,
    libvirt_file,
    read_again,
    read_inventory,
)
from drivers.vf.memory import Memory
from drivers.vf.options import PoolDevice
from drivers.vf.usability import usability
from netplugin.api.errors import NetpluginError
from netplugin.api.models import VfCounters
from netplugin.backend import Claim
from netplugin.host.usability import Usability
from netplugin.host.vfs import (
    SYS,
    NicLink,
    VfBusy,
    VfInvalid,
    VfRefuses,
    Vfs,
    VfStuck,
    is_beyond,
    read_link,
    read_text,
    unsupported,
)

#: PF drivers without VF counters (no ``ndo_get_vf_stats``): the kernel reports zeros.
COUNT_NOTHING = frozenset({"igb", "bnxt_en", "qede", "cxgb4"})
#: Where libvirt saves the MAC and VLAN of a VF while its VM runs, in one file PF_vfN each. It removes
#: the file just before it restores the values (virNetDevSaveNetConfig and virNetDevReadNetConfig in
#: src/util/virnetdev.c). It restores them after QEMU has closed the VF, with or without
#: ``managed='yes'`` (virHostdevReAttachPCIDevicesImpl in src/hypervisor/virhostdev.c).
LIBVIRT_STATE = Path("/run/libvirt/hostdevmgr")


class VfKernel:
    """The host's VFs. Tests substitute a model."""

    def __init__(
        self,
        devices: Sequence[PoolDevice],
        sys: Path = SYS,
        vfs: Vfs | None = None,
        libvirt_state: Path = LIBVIRT_STATE,
    ) -> None:
        self.devices = tuple(devices)
        self._sys = sys
        self._libvirt_state = libvirt_state
        self._vfs = vfs or Vfs(sys)

    def usability(self, *, for_dpdk: bool = False) -> Usability:
        """Check whether VFs can be used. Reads few files: it runs for each batch of plugs, on any thread."""
        return usability(self._sys, self.devices, for_dpdk=for_dpdk)

    def nics(self) -> tuple[str, ...]:
        """Return the PCI addresses of the PFs. Reads few files; any thread may call it."""
        return tuple(find_pfs(self._sys, self.devices)[0])

    def max_queues(self) -> int:
        """Return the most queue pairs a VF of any NIC can have. Reads few files; any thread may call it."""
        nics = (self._sys / "bus/pci/devices" / address for address in self.nics())
        found = ((read_link(nic / "driver"), read_text(nic / "sriov_numvfs")) for nic in nics)
        return max((max_queues(driver, int(vfs or 0)) for driver, vfs in found), default=1)

    def look(self) -> Inventory:
        """Read the whole inventory with one netlink dump. Raises: HostError, OperationTimeout."""
        return read_inventory(self._sys, self.devices, self._vfs.links(), self._saved())

    def look_again(self, seen: Inventory, nics: Collection[str]) -> Inventory:
        """Read these PFs (by address) and their VFs again, one request per PF; keep the rest of ``seen``.

        Raises: HostError, OperationTimeout.
        """
        known = {address: seen.pfs[address].link for address in nics}
        links = {a: self._vfs.link(link.index) for a, link in known.items() if link}
        if len(links) < len(nics) or None in links.values():
            return self.look()  # an interface appeared or disappeared
        there = {address: link for address, link in links.items() if link}
        return read_again(self._sys, seen, there, self._saved())

    def counters(self, claims: Sequence[Claim]) -> dict[Claim, VfCounters]:
        """Return the NIC counters of the VFs of these claims; omits those that cannot be read now."""
        of_nics: dict[str, list[tuple[int, Claim]]] = {}
        for claim in claims:
            memory = Memory.of(claim)
            if memory is not None and self._is_at(memory, claim.key):
                of_nics.setdefault(memory.pf_address, []).append((memory.number, claim))
        found: dict[Claim, VfCounters] = {}
        for address, held in of_nics.items():
            device = self._sys / "bus/pci/devices" / address
            index = interface_index(self._sys, device)
            if index is None or read_link(device / "driver") in COUNT_NOTHING:
                continue
            with contextlib.suppress(NetpluginError):
                counted = self._vfs.counters(index)
                found |= {claim: counted[n] for n, claim in held if n in counted}
        return found

    def _is_at(self, memory: Memory, address: str) -> bool:
        """Whether the remembered VF still has this PCI address."""
        nic = self._sys / "bus/pci/devices" / memory.pf_address
        return read_link(nic / f"virtfn{memory.number}") == address

    def _saved(self) -> frozenset[str]:
        with contextlib.suppress(OSError):
            return frozenset(os.listdir(self._libvirt_state))
        return frozenset()

    def carry_out(self, change: VfChange) -> None:
        """Apply one change. Usage is checked again just before, because it may have changed since the plan.

        Raises: Unsupported, Conflict, VfBusy, VfRefuses, HostError, OperationTimeout.
        """
        match change:
            case SetVf():
                if change.unless_used:
                    self._require_unused(change)
                if change.unless_with_vm and self._is_with_vm(change):
                    return
                for group in change.groups:
                    self._set(change, group)
            case UnbindVf():
                self._require_unused(change, may_be_up=True)
                with self._judging(change):
                    self._vfs.unbind(change.address)
            case BindVf():
                if change.rebind:
                    self._require_unused(change)
                with self._judging(change):
                    self._bind(change)

    def _require_unused(self, change: VfChange, *, may_be_up: bool = False) -> None:
        use = self._vfs.host_use(change.address, may_be_up=may_be_up)
        if use is not None:
            raise use.conflict(change.address, "vf")

    def _is_with_vm(self, change: SetVf) -> bool:
        """Like ``Vf.is_with_vm``, read now."""
        is_saved = libvirt_file(change.pf, change.number) in self._saved()
        return is_saved or self._vfs.is_open(change.address)

    def _set(self, change: SetVf, group: str) -> None:
        with self._judging(change, group):
            self._vfs.set(change.pf_index, change.number, group, change.attributes)

    @contextlib.contextmanager
    def _judging(self, change: VfChange, group: str = "") -> Iterator[None]:
        """Translate a kernel error: ``VfBusy`` (NIC not ready), ``Unsupported``, or a faulty VF."""
        try:
            yield
        except VfRefuses as refused:
            raise self._judged(change, group, refused) from refused
        except VfBusy as busy:
            if not _is_in_order(self._vfs.link(change.pf_index), change):
                raise
            raise VfStuck(busy.detail, step=busy.step) from busy

    def _judged(self, change: VfChange, group: str, refused: VfRefuses) -> NetpluginError:
        """Classify a refusal: the NIC is not ready, it does not support the setting, or the VF is faulty.

        Drivers return EINVAL in all three cases. They run the same readiness check before they report
        a VF's settings (ice_check_vf_ready_for_cfg of ice, i40e_validate_vf of i40e), so a VF that is
        reported is not being reset.
        """
        link = self._vfs.link(change.pf_index)
        if link is None or not _is_in_order(link, change):
            detail = f"{refused.detail} (its NIC is being reset, or is down)"
            return VfBusy(detail, step=refused.step)
        if not isinstance(refused, VfInvalid) or not isinstance(change, SetVf):
            return refused
        if group == "rate" and not link.carrier:  # igb_ndo_set_vf_bw, ixgbe_ndo_set_vf_bw
            detail = f"{refused.detail} (its NIC has no carrier)"
            # The carrier may never come back, and every port sets its own rates: do not wait for it.
            return unsupported(detail, group) if change.optional else VfBusy(detail, step="set-vf")
        return unsupported(refused.detail, group) if is_beyond(group, change.attributes) else refused

    def _bind(self, change: BindVf) -> None:
        vfs = self._vfs
        if change.rebind:
            vfs.unbind(change.address)
            vfs.reset(change.address)  # remove the state of the previous user
            if change.driver is not None:
                vfs.override(change.address, change.driver or None)
                vfs.probe(change.address)
        vfs.override(change.address, change.override)


def _is_in_order(link: NicLink | None, change: VfChange) -> bool:
    """Whether the NIC is up and reports the VF."""
    return link is not None and link.up and change.number in link.vfs
