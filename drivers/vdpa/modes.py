"""The two modes that join a VM's vhost-user port to its VF, and the choice of a port's mode.

The mode is saved in the claim on the VF, in the same transaction as the intent, and never changes
during the life of the port: not when OVS is replaced, and not when the option is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from drivers.vf.ledger import Use
from drivers.vf.ports import claim_of
from netplugin.backend import Intent, Usability
from netplugin.host.ovs_rows import OvsPort, OvsRoot

_NOTE = "mode"
#: The interface type of a port in native mode.
NATIVE_TYPE = "dpdkvdpa"


class Mode(StrEnum):
    """How frames travel between the VM and its VF."""

    #: The VF is a DPDK port of OVS, and two flows join it to the VM's port. Works with any OVS-DPDK.
    RELAY = "relay"
    #: One ``dpdkvdpa`` port relays frames; the VF's representor is on the network's bridge.
    NATIVE = "native"

    @property
    def use(self) -> Use:
        return Use.REPRESENTED if self is Mode.NATIVE else Use.EMBEDDED

    @property
    def notes(self) -> Mapping[str, Any]:
        """The values to save in the claim."""
        return {_NOTE: self.value}


def mode_for_new(option: str, root: OvsRoot) -> Mode:
    """Return the mode of a new port from ``[vdpa] mode`` and the interface types of this OVS."""
    if option == "auto":
        return Mode.NATIVE if NATIVE_TYPE in root.iface_types else Mode.RELAY
    return Mode(option)


def mode_of(intent: Intent) -> Mode | None:
    """Return the mode of a port from its claim; None without a claim."""
    claim = claim_of(intent)
    return Mode(claim.memory[_NOTE]) if claim else None


def mode_on_host(row: OvsPort | None, beside: OvsPort | None) -> Mode | None:
    """Return the mode of a port from its OVS rows, for ports whose claim was lost with the store."""
    interface = row.interface if row else None
    if interface is not None and interface.type == NATIVE_TYPE:
        return Mode.NATIVE
    return Mode.RELAY if interface is not None or beside is not None else None


def lacks_native(root: OvsRoot) -> Usability | None:
    """Return why this OVS does not support native mode; None if it does."""
    if NATIVE_TYPE in root.iface_types:
        return None
    return Usability(
        False, f"this OVS has no interface type {NATIVE_TYPE}, which native mode needs",
        "install the NIC vendor's OVS that has it; or, for new ports, set [vdpa] mode = relay",
        "iface-types",
    )  # fmt: skip
