"""The changes that can be made to a virtual function, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from netplugin.backend import Change, Claim
from netplugin.host.vfs import GROUPS, VfAttributes

#: The claim kind of VFs; the claim key is the VF's PCI address.
KIND = "vf"


@dataclass(frozen=True)
class VfChange(Change):
    """A change to one VF. If the VF refuses it, or it does not persist, the VF is quarantined."""

    address: str
    #: The interface index of the PF, and the number of the VF on it.
    pf_index: int = field(compare=False)
    number: int

    @property
    def thing(self) -> Claim:
        return Claim(KIND, self.address)


@dataclass(frozen=True)
class SetVf(VfChange):
    """Write these attribute groups (see ``GROUPS``) through the PF.

    ``optional``: if the NIC does not support the attribute, it is left unchanged and no port fails.
    ``unless_used``: refuse if the host's network uses the VF.
    ``unless_with_vm``: skip the change if a VM has the VF or is about to get it. Used when the MAC of
    a teamed VF is removed from the NIC; the next read-back then determines the right MAC.
    """

    pf: str
    groups: tuple[str, ...]
    attributes: VfAttributes
    optional: bool = False
    unless_used: bool = False
    unless_with_vm: bool = False

    def describe(self) -> str:
        names = (name for group in self.groups for name in GROUPS[group])
        values = ", ".join(f"{name} {getattr(self.attributes, name)}" for name in names)
        return f"set VF {self.number} of {self.pf} ({self.address}): {values}"


@dataclass(frozen=True)
class UnbindVf(VfChange):
    """Unbind the VF from its driver, unless its interface is enslaved or in another network namespace."""

    driver: str

    def describe(self) -> str:
        return f"unbind VF {self.address} from {self.driver}"


@dataclass(frozen=True)
class BindVf(VfChange):
    """Reset the VF and bind it to ``driver`` with ``driver_override``, unless the host's network uses it.

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
