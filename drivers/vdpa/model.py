"""What vdpa observes, the modes and rows of its ports, and what it refuses before anything is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from drivers.ovs import filters
from drivers.ovs.model import Layout, ObservedOvsBridge, OvsObservation
from drivers.ovs.overlays import BRIDGE_MARKS, TUNNELS
from drivers.ovs.ports import VhostPort
from drivers.ovs.sockets import path_of
from drivers.ovs.tunnels import BASE_FLOWS
from drivers.vdpa.vduse_host import VduseDevice
from drivers.vdpa.vduse_processes import DeviceStep
from drivers.vf.backend import VfObservation
from drivers.vf.commands import KIND
from drivers.vf.ledger import Use
from netplugin.api.errors import Conflict, NetpluginError, Unsupported
from netplugin.api.models import PortSpec, Qos, VfOptions
from netplugin.backend import NOBODY, Change, Claim, Intent, unknown_network
from netplugin.host.names import RELAY, VDUSE, VHOST, device_name
from netplugin.host.ovs_rows import OvsRoot
from netplugin.host.ovs_versions import HAS_VDUSE
from netplugin.host.usability import Usability

# -- The observed state of the host. -----------------------------------------------------------------


@dataclass(frozen=True)
class VdpaObservation(VfObservation):
    """OVS for the ports in scope, and the whole pool of VFs. ``ports`` has the ports with rows."""

    ovs: OvsObservation = field(default_factory=lambda: OvsObservation({}))
    #: Devices that any interface of OVS names, with the interface.
    devices: Mapping[str, str] = field(default_factory=dict)
    #: VDUSE devices and vDPA devices of our names, by name.
    vduse: Mapping[str, VduseDevice] = field(default_factory=dict)
    #: The step on such a device that the kernel has not finished; none can be made before.
    vduse_pending: DeviceStep | None = None
    #: Where VDUSE devices are, and the most queue pairs of one.
    vduse_directory: str = "/dev/vduse"
    vduse_pairs: int = 1


@dataclass(frozen=True)
class Steps:
    """What one port needs, as the plan of its mode says: the plan of the backend joins those of all ports.

    ``desired``: the desired rows. ``leaves``: its rows are removed. ``before`` and ``after``: the changes of
    its VF or vDPA device, made before and after those of OVS.
    """

    desired: VhostPort | None = None
    leaves: bool = False
    before: tuple[Change, ...] = ()
    after: tuple[Change, ...] = ()
    refused: NetpluginError | None = None
    kept: NetpluginError | None = None


# -- The modes of a port, and the choice of a port's mode. ------------------------------------------
# The mode is saved in the claim on the VF or on the name of the VDUSE device, in the same transaction as
# the intent, and never changes during the life of the port: not when OVS is replaced, and not when the
# option is changed.


_NOTE = "mode"
#: The interface type of a port in native mode.
NATIVE_TYPE = "dpdkvdpa"


class Mode(StrEnum):
    """How frames travel between the VM and its network."""

    #: The VF is a DPDK port of OVS, and two flows join it to the VM's port. Works with any OVS-DPDK.
    RELAY = "relay"
    #: One ``dpdkvdpa`` port relays frames; the VF's representor is on the network's bridge.
    NATIVE = "native"
    #: OVS serves a vDPA device of the kernel, on the network's bridge. Needs no VF.
    VDUSE = "vduse"

    @property
    def use(self) -> Use:
        """How a VF is used: in mode ``vduse`` there is none."""
        return Use.REPRESENTED if self is Mode.NATIVE else Use.RELAY

    @property
    def notes(self) -> Mapping[str, Any]:
        """The values to save in the claim."""
        return {_NOTE: self.value}


#: The kind of claim that holds the name of a port's VDUSE device.
VDUSE_KIND = "vduse"


def mode_of(intent: Intent) -> Mode | None:
    """Return the mode of a port from its claim; None without a claim."""
    claims = (claim for claim in intent.claims if claim.kind in (KIND, VDUSE_KIND))
    return next((Mode(claim.memory[_NOTE]) for claim in claims), None)


def mode_on_host(port_id: str, seen: VdpaObservation) -> Mode | None:
    """Return the mode of a port from its OVS rows, for ports whose claim was lost with the store."""
    row = seen.ovs.rows.get(port_id)
    if row is not None and (path_of(row) or "").startswith(f"{seen.vduse_directory}/"):
        return Mode.VDUSE
    if row is not None and row.interface is not None:
        return Mode.NATIVE if row.interface.type == NATIVE_TYPE else Mode.RELAY
    return Mode.RELAY if port_id in seen.ovs.vf_ports else None


def claim_vduse(intent: Intent, taken: Mapping[Claim, str]) -> Claim:
    """Claim the name of a port's VDUSE device, which follows from its id. Raises: Conflict."""
    claim = Claim(VDUSE_KIND, device_name(VDUSE, intent.port_id), Mode.VDUSE.notes)
    holder = taken.get(claim, NOBODY)
    if holder not in (NOBODY, intent.port_id):
        raise Conflict(
            f"the name {claim.key} of the VDUSE device is that of port {holder}",
            step="claim",
            fix="choose another port id",
        )
    return claim


def lacks_native(root: OvsRoot) -> Usability | None:
    """Return why this OVS does not support native mode; None if it does."""
    if NATIVE_TYPE in root.iface_types:
        return None
    return Usability(
        False,
        f"this OVS has no interface type {NATIVE_TYPE}, which native mode needs",
        "install the NIC vendor's OVS that has it; or, for new ports, set [vdpa] mode = relay",
        "iface-types",
    )


def lacks_vduse(root: OvsRoot) -> Usability | None:
    """Return why this OVS has no VDUSE; None if it may have it: its interface types do not tell."""
    if not root.ovs_version or root.version >= HAS_VDUSE:
        return None
    return Usability(
        False,
        f"OVS {root.ovs_version} has no VDUSE, which mode vduse needs",
        "install OVS 3.5 or newer; or, for new ports, set [vdpa] mode = relay",
        "ovs-version",
    )


# -- The OVS rows that a port of the vdpa backend desires, in either mode, derived from the intent.


BACKEND = "vdpa"
#: The bridge of all relays. Each flow names its input and output port and none switches by MAC, so
#: relays on one bridge are isolated from each other. A bridge per relay would cost a tap and a set of
#: datapath tables each.
BRIDGE = "np-relay"
LAYOUT = Layout(
    BACKEND,
    {**BRIDGE_MARKS, BRIDGE: "vdpa:relay"},
    base={TUNNELS: BASE_FLOWS, BRIDGE: frozenset({filters.DROP_THE_REST})},
    prefixes=(VHOST, RELAY),
)
#: The options that name the VF of a row.
ACCELERATOR = "vdpa-accelerator-devargs"
DEVICE_OPTIONS = ("dpdk-devargs", ACCELERATOR)


def vf_on_host(port_id: str, ovs: OvsObservation) -> str | None:
    """Return the PCI address of the VF that a port's rows name."""
    row = ovs.vf_ports.get(port_id) or ovs.rows.get(port_id)
    options = row.interface.options if row and row.interface else {}
    return options.get(ACCELERATOR) or options.get("dpdk-devargs")


# -- Checks of a port request against the limits of software vDPA, before anything is stored. -----


def check_mode(
    spec: PortSpec,
    mode: Mode,
    bridge_mappings: Mapping[str, str],
    vf_networks: Collection[str] | None,
    here: ObservedOvsBridge | None = None,
    *,
    vduse_pairs: int = 1,
    migrates: bool = False,
) -> None:
    """Refuse what a port in this mode does not support.

    ``vf_networks``: those that have VFs; None for a port that has one. ``here``: the bridge that it is on.
    ``vduse_pairs``: the most queue pairs of a VDUSE device. ``migrates``: the VM of the port is to come here.

    Raises: Unsupported, InvalidRequest.
    """
    for asked, why, fix in _REFUSALS[mode](spec, vduse_pairs):
        if asked:
            raise Unsupported(f"backend vdpa in {mode} mode: {why}", step="validate", fix=fix)
    if migrates:
        check_migration(mode)
    if spec.overlay_id is not None:
        return
    name = str(spec.network.physical_network)
    if mode is not Mode.VDUSE and vf_networks is not None and name not in vf_networks:
        raise unknown_network(name, "[sriov] devices", vf_networks)
    # A live port stays on the bridge of its network if that is taken out of the option.
    stays = mode is Mode.VDUSE and here is not None and here.mark == name
    if mode is not Mode.RELAY and name not in bridge_mappings and not stays:
        raise unknown_network(name, "[ovs] bridge_mappings", bridge_mappings)


def _of_vduse(spec: PortSpec, pairs: int) -> list[tuple[bool, str, str]]:
    """There is no VF and no socket, and the kernel says how many queue pairs such a device may have."""
    return [
        (
            spec.queues > pairs,
            f"the kernel makes no VDUSE device with {spec.queues} queue pairs, the most is {pairs}",
            f"ask with queues {max(pairs, 1)}, or for the backend dpdkvhostuser",
        ),
        (
            spec.vf != VfOptions(),
            "the port has no VF",
            "ask without vf, or set [vdpa] mode = relay for new ports",
        ),
        (
            spec.vhost_user_socket is not None or spec.qemu_user is not None,
            "the port has no vhost-user socket: libvirt opens its device as root",
            "ask without vhost_user_socket and qemu_user",
        ),
    ]


def _of_vf(spec: PortSpec) -> list[tuple[bool, str, str]]:
    return [
        (
            spec.attachment is not None,
            "it has no vDPA device of the kernel",
            "ask without attachment, or set [vdpa] mode = vduse for new ports",
        ),
        (
            spec.overlay_id is not None,
            "a VF has no VXLAN networks",
            "ask for the backend dpdkvhostuser, or set [vdpa] mode = vduse for new ports",
        ),
    ]


def _of_relay(spec: PortSpec, _: int) -> list[tuple[bool, str, str]]:
    others = [a.mac for a in spec.port_security.allowed_addresses if a.mac not in (None, spec.mac)]
    return [
        *_of_vf(spec),
        (
            bool(others),
            "its VF takes frames for the port's own MAC only",
            "ask without a mac in port_security.allowed_addresses",
        ),
        (
            spec.vf.trunk or bool(spec.vf.allowed_vlans) or spec.vf.vlan_proto != "802.1Q",
            "OVS takes no tags from its VM",
            "ask without vf.trunk, vf.allowed_vlans and vf.vlan_proto, or with the backend sriov",
        ),
    ]


def _of_native(spec: PortSpec, _: int) -> list[tuple[bool, str, str]]:
    """In switchdev mode, settings belong to the VF's representor, and OVS can make only some of them."""
    plain = VfOptions(pci_address=spec.vf.pci_address)
    return [
        *_of_vf(spec),
        (
            spec.qos != Qos(),
            "rates are not available: no OVS that has the type could be tried",
            "ask without qos, or set [vdpa] mode = relay",
        ),
        (
            spec.vf != plain,
            "a NIC in switchdev mode leaves a VF's VLAN, trust, spoof check and link state to OVS",
            "ask with nothing but pci_address in vf",
        ),
    ]


_UNMOVABLE: Mapping[Mode, str] = {
    Mode.NATIVE: "no OVS that has the type could be tried",
    Mode.VDUSE: "QEMU migrates a device of vhost-vdpa by its shadow virtqueues and the state of the device, "
    "which a VDUSE device does not give",
}


def check_migration(mode: Mode) -> None:
    """Refuse the live migration of a port whose mode has none. Raises: Unsupported."""
    if mode in _UNMOVABLE:
        raise Unsupported(
            f"backend vdpa in {mode} mode: ports are not live-migrated: {_UNMOVABLE[mode]}",
            step="validate",
            fix="migrate VMs with ports in relay mode ([vdpa] mode, for new ports), or of another backend",
        )


_REFUSALS: Mapping[Mode, Callable[[PortSpec, int], list[tuple[bool, str, str]]]] = {
    Mode.RELAY: _of_relay,
    Mode.NATIVE: _of_native,
    Mode.VDUSE: _of_vduse,
}
