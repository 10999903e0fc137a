"""The data saved in a VF's claim: the identity of the VF and its original settings.

It is committed with the intent before the host is changed, so the VF can be restored after any crash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from drivers.vf.commands import KIND
from drivers.vf.inventory import Inventory, Pf, Setting, Vf
from netplugin.backend import Claim, Intent
from netplugin.host.nic_models import KEPT_BY_DPDK, model_of
from netplugin.host.vf_messages import GROUPS, NO_MAC, VfAttributes
from netplugin.host.vfs import is_vfio

#: For a NIC that refuses a zero MAC for a VF. libvirt uses it too (``altZeroMAC`` in src/util/virnetdev.c).
PLACEHOLDER_MAC = "02:00:00:00:00:00"
#: Let the kernel choose the driver, because the original one is unknown.
ANY_DRIVER = ""


@dataclass(frozen=True, slots=True)
class Original:
    """The settings of a VF before it was claimed, to restore when it is released."""

    attributes: VfAttributes
    driver: str | None
    driver_override: str | None

    @classmethod
    def of(cls, pf: Pf, vf: Vf) -> Original:
        """Save the settings of a free VF.

        A MAC chosen by the VF's driver is saved as zero. Writing it through the PF would mark it as
        administratively set, and the VF's driver could no longer change it (``pf_set_mac`` in ice, i40e
        and ixgbe, IGB_VF_FLAG_PF_SET_MAC in igb). If the PF reports another MAC than the VF's interface
        has, the operator set it and the driver has not taken it yet (igb_ndo_set_vf_mac: "Reload the VF
        driver"). A VF on vfio may still have the settings of an unmanaged VM; these are discarded.
        """
        assert vf.attributes is not None
        attributes = vf.attributes
        for setting in vf.unsupported:
            if setting.group == "rate":  # could not be restored without a carrier: see ``to_vm``
                rates: dict[str, Any] = dict(zip(GROUPS["rate"], setting.values, strict=True))
                attributes = replace(attributes, **rates)
        if is_vfio(vf.driver):
            attributes = _of_a_new_vf(pf, attributes)
        elif any(i.own_mac and i.mac in ("", attributes.mac) for i in vf.interfaces):
            attributes = replace(attributes, mac=NO_MAC)
        return cls(attributes, vf.driver, vf.driver_override)

    @classmethod
    def of_new(cls, pf: Pf, vf: Vf) -> Original:
        """Defaults for a VF that was already ours when the store was lost: the settings of a new VF.

        If the driver is one that DPDK keeps, it is recorded as the original: the agent did not bind it,
        and OVS may be using the VF.
        """
        assert vf.attributes is not None
        driver = vf.driver if vf.driver in KEPT_BY_DPDK else ANY_DRIVER
        return cls(_of_a_new_vf(pf, vf.attributes), driver, None)

    def has_driver(self, vf: Vf) -> bool:
        """Whether the VF has its original driver."""
        if self.driver == ANY_DRIVER:
            return not is_vfio(vf.driver) and vf.driver_override is None
        return vf.driver == self.driver


def _of_a_new_vf(pf: Pf, has: VfAttributes) -> VfAttributes:
    """Return the settings that a new VF of this NIC has.

    A NIC without a spoof check may report it as off (bnxt_get_vf_config, nfp_app_get_vf_config) and
    refuse to turn it on. If the default of the driver is unknown, the spoof check is left as it is.
    """
    new = model_of(pf.driver).vf.spoofchk
    return VfAttributes(
        mac=NO_MAC,
        spoofchk=has.spoofchk if has.spoofchk is None or new is None else new,
        trusted=None if has.trusted is None else False,
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What a claim saves about its VF. The NIC is identified by its permanent MAC if it reports one."""

    pf_address: str
    pf_name: str
    pf_mac: str | None
    number: int
    numa_node: int | None
    #: The MAC of the port, which it keeps for life.
    mac: str
    original: Original

    @property
    def kept_by_dpdk(self) -> bool:
        """Whether DPDK uses the VF with its kernel driver."""
        return self.original.driver in KEPT_BY_DPDK

    @classmethod
    def of(cls, claim: Claim) -> Memory:
        """Read the memory of a port's claim."""
        saved: dict[str, Any] = {each.name: claim.memory[each.name] for each in fields(cls)}
        before = saved.pop("original")
        attributes = VfAttributes(**before["attributes"])
        return cls(**saved, original=Original(attributes, before["driver"], before["driver_override"]))

    def has_set(self, attributes: VfAttributes) -> bool:
        """Whether the VF has a MAC that the port gave it."""
        return attributes.mac in (self.mac, provisional_mac(self.mac))

    def is_place(self, pf: Pf, vf: Vf) -> bool:
        """Whether this is the remembered VF. After a reboot, its address may belong to another NIC."""
        return self.is_nic(pf) and self.number == vf.number

    def is_nic(self, pf: Pf) -> bool:
        """Whether this is the NIC of the remembered VF."""
        if self.pf_mac is not None and pf.permanent_mac is not None:
            return self.pf_mac == pf.permanent_mac
        return self.pf_address == pf.address


def new_claim(
    inventory: Inventory, vf: Vf, mac: str, *, adopted: bool, notes: Mapping[str, Any] | None = None
) -> Claim:
    """Make a claim that saves the current state of the VF or, if ``adopted``, the defaults of a new VF.

    ``notes``: extra values of the backend to save.
    """
    pf = inventory.pf_of(vf)
    original = Original.of_new(pf, vf) if adopted else Original.of(pf, vf)
    memory = Memory(pf.address, pf.name, pf.permanent_mac, vf.number, pf.numa_node, mac, original)
    return Claim(KIND, vf.address, {**(notes or {}), **asdict(memory)})


def no_mac(pf: Pf, vf: Vf) -> str:
    """Return the MAC to write to remove a VF's MAC from its NIC's switch."""
    is_refused = Setting.of("mac", VfAttributes(mac=NO_MAC)) in vf.unsupported
    return PLACEHOLDER_MAC if is_refused or not model_of(pf.driver).vf.takes_no_mac else NO_MAC


def provisional_mac(mac: str) -> str:
    """Return the MAC of a VF that DPDK has open while the VM with this MAC runs on another host.

    Not ``no_mac``: DPDK's driver of a VF without a MAC chooses one, and its PF then reports that one. A
    unicast address of the quadrant for local administration (IEEE 802c); no frame has it.
    """
    first, *rest = hashlib.sha256(mac.encode()).digest()[:6]
    return bytes([(first & 0xF0) | 0x02, *rest]).hex(":")


def attributes_before(memory: Memory, pf: Pf, vf: Vf) -> VfAttributes:
    """Return the attributes to restore.

    If the original MAC was zero and the VF's driver has since chosen one, that one stays.
    """
    original, now = memory.original, vf.attributes
    assert now is not None
    mac = original.attributes.mac
    if mac == NO_MAC:
        is_elsewhere = vf.driver is not None and not vf.interfaces and not is_vfio(vf.driver)
        chosen = is_elsewhere or any(i.own_mac for i in vf.interfaces)
        if chosen and original.has_driver(vf) and not memory.has_set(now):
            mac = now.mac
        else:
            mac = no_mac(pf, vf)
    return replace(original.attributes, mac=mac)


@dataclass(frozen=True, slots=True)
class LostVf:
    """Why a claim's VF was not found.

    ``moved``: the address belongs to another VF, or the VF has another address. ``away``: the NIC is not
    in the inventory (renamed, removed from the list, unplugged), so the VF's state is unknown.
    If neither, the NIC exists without this VF: the VF was removed, and its settings with it.
    """

    reason: str
    moved: bool = False
    away: bool = False


def locate(inventory: Inventory, claim: Claim) -> Vf | LostVf:
    """Find the VF of a claim in the inventory, or return why it is missing."""
    memory, vf = Memory.of(claim), inventory.vfs.get(claim.key)
    if vf is not None and memory.is_place(inventory.pf_of(vf), vf):
        return vf
    places = (each for each in inventory.vfs.values() if memory.is_place(inventory.pf_of(each), each))
    elsewhere = next(places, None)
    of = f"VF {memory.number} of {memory.pf_name}"
    if vf is not None or elsewhere is not None:
        now = elsewhere.address if elsewhere else "gone"
        return LostVf(f"{claim.key} was {of}, which is now {now}", moved=True)
    pf = inventory.pfs.get(memory.pf_address)
    why = f"there is no NIC {memory.pf_address} in [sriov] devices"
    if pf is not None:
        why = f"{pf.name} has {pf.desired_vfs} VFs (sriov_numvfs of {pf.address})"
    away = not any(memory.is_nic(each) for each in inventory.pfs.values())
    return LostVf(f"{claim.key}, {of}, is gone: {why}", away=away)


def holders_of(claims: Mapping[Claim, str]) -> dict[str, str]:
    """Return the holders of VF claims by PCI address."""
    return {claim.key: holder for claim, holder in claims.items() if claim.kind == KIND}


def claim_of(intent: Intent) -> Claim | None:
    """Return the port's claim on a VF."""
    return next((claim for claim in intent.claims if claim.kind == KIND), None)


def vf_of(intent: Intent, inventory: Inventory) -> Vf | None:
    """Return the VF that the port has claimed, if it is there."""
    claim = claim_of(intent)
    vf = locate(inventory, claim) if claim else None
    return vf if isinstance(vf, Vf) else None
