"""From how a VF is to how it should be, and back to how it was: pure.

To a VM: the attributes first, for a VF's driver asks for its MAC when it binds; then the driver. If
the NIC refuses an attribute, nothing has been unbound yet. Back from a VM: off vfio, the attributes,
and then the driver, which then finds the MAC it had. Either way the VF is reset between two drivers.

Each step is planned from what is seen alone, so that a crash between two of them is nothing special.
"""

from __future__ import annotations

from dataclasses import replace

from drivers.vf.changes import BindVf, SetVf, UnbindVf
from drivers.vf.inventory import Pf, Vf
from drivers.vf.memory import Memory, attributes_before
from netplugin.backend import Change
from netplugin.host.vfs import VFIO, VfAttributes, differing, is_vfio


def to_vm(port_id: str, pf: Pf, vf: Vf, want: VfAttributes, *, bind: bool) -> list[Change]:
    """The changes that give a VF these attributes and (``bind``) vfio-pci."""
    have = vf.attributes or VfAttributes()
    if vf.is_open and want.trusted:
        # A trusted VM may set its own MAC: that is what it is trusted with.
        want = replace(want, mac=have.mac)
    changes: list[Change] = _set(port_id, pf, vf, want)
    if bind and not is_vfio(vf.driver):
        changes.append(BindVf((port_id,), vf.address, VFIO, VFIO))
    elif bind and vf.driver_override not in (vf.driver, VFIO):
        changes.append(BindVf((port_id,), vf.address, vf.driver, vf.driver, rebind=False))
    return changes


def to_host(port_id: str, pf: Pf, vf: Vf, memory: Memory) -> list[Change]:
    """The changes that make a VF as it was before it was claimed."""
    original, ports = memory.original, (port_id,)
    overridden = vf.driver_override != original.driver_override
    # One that we took off vfio may not have been reset yet, even if it is to have no driver.
    rebind = not original.has_driver(vf) or (vf.driver is None and overridden)
    changes: list[Change] = []
    if rebind and vf.driver is not None:
        changes.append(UnbindVf(ports, vf.address, vf.driver))
    changes += _set(port_id, pf, vf, attributes_before(memory, vf))
    if rebind or overridden:
        changes.append(BindVf(ports, vf.address, original.driver, original.driver_override, rebind))
    return changes


def _set(port_id: str, pf: Pf, vf: Vf, want: VfAttributes) -> list[Change]:
    groups = differing(vf.attributes or VfAttributes(), want)
    if not groups or pf.link is None:
        return []
    return [SetVf((port_id,), vf.address, pf.name, pf.link.index, vf.number, groups, want)]
