"""The data models of the API: requests (PortSpec, ...) and responses (Port, Binding, ...)."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from netplugin.api.fields import (
    DeviceName,
    Flag,
    IpAddress,
    Kbps,
    Mac,
    Name,
    PciAddress,
    PeerAddress,
    PortId,
    PortName,
    RingSize,
    SocketPath,
    Value,
    VlanId,
    at_most,
    in_order,
)
from netplugin.api.migration import Migration
from netplugin.api.problem import Problem


class Network(Value):
    """The network segment of a port.

    ``mtu`` is the layer-3 MTU in bytes; it applies to every hop. The MTU of a ``vxlan`` network is
    set with ``PUT /v1/networks`` and may be left out here.
    """

    type: Literal["flat", "vlan", "vxlan"]
    physical_network: Name | None = None
    vlan_id: VlanId | None = None
    network_id: Name | None = None
    mtu: Annotated[int, Field(ge=576, le=9216, strict=True)] = 1500

    @model_validator(mode="after")
    def _fits_type(self) -> Self:
        if self.type == "vxlan":
            if self.network_id is None:
                raise ValueError("network_id is required for a vxlan network")
            if self.physical_network is not None or self.vlan_id is not None:
                raise ValueError("physical_network and vlan_id do not belong to a vxlan network")
            return self
        if self.physical_network is None:
            raise ValueError(f"physical_network is required for a {self.type} network")
        if (self.vlan_id is None) == (self.type == "vlan"):
            raise ValueError("vlan_id is required for a vlan network, and for no other")
        return self


class NetworkSpec(Value):
    """A VXLAN network (RFC 7348) as all hosts share it.

    ``vni`` is the VXLAN network identifier. ``mtu`` is the layer-3 MTU of the VMs in bytes.
    ``peers`` are the tunnel addresses of the hosts with ports on the network; the address of this
    host may be included and is ignored. ``udp_port`` is the destination port of the tunnel.
    """

    type: Literal["vxlan"]
    vni: Annotated[int, Field(ge=1, le=0xFFFFFF, strict=True)]
    peers: Annotated[tuple[PeerAddress, ...], Field(max_length=1024), at_most(1024)] = ()
    udp_port: Annotated[int, Field(ge=1, le=65535, strict=True)] = 4789
    mtu: Annotated[int, Field(ge=576, le=9216, strict=True)] = 1450

    @model_validator(mode="after")
    def _one_set_of_peers(self) -> Self:
        if len(set(self.peers)) != len(self.peers):
            raise ValueError("peers: an address may be listed once")
        if len({ipaddress.ip_address(peer).version for peer in self.peers}) > 1:
            raise ValueError("peers: all must be IPv4 or all IPv6")
        return self


class NetworkInfo(Value):
    """A VXLAN network on this host.

    ``ports`` is the number of ports of this host on the network. ``local_vlan`` (1 to 4094)
    identifies the network within this host. ``errors`` lists the ports that could not be updated by
    a PUT; all other ports were.
    """

    network_id: Name
    spec: NetworkSpec
    local_vlan: int
    ports: int
    errors: tuple[Problem, ...] = ()


class VfOptions(Value):
    """Settings of a virtual function (backends ``sriov`` and ``vdpa``).

    ``pci_address``: use this VF instead of one that the agent chooses. ``trusted``: the VM may
    change its MAC; ``sriov`` refuses it together with ``port_security.enabled``. ``vlan_proto``:
    the type of the tag that the NIC adds to the VM's frames for ``network.vlan_id``; with 802.1ad
    the VM may send tagged frames, and the NIC adds an outer tag. ``trunk``: the VM on a flat
    network sends tagged frames, with any VLAN or only with those in ``allowed_vlans``, if the NIC
    supports it. ``teaming``: add a standby virtio NIC, so that the VM can be live-migrated.
    """

    pci_address: PciAddress | None = None
    trusted: Flag = False
    spoofchk: Flag | None = None
    link_state: Literal["auto", "enable", "disable"] = "auto"
    vlan_qos: Annotated[int, Field(ge=0, le=7, strict=True)] = 0
    vlan_proto: Literal["802.1Q", "802.1ad"] = "802.1Q"
    trunk: Flag = False
    allowed_vlans: Annotated[
        tuple[VlanId, ...], Field(max_length=4094), at_most(4094), AfterValidator(in_order)
    ] = ()
    teaming: Flag = False


# claimed: assigned to a port; allocated: assigned and opened by the VM or OVS; quarantined: a
# setting failed on it; stale: assigned to a port but no longer on the host; unusable: cannot be
# given to a VM.
VfState = Literal["available", "claimed", "allocated", "quarantined", "stale", "unusable"]


class VfInfo(Value):
    """A virtual function: its physical function, its state, and the port it is assigned to.

    ``reason`` explains the state. ``max_queues`` is the upper limit of queue pairs; the guest's
    driver may get fewer. ``left_out``: excluded from ports by ``[sriov] devices``.
    """

    pci_address: PciAddress
    pf: str | None = None
    vf_index: int | None = None
    numa_node: int | None = None
    physical_network: str | None = None
    driver: str | None = None
    state: VfState
    port_id: PortId | None = None
    reason: str | None = None
    max_queues: int | None = None
    left_out: bool = False


class VfCounters(Value):
    """Packet and byte counters of a virtual function; ``rx`` is traffic that the function receives."""

    rx_packets: int = 0
    tx_packets: int = 0
    rx_bytes: int = 0
    tx_bytes: int = 0
    rx_dropped: int = 0
    tx_dropped: int = 0


class Qos(Value):
    """Rate limits in kbit/s (1000 bit/s) as seen from the VM: ingress is traffic that it receives."""

    ingress_kbps: Kbps | None = None
    egress_kbps: Kbps | None = None
    min_egress_kbps: Kbps | None = None

    @model_validator(mode="after")
    def _least_within_most(self) -> Self:
        if self.egress_kbps and self.min_egress_kbps and self.min_egress_kbps > self.egress_kbps:
            raise ValueError("min_egress_kbps is above egress_kbps")
        return self


class AllowedAddress(Value):
    """An address or prefix that the VM may use as source; ``mac`` defaults to the MAC of the port."""

    ip: IpAddress
    mac: Mac | None = None


#: Functions that a VM may have for its network; the messages they send are dropped from other VMs.
Role = Literal["router", "dhcp_server"]


class PortSecurity(Value):
    """Anti-spoofing filter. Enabled without addresses, it lets the VM send from its own MAC only.

    ``allowed_addresses``: the IP addresses that the VM may send from. ``roles``: a ``router`` may
    send IPv6 router advertisements and redirects (RFC 4861, RFC 6105), a ``dhcp_server`` may send
    DHCP server replies (RFC 2131, RFC 8415). These messages are dropped from all other VMs.
    """

    enabled: Flag = True
    roles: Annotated[tuple[Role, ...], Field(max_length=2), AfterValidator(in_order)] = ()
    allowed_addresses: Annotated[tuple[AllowedAddress, ...], Field(max_length=64), at_most(64)] = ()


def _always(spec: PortSpec, features: Features) -> bool:
    return True


def _never(spec: PortSpec, features: Features) -> bool:
    return False


@dataclass(frozen=True)
class FieldRule:
    """How the agent treats a field of PortSpec. The defaults are the safe choice for a new field.

    ``live``: a PUT may change it on a live port; otherwise the change is a ``conflict``.
    ``live_of_device``: it may if the NIC is a device of the host, which its owner may make again.
    ``standby``: the standby NIC of a team (``vf.teaming``) gets the same value.
    ``supported``: whether a backend with these features honours a value other than the default;
    otherwise the value is ``unsupported``, with ``purpose`` in the error.
    """

    live: bool = False
    live_of_device: bool = False
    standby: bool = False
    supported: Callable[[PortSpec, Features], bool] = _never
    purpose: str = ""


class PortSpec(Value):
    """The requested configuration of a port: the NIC of a VM, its network and its backend.

    The guest holds the rings, and their number and size are part of the domain: they cannot change
    on a live port.
    """

    vm_id: Annotated[Name, FieldRule(standby=True)]
    mac: Annotated[Mac, FieldRule(live_of_device=True, standby=True)]
    backend: Annotated[Name, FieldRule()]
    network: Annotated[Network, FieldRule(live=True, standby=True)]
    queues: Annotated[int, Field(ge=1, le=128, strict=True), FieldRule(standby=True, supported=_always)] = 1
    rx_queue_size: Annotated[RingSize, FieldRule(supported=_always)] = 1024
    tx_queue_size: Annotated[RingSize, FieldRule(supported=_always)] = 1024
    numa_node: Annotated[
        Annotated[int, Field(ge=0, le=1023, strict=True)] | None,
        FieldRule(standby=True, supported=_always),
    ] = None
    #: Numeric user ID of the VM's QEMU process, if it runs as a user of its own: only this user can
    #: open the vhost-user socket. For backends with vhost-user sockets.
    qemu_user: Annotated[
        Annotated[int, Field(ge=1, lt=2**32 - 1, strict=True)] | None,
        FieldRule(
            standby=True,
            supported=lambda spec, features: features.needs_shared_memory or spec.vf.teaming,
            purpose="it is for vhost-user sockets",
        ),
    ] = None
    #: Name of the tap, or of the port in OVS, on this host; by default it is derived from the ID of
    #: the port. It must be free.
    port_name: Annotated[
        PortName | None,
        FieldRule(
            supported=lambda spec, features: features.port_names,
            purpose="it names a tap or a port in OVS",
        ),
    ] = None
    #: Path of the vhost-user socket, in a directory of its own or of its VM below
    #: ``[ovs] vhost_socket_dir`` or ``vhost_socket_roots``; by default the agent chooses it.
    vhost_user_socket: Annotated[
        SocketPath | None,
        FieldRule(
            supported=lambda spec, features: features.needs_shared_memory,
            purpose="it is for vhost-user sockets",
        ),
    ] = None
    #: Of a vDPA device of the kernel: who uses it. ``vhost-vdpa`` (the default): QEMU, by a character
    #: device. ``netdev``: the host, by a network interface that the caller moves into a container.
    attachment: Annotated[
        Literal["vhost-vdpa", "netdev"] | None,
        FieldRule(
            supported=lambda spec, features: features.vdpa_devices,
            purpose="it is for vDPA devices of the kernel",
        ),
    ] = None
    vf: Annotated[
        VfOptions,
        FieldRule(
            live=True,
            supported=lambda spec, features: features.virtual_functions,
            purpose="it is for the backends sriov and vdpa",
        ),
    ] = VfOptions()
    qos: Annotated[
        Qos,
        FieldRule(live=True, standby=True, supported=lambda spec, features: features.qos),
    ] = Qos()
    port_security: Annotated[PortSecurity, FieldRule(live=True, standby=True, supported=_always)] = (
        PortSecurity()
    )
    #: Of a service port: the device of the host that is its NIC. ``PUT /v1/ports`` refuses it.
    device: Annotated[
        DeviceName | None,
        FieldRule(
            supported=lambda spec, features: features.service_ports,
            purpose="a device of the host as a service port",
        ),
    ] = None
    #: Of a service port: whether ``device`` is an internal port of OVS, which the agent makes.
    internal: Annotated[
        Flag,
        FieldRule(
            supported=lambda spec, features: features.internal_ports,
            purpose="an internal port of OVS as a service port",
        ),
    ] = False

    @classmethod
    @cache
    def rules(cls) -> Mapping[str, FieldRule]:
        """The rule of each field; a field without one has the defaults of FieldRule."""
        return {
            name: next((m for m in field.metadata if isinstance(m, FieldRule)), FieldRule())
            for name, field in cls.model_fields.items()
        }

    @classmethod
    @cache  # pydantic copies a default each time: a tenth of a millisecond for every plug
    def _defaults(cls) -> Mapping[str, Any]:
        return {n: field.get_default() for n, field in cls.model_fields.items() if not field.is_required()}

    def differing(self, other: PortSpec | None = None) -> set[str]:
        """The fields whose values differ from those of ``other``, or from the defaults."""
        if other is not None:
            return {n for n in type(self).model_fields if getattr(self, n) != getattr(other, n)}
        return {name for name, default in self._defaults().items() if getattr(self, name) != default}

    @property
    def overlay_id(self) -> str | None:
        """The ID of the port's VXLAN network; None for other network types."""
        return self.network.network_id if self.network.type == "vxlan" else None


class PortState(StrEnum):
    """The state of a port.

    ``pending``: stored, not verified on the host yet. ``active``: verified on the host.
    ``degraded``: configured, but it does not work (see ``error``). ``removing``: being deleted.
    ``failed``: was active, and the agent cannot restore it (see ``error``).
    """

    PENDING = "pending"  # stored, not verified on the host yet
    ACTIVE = "active"  # read back from the host: it matches the spec
    DEGRADED = "degraded"  # matches the spec, but the host reports a fault (see ``error``)
    REMOVING = "removing"  # being deleted
    FAILED = "failed"  # was active; the agent cannot restore it (see ``error``)


class DomainRequirements(Value):
    """What the libvirt domain must provide for this NIC."""

    shared_memory: bool = False
    hugepages: bool = False
    numa_node: int | None = None
    vfio: bool = False
    #: The user that QEMU must run as to open the vhost-user socket; None: any user that runs QEMU.
    qemu_user: int | None = None


class Binding(BaseModel):
    """How the VM is attached to the port; a backend may add fields of its own."""

    model_config = ConfigDict(frozen=True, extra="allow")

    vif_type: str
    interface_xml: str
    domain_requirements: DomainRequirements = DomainRequirements()


class Port(BaseModel):
    """A port of this host; ``observed`` is its configuration as last read from the host."""

    port_id: PortId
    state: PortState
    spec: PortSpec
    binding: Binding | None = None
    observed: dict[str, Any] | None = None
    error: Problem | None = None
    timings_ms: dict[str, float] = {}
    #: The port whose VF this standby NIC belongs to (``vf.teaming``); change that port, not this
    #: one.
    standby_of: PortId | None = None
    #: Of a port that is being migrated.
    migration: Migration | None = None


class Features(Value):
    """The capabilities of a backend."""

    networks: tuple[Literal["flat", "vlan", "vxlan"], ...] = ()
    live_migration: bool = False
    #: Maximum rates in both directions; ``min_rate``: also a minimum rate.
    qos: bool = False
    min_rate: bool = False
    port_security: tuple[Literal["mac", "ip"], ...] = ()
    max_queues: int = 1
    needs_shared_memory: bool = False
    virtual_functions: bool = False
    #: Whether the name of a port may be chosen (``port_name``).
    port_names: bool = False
    #: Whether a port is a vDPA device of the kernel (``attachment``).
    vdpa_devices: bool = False
    #: Whether a standby virtio NIC can be added to the VF (``vf.teaming``).
    teaming: bool = False
    #: Whether a device of the host can be a port (``PUT /v1/service-ports``).
    service_ports: bool = False
    #: Whether such a port can be an internal port of OVS.
    internal_ports: bool = False


class BackendInfo(Value):
    """A backend of this host: whether it is usable and, if not, the reason and the fix."""

    name: str
    usable: bool
    reason: str | None = None
    fix: str | None = None
    features: Features = Features()
    #: Facts about the host that affect the backend, such as versions and options.
    facts: dict[str, str | int | bool] = Field(default={})


class Finding(Value):
    """A result of a check: what was found, what is expected, and the fix."""

    id: str
    status: Literal["ok", "warn", "fail"]
    found: str
    expected: str
    fix: str | None = None


class HostState(Value):
    """Facts about the host, as ``netplugin host facts`` prints them.

    A value that cannot be read is an object with the reason (``unknown``) and the file (``path``).
    """

    facts: dict[str, Any]
    #: Facts reported by running daemons (OVS, libvirt).
    live: dict[str, Any]


class ReconcileRequest(Value):
    """``remove_orphans`` permits the removal of marked objects without an intent after the store was lost."""

    dry_run: Flag = False
    remove_orphans: Flag = False


class PlannedChange(Value):
    """A planned change: the ports it is made for, and a sentence that describes it."""

    backend: str
    change: str
    ports: tuple[str, ...]
    detail: str


class ReconcileReport(BaseModel):
    """The changes that a reconcile found and, without ``dry_run``, made."""

    dry_run: bool
    ports: int
    changes: list[PlannedChange]
    orphans_kept: list[str] = []
    errors: list[Problem] = []
