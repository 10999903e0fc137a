"""Plan the steps from the current state of a VF to the desired one, and back to the original. Pure.

To a VM: attributes first, because the VF's driver requests its MAC when it binds; then the driver. If
the NIC refuses an attribute, nothing has been unbound yet. Back to the host: unbind vfio, restore the
attributes, then bind the driver, which finds its original MAC. The VF is reset between two drivers.

Each step is planned from observed state only, so a crash between steps needs no special handling.
"""

from __future__ import annotations

from dataclasses import replace

from drivers.vf.changes import BindVf, SetVf, UnbindVf
from drivers.vf.inventory import Pf, Setting, Vf
from drivers.vf.memory import Memory, attributes_before, no_mac
from netplugin.backend import Change
from netplugin.host.vfs import NO_MAC, VFIO, VfAttributes, differing, is_vfio


def to_vm(port_id: str, pf: Pf, vf: Vf, want: VfAttributes, *, bind: bool) -> list[Change]:
    """Plan how a reported VF gets these attributes and, if ``bind``, the driver vfio-pci."""
    have = vf.attributes
    assert have is not None
    # Attributes that no port sets stay as the operator set them.
    want = replace(
        want, rss_query=have.rss_query, node_guid=have.node_guid, port_guid=have.port_guid
    )
    if pf.link is None or not pf.link.carrier:
        # Drivers compare a rate with the link speed and refuse it without a link (igb_ndo_set_vf_bw,
        # ixgbe_ndo_set_vf_bw, i40e_set_bw_limit, bnxt_set_vf_bw). The rates are set once there is one.
        want = replace(want, min_mbps=have.min_mbps, max_mbps=have.max_mbps)
    binds = bind and not is_vfio(vf.driver)
    changes: list[Change] = []
    groups = differing(have, want)
    if "mac" in groups and want.mac == no_mac(pf, vf):
        groups = groups[1:]  # a separate change: a VM may have the VF by now
        optional = want.mac == NO_MAC  # if it is refused, ``no_mac`` returns the placeholder
        out = set_vf(port_id, pf, vf, ("mac",), want, optional=optional, unless_used=binds)
        changes.append(replace(out, unless_with_vm=True))
    if groups:
        changes.append(set_vf(port_id, pf, vf, groups, want, unless_used=binds))
    if binds:
        changes.append(bind_vf(port_id, pf, vf, VFIO, VFIO))
    elif bind and vf.driver_override not in (vf.driver, VFIO):
        changes.append(bind_vf(port_id, pf, vf, vf.driver, vf.driver, rebind=False))
    return changes


def to_host(port_id: str, pf: Pf, vf: Vf, memory: Memory) -> list[Change]:
    """Plan how a reported VF gets back its state from before the claim."""
    original, want = memory.original, attributes_before(memory, pf, vf)
    overridden = vf.driver_override != original.driver_override
    settings = _settings(port_id, pf, vf, want)
    # A VF that we unbound from vfio may not have been reset yet, even if it is to have no driver.
    rebind = not original.has_driver(vf) or (vf.driver is None and overridden)
    # A driver takes a changed MAC only when it binds (igb_ndo_set_vf_mac: "Reload the VF driver").
    rebind = rebind or (vf.driver is not None and any("mac" in s.groups for s in settings))
    changes: list[Change] = []
    if rebind and vf.driver is not None:
        changes.append(UnbindVf((port_id,), vf.address, _index(pf), vf.number, vf.driver))
    changes += settings
    if rebind or overridden:
        driver, override = original.driver, original.driver_override
        changes.append(bind_vf(port_id, pf, vf, driver, override, rebind=rebind))
    return changes


def bind_vf(
    port_id: str, pf: Pf, vf: Vf, driver: str | None, override: str | None, *, rebind: bool = True
) -> BindVf:
    """Build the change that binds a reported VF to this driver with this ``driver_override``."""
    return BindVf((port_id,), vf.address, _index(pf), vf.number, driver, override, rebind)


def _settings(port_id: str, pf: Pf, vf: Vf, want: VfAttributes) -> list[SetVf]:
    """Build one change per group, because the NIC may not support one of them. Skip those that it has
    already refused."""
    assert vf.attributes is not None
    return [
        set_vf(port_id, pf, vf, (group,), want, optional=True)
        for group in differing(vf.attributes, want)
        if Setting.of(group, want) not in vf.unsupported
    ]


def set_vf(
    port_id: str,
    pf: Pf,
    vf: Vf,
    groups: tuple[str, ...],
    want: VfAttributes,
    *,
    optional: bool = False,
    unless_used: bool = False,
) -> SetVf:
    """Build the change that writes these attribute groups through the PF, see ``SetVf``."""
    return SetVf(
        (port_id,), vf.address, _index(pf), vf.number, pf.name, groups, want, optional, unless_used
    )


def _index(pf: Pf) -> int:
    assert pf.link is not None
    return pf.link.index
