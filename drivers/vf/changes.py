"""What can be done to a virtual function, each step as a value."""

from __future__ import annotations

from dataclasses import dataclass, field

from netplugin.backend import Change, Claim
from netplugin.host.vfs import GROUPS, VfAttributes

#: The kind of the claims; their key is the VF's PCI address.
KIND = "vf"


@dataclass(frozen=True)
class VfChange(Change):
    """A step on one VF; if it fails, or does not stay, the VF is not fit for use."""

    address: str
    #: The interface of its PF, and its number there.
    pf_index: int = field(compare=False)
    number: int

    @property
    def thing(self) -> Claim:
        return Claim(KIND, self.address)


@dataclass(frozen=True)
class SetVf(VfChange):
    """Write these groups of attributes (see ``GROUPS``) through the PF.

    ``optional``: what the NIC does not support stays as it is, and no port fails for it.
    ``unless_used``: not if the host's network has begun to use the VF.
    ``unless_with_vm``: the MAC of a teamed VF is taken out of the NIC, and is left alone if a VM has
    the VF by now, or is about to: what is read back then says what its MAC should be.
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
    """Take it from its driver, unless its interface is enslaved or in another network namespace."""

    driver: str

    def describe(self) -> str:
        return f"unbind VF {self.address} from {self.driver}"


@dataclass(frozen=True)
class BindVf(VfChange):
    """Reset it, and have this driver (None: none, empty: the kernel's choice) and this
    ``driver_override`` (None: none); unless the host's network has begun to use it.

    ``rebind`` false: the driver is right, and only the override is not.
    """

    driver: str | None
    override: str | None
    rebind: bool = True

    def describe(self) -> str:
        to = "the driver the kernel chooses" if self.driver == "" else self.driver or "no driver"
        what = f"reset VF {self.address}, bind it to {to}" if self.rebind else f"VF {self.address}"
        return f"{what}, driver_override {self.override or 'none'}"
