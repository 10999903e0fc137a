"""From how a VF is to how it should be, and back to how it was: pure.

To a VM: the attributes first, for a VF's driver asks for its MAC when it binds; then the driver. If
the NIC refuses an attribute, nothing has been unbound yet. Back from a VM: off vfio, the attributes,
and then the driver, which then finds the MAC it had. Either way the VF is reset between two drivers.

Each step is planned from what is seen alone, so that a crash between steps needs no special handling.
"""

from __future__ import annotations

from dataclasses import replace

from drivers.vf.changes import BindVf, SetVf, UnbindVf
from drivers.vf.inventory import Pf, Vf
from drivers.vf.memory import Memory, attributes_before
from netplugin.backend import Change
from netplugin.host.vfs import VFIO, VfAttributes, differing, is_vfio


def to_vm(port_id: str, pf: Pf, vf: Vf, want: VfAttributes, *, bind: bool) -> list[Change]:
    """The changes that give a VF that its PF reports these attributes and (``bind``) vfio-pci."""
    have = vf.attributes
    assert have is not None
    # What no port asks for stays as the operator set it.
    want = replace(
        want, rss_query=have.rss_query, node_guid=have.node_guid, port_guid=have.port_guid
    )
    if vf.is_open and want.trusted:
        # A trusted VM may set its own MAC: that is what it is trusted with.
        want = replace(want, mac=have.mac)
    changes: list[Change] = [*_set(port_id, pf, vf, want)]
    if bind and not is_vfio(vf.driver):
        changes.append(BindVf((port_id,), vf.address, VFIO, VFIO))
    elif bind and vf.driver_override not in (vf.driver, VFIO):
        changes.append(BindVf((port_id,), vf.address, vf.driver, vf.driver, rebind=False))
    return changes


def to_host(port_id: str, pf: Pf, vf: Vf, memory: Memory) -> list[Change]:
    """The changes that make a VF that its PF reports as it was before it was claimed."""
    original, ports = memory.original, (port_id,)
    overridden = vf.driver_override != original.driver_override
    settings = _set(port_id, pf, vf, attributes_before(memory, pf, vf))
    # One that we took off vfio may not have been reset yet, even if it is to have no driver.
    rebind = not original.has_driver(vf) or (vf.driver is None and overridden)
    # A driver takes another MAC when it binds (igb_ndo_set_vf_mac: "Reload the VF driver").
    rebind = rebind or (vf.driver is not None and any("mac" in s.groups for s in settings))
    changes: list[Change] = []
    if rebind and vf.driver is not None:
        changes.append(UnbindVf(ports, vf.address, vf.driver))
    changes += settings
    if rebind or overridden:
        changes.append(BindVf(ports, vf.address, original.driver, original.driver_override, rebind))
    return changes


def _set(port_id: str, pf: Pf, vf: Vf, want: VfAttributes) -> list[SetVf]:
    assert vf.attributes is not None and pf.link is not None
    groups = differing(vf.attributes, want)
    if not groups:
        return []
    return [SetVf((port_id,), vf.address, pf.name, pf.link.index, vf.number, groups, want)]
