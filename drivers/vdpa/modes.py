"""The two ways to join a VM's vhost-user port and its VF, and which of them a port has.

A port's mode is remembered with its claim on the VF, in the transaction of its intent, so that it
never changes while the port lives: not when OVS is exchanged, nor when the option is.
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
    """How frames go between the VM and its VF."""

    #: The VF is a DPDK port of OVS, and two flows join it to the VM's port; any OVS-DPDK can.
    RELAY = "relay"
    #: One port of type ``dpdkvdpa`` does both, and its VF's representor is on the network's bridge.
    NATIVE = "native"

    @property
    def use(self) -> Use:
        return Use.REPRESENTED if self is Mode.NATIVE else Use.EMBEDDED

    @property
    def notes(self) -> Mapping[str, Any]:
        """What a claim remembers of it."""
        return {_NOTE: self.value}


def mode_for_new(option: str, root: OvsRoot) -> Mode:
    """What a new port is made in, by ``[vdpa] mode`` and what this OVS has."""
    if option == "auto":
        return Mode.NATIVE if NATIVE_TYPE in root.iface_types else Mode.RELAY
    return Mode(option)


def mode_of(intent: Intent) -> Mode | None:
    """The mode of a port that has a claim."""
    claim = claim_of(intent)
    return Mode(claim.memory[_NOTE]) if claim else None


def mode_on_host(row: OvsPort | None, beside: OvsPort | None) -> Mode | None:
    """The mode of a port by what OVS has of it: what its store knew may be lost."""
    interface = row.interface if row else None
    if interface is not None and interface.type == NATIVE_TYPE:
        return Mode.NATIVE
    return Mode.RELAY if interface is not None or beside is not None else None


def lacks_native(root: OvsRoot) -> Usability | None:
    """Why this OVS cannot do native mode; None if it can."""
    if NATIVE_TYPE in root.iface_types:
        return None
    return Usability(
        False, f"this OVS has no interface type {NATIVE_TYPE}, which native mode needs",
        "install the NIC vendor's OVS that has it; or, for new ports, set [vdpa] mode = relay",
        "iface-types",
    )  # fmt: skip
