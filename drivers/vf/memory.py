"""What a claim on a VF remembers: which VF it is, whatever its address, and how it was before.

It is committed with the intent, before the host is touched, so that after any crash the VF can be
given back as it was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from drivers.vf.changes import KIND
from drivers.vf.inventory import Inventory, Pf, Setting, Vf
from netplugin.backend import Claim
from netplugin.host.vfs import NO_MAC, VfAttributes, is_vfio

#: Drivers of VFs beside which DPDK works, by the kernel's verbs and without vfio (DPDK's guide to
#: mlx5, "bifurcated driver"). A VM needs such a VF on vfio-pci, as any other.
KEPT_BY_DPDK = frozenset({"mlx4_core", "mlx5_core"})
#: Drivers of PFs that refuse a VF's MAC of zeros (qede_set_vf_mac; cxgb4_mgmt_set_vf_mac), and what
#: they get instead, as from libvirt (``altZeroMAC`` in src/util/virnetdev.c).
REFUSE_NO_MAC = frozenset({"qede", "cxgb4"})
PLACEHOLDER_MAC = "02:00:00:00:00:00"
#: Whether the spoof check of a VF is on when a driver of PFs makes it. On: igb_vf_configure,
#: __ixgbe_enable_sriov, i40e_alloc_vfs, ice_initialize_vf_entry. Off, as memory of zeros is:
#: bnxt_set_vf_attr, mlx5_esw_vport_alloc, ``req_spoofchk_val`` in qed_sriov.c.
NEW_SPOOFCHK: Mapping[str, bool] = MappingProxyType(
    {
        **dict.fromkeys(("igb", "ixgbe", "i40e", "ice"), True),
        **dict.fromkeys(("bnxt_en", "mlx5_core", "qede"), False),
    }
)
#: The driver that the kernel chooses, where nobody knows which it was.
ANY_DRIVER = ""


@dataclass(frozen=True, slots=True)
class Original:
    """How a VF was when it was claimed, and is to be again when it is given back."""

    attributes: VfAttributes
    driver: str | None
    driver_override: str | None

    @classmethod
    def of(cls, pf: Pf, vf: Vf) -> Original:
        """Of a VF that is free.

        A MAC that its driver chose is not the PF's to write: it would become administratively set,
        and then the VF's driver may not change it (``pf_set_mac`` in ice, i40e and ixgbe,
        IGB_VF_FLAG_PF_SET_MAC in igb). The PF reports the one that its interface has; another one
        was set by the operator, and the driver has not taken it yet (igb_ndo_set_vf_mac: "Reload the
        VF driver"). One on vfio may have the settings of a VM that was not ours: these are nobody's
        any more.
        """
        assert vf.attributes is not None
        attributes = vf.attributes
        for setting in vf.unsupported:
            if setting.group == "rate":  # could not be put back without a carrier: see ``to_vm``
                attributes = replace(attributes, **setting.by_name())
        if is_vfio(vf.driver):
            attributes = _of_a_new_vf(pf, attributes)
        elif any(i.own_mac and i.mac in ("", attributes.mac) for i in vf.interfaces):
            attributes = replace(attributes, mac=NO_MAC)
        return cls(attributes, vf.driver, vf.driver_override)

    @classmethod
    def of_new(cls, pf: Pf, vf: Vf) -> Original:
        """Of a VF that had been ours when the store was lost: as VFs are when they are made.

        A driver that DPDK keeps was not ours to bind: it is the one that the VF had, and OVS may
        run with it.
        """
        assert vf.attributes is not None
        driver = vf.driver if vf.driver in KEPT_BY_DPDK else ANY_DRIVER
        return cls(_of_a_new_vf(pf, vf.attributes), driver, None)

    def has_driver(self, vf: Vf) -> bool:
        """Whether the VF has the driver again that it had."""
        if self.driver == ANY_DRIVER:
            return not is_vfio(vf.driver) and vf.driver_override is None
        return vf.driver == self.driver


def _of_a_new_vf(pf: Pf, has: VfAttributes) -> VfAttributes:
    """What a VF of this NIC begins with.

    A NIC without a spoof check may report that it is off (bnxt_get_vf_config, nfp_app_get_vf_config)
    and refuse to turn it on: where it is not known how a VF begins, it stays as it is.
    """
    new = NEW_SPOOFCHK.get(pf.driver or "", has.spoofchk)
    return VfAttributes(
        mac=NO_MAC,
        spoofchk=None if has.spoofchk is None else new,
        trusted=None if has.trusted is None else False,
        rss_query=has.rss_query,
        node_guid=has.node_guid,
        port_guid=has.port_guid,
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What a claim knows of its VF. A NIC is known by the MAC it was built with, where it tells."""

    pf_address: str
    pf_name: str
    pf_mac: str | None
    number: int
    numa_node: int | None
    #: The MAC it is given, which a port keeps for life.
    mac: str
    original: Original

    @property
    def kept_by_dpdk(self) -> bool:
        """Whether DPDK leaves the VF its driver."""
        return self.original.driver in KEPT_BY_DPDK

    @classmethod
    def of(cls, claim: Claim) -> Memory | None:
        """None if the claim remembers nothing."""
        told = claim.memory
        if "original" not in told:
            return None
        original = told["original"]
        attributes = VfAttributes(**original["attributes"])
        return cls(
            pf_address=told["pf_address"],
            pf_name=told["pf_name"],
            pf_mac=told["pf_mac"],
            number=told["number"],
            numa_node=told["numa_node"],
            mac=told["mac"],
            original=Original(attributes, original["driver"], original["driver_override"]),
        )

    def is_place(self, pf: Pf, vf: Vf) -> bool:
        """Whether this VF is the one: an address may be another NIC's after a reboot."""
        return self.is_nic(pf) and self.number == vf.number

    def is_nic(self, pf: Pf) -> bool:
        """Whether this is the NIC that the VF is of."""
        if self.pf_mac is not None and pf.permanent_mac is not None:
            return self.pf_mac == pf.permanent_mac
        return self.pf_address == pf.address


def new_claim(
    inventory: Inventory,
    vf: Vf,
    mac: str,
    *,
    adopted: bool,
    notes: Mapping[str, Any] | None = None,
) -> Claim:
    """A claim on this VF that remembers how it is now; or, if ``adopted``, how a new one is.

    ``notes`` are a backend's own, beside.
    """
    pf = inventory.pf_of(vf)
    original = Original.of_new(pf, vf) if adopted else Original.of(pf, vf)
    memory = Memory(pf.address, pf.name, pf.permanent_mac, vf.number, pf.numa_node, mac, original)
    return Claim(KIND, vf.address, {**(notes or {}), **asdict(memory)})


def no_mac(pf: Pf, vf: Vf) -> str:
    """What takes a VF's MAC out of its NIC's switch."""
    is_refused = Setting.of("mac", VfAttributes(mac=NO_MAC)) in vf.unsupported
    return PLACEHOLDER_MAC if pf.driver in REFUSE_NO_MAC or is_refused else NO_MAC


def attributes_before(memory: Memory, pf: Pf, vf: Vf) -> VfAttributes:
    """What the VF's attributes should be again.

    A VF without a MAC gets one from its driver, which the PF reports then and which stays. What is
    not remembered stays as it is: claims of earlier versions know nothing of the last three.
    """
    original, now = memory.original, vf.attributes
    assert now is not None
    mac = original.attributes.mac
    if mac == NO_MAC:
        is_elsewhere = vf.driver is not None and not vf.interfaces and not is_vfio(vf.driver)
        chosen = is_elsewhere or any(i.own_mac for i in vf.interfaces)
        if chosen and original.has_driver(vf) and now.mac != memory.mac:
            mac = now.mac
        else:
            mac = no_mac(pf, vf)
    told = original.attributes
    return replace(
        told,
        mac=mac,
        rss_query=now.rss_query if told.rss_query is None else told.rss_query,
        node_guid=told.node_guid or now.node_guid,
        port_guid=told.port_guid or now.port_guid,
    )


@dataclass(frozen=True, slots=True)
class Lost:
    """Why a claim's VF is not there.

    ``moved``: the address is another VF's, or the VF has another address. ``away``: its NIC is not
    in the inventory (renamed, off the list, unplugged), so that nothing is known of the VF.
    Otherwise the NIC is there without this VF, which takes its settings with it.
    """

    reason: str
    moved: bool = False
    away: bool = False


def locate(inventory: Inventory, claim: Claim) -> Vf | Lost:
    """The VF of a claim, as it is now; or why it is not there."""
    memory = Memory.of(claim)
    vf = inventory.vfs.get(claim.key)
    if memory is None:
        return vf or Lost(f"there is no VF {claim.key}")
    if vf is not None and memory.is_place(inventory.pf_of(vf), vf):
        return vf
    elsewhere = _elsewhere(inventory, memory)
    of = f"VF {memory.number} of {memory.pf_name}"
    if vf is not None:
        other = f"VF {vf.number} of {inventory.pf_of(vf).name}"
        now = f"; {of} is now {elsewhere.address}" if elsewhere else ""
        return Lost(f"{claim.key} was {of} and is now {other}{now}", moved=True)
    if elsewhere is not None:
        return Lost(f"{claim.key}, {of}, is now {elsewhere.address}", moved=True)
    return Lost(
        f"{claim.key}, {of}, is gone: {_why_gone(inventory, memory)}",
        away=not any(memory.is_nic(pf) for pf in inventory.pfs.values()),
    )


def _elsewhere(inventory: Inventory, memory: Memory) -> Vf | None:
    for vf in inventory.vfs.values():
        if memory.is_place(inventory.pf_of(vf), vf):
            return vf
    return None


def _why_gone(inventory: Inventory, memory: Memory) -> str:
    pf = inventory.pfs.get(memory.pf_address)
    if pf is None:
        return f"there is no NIC {memory.pf_address} in [sriov] devices"
    return f"{pf.name} has {pf.wanted_vfs} VFs (sriov_numvfs of {pf.address})"


def remembered(claim: Claim) -> Memory:
    """What a claim of ours remembers. Raises: ValueError if it is none of ours."""
    memory = Memory.of(claim)
    if memory is None:
        raise ValueError(f"the claim on {claim.key} remembers nothing")
    return memory


def holders_of(claims: Mapping[Claim, str]) -> dict[str, str]:
    """Holders by PCI address, of the claims that are on VFs."""
    return {claim.key: holder for claim, holder in claims.items() if claim.kind == KIND}
