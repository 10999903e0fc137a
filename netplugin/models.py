"""The values of the API: what a platform asks for (PortSpec) and what it is told (Port, Binding)."""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from netplugin.errors import Problem

# Names become file names, OVSDB values and libvirt XML: the alphabet is closed here, once.
# (In pydantic's regex engine ``$`` is the end of the text, not of a line.)
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, strict=True)]
PortId = Name
# JSON has true and false: "no", 0 and the like are mistakes, not answers.
Flag = Annotated[bool, Field(strict=True)]
VlanId = Annotated[int, Field(ge=1, le=4094, strict=True)]
Kbps = Annotated[int, Field(ge=1, le=400_000_000, strict=True)]
RingSize = Literal[256, 512, 1024]


def _at_most(most: int) -> BeforeValidator:
    """Refuse a list that is too long before its entries are looked at: they may all be wrong."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) > most:
            raise ValueError(f"must have at most {most} entries")
        return value

    return BeforeValidator(check)


def _unicast(mac: str) -> str:
    mac = mac.lower()
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise ValueError("must be a unicast address that is not all zeros")
    return mac


Mac = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$", strict=True),
    AfterValidator(_unicast),
]


def _address(text: str) -> str:
    """An IPv4 or IPv6 address or prefix in its shortest form; host bits in a prefix are refused."""
    network = ipaddress.ip_network(text, strict=True)
    if network.is_multicast or network.prefixlen == 0:
        raise ValueError("must be a unicast address or a prefix of at least one bit")
    if network.version == 6 and int(network.network_address) >> 48 == 0:
        # RFC 4291, section 2.5: unspecified, loopback, IPv4-compatible and IPv4-mapped.
        raise ValueError("is an IPv6 address that is never on a wire (80 leading zero bits)")
    if network.prefixlen == network.max_prefixlen:
        return str(network.network_address)
    return str(network)


IpAddress = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9A-Fa-f.:]{2,45}(/[0-9]{1,3})?$", strict=True),
    AfterValidator(_address),
]
PciAddress = Annotated[
    str,
    StringConstraints(
        pattern=r"^[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7]$",
        to_lower=True,  # after the pattern
        strict=True,
    ),
]


class Value(BaseModel):
    """A value: frozen, and a field it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Network(Value):
    """The segment a port is on. ``mtu`` is in bytes, the layer-3 payload, the same on every hop.

    A ``vxlan`` network has its MTU from ``PUT /v1/networks``: a port need not say it again.
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


def _peer(text: str) -> str:
    """The address of another host, in its shortest form."""
    address = ipaddress.ip_address(text)
    if address.is_multicast or address.is_unspecified or address.is_loopback:
        raise ValueError("must be the unicast address of a host")
    return str(address)


PeerAddress = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9A-Fa-f.:]{2,45}$", strict=True),
    AfterValidator(_peer),
]


class NetworkSpec(Value):
    """What a VXLAN network is on every host (RFC 7348): what a port's spec cannot say.

    ``mtu`` is in bytes, the layer-3 payload of the VMs' frames. ``peers`` are the tunnel addresses
    of the hosts that have ports on it; this host's own may be among them and is passed over.
    """

    type: Literal["vxlan"]
    vni: Annotated[int, Field(ge=1, le=0xFFFFFF, strict=True)]
    peers: Annotated[tuple[PeerAddress, ...], Field(max_length=1024), _at_most(1024)] = ()
    udp_port: Annotated[int, Field(ge=1, le=65535, strict=True)] = 4789
    mtu: Annotated[int, Field(ge=576, le=9216, strict=True)] = 1450

    @model_validator(mode="after")
    def _one_set_of_peers(self) -> Self:
        if len(set(self.peers)) != len(self.peers):
            raise ValueError("peers: an address may stand there once")
        if len({ipaddress.ip_address(peer).version for peer in self.peers}) > 1:
            raise ValueError("peers: all must be IPv4 or all IPv6")
        return self


class NetworkInfo(Value):
    """A network as the agent knows it. ``ports`` counts this host's ports on it.

    ``errors`` are those of ports that a PUT could not bring along; the other ports are as asked.
    """

    network_id: Name
    spec: NetworkSpec
    #: The number that stands for the network within this host, 1 to 4094.
    local_vlan: int
    ports: int
    errors: tuple[Problem, ...] = ()


def _each_once(vlans: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(vlans)))


class VfOptions(Value):
    """What is asked of a virtual function (backends ``sriov`` and ``vdpa``).

    ``trusted``: the VM may set its MAC; ``sriov`` refuses it beside ``port_security.enabled``.
    ``vlan_proto``: the kind of tag that the NIC gives to the VM's frames, for ``network.vlan_id``;
    with 802.1ad the VM may send tagged frames, whose tags stay inside. ``trunk``: the VM of a flat
    network tags its frames itself, with any VLAN or with ``allowed_vlans`` alone, where the NIC can.
    """

    pci_address: PciAddress | None = None
    trusted: Flag = False
    spoofchk: Flag | None = None
    link_state: Literal["auto", "enable", "disable"] = "auto"
    vlan_qos: Annotated[int, Field(ge=0, le=7, strict=True)] = 0
    vlan_proto: Literal["802.1Q", "802.1ad"] = "802.1Q"
    trunk: Flag = False
    allowed_vlans: Annotated[
        tuple[VlanId, ...], Field(max_length=4094), _at_most(4094), AfterValidator(_each_once)
    ] = ()
    teaming: Flag = False


# claimed: a port has it; allocated: and its VM or OVS has it open; quarantined: it did not take its
# settings; stale: a port has it and it is not there any more; unusable: a VM cannot be given it.
VfState = Literal["available", "claimed", "allocated", "quarantined", "stale", "unusable"]


class VfInfo(Value):
    """A virtual function: its NIC, its state, and the port that has it; ``reason`` explains the state.

    ``max_queues``: it has no more pairs of queues, and may have fewer; the guest's driver opens them.
    ``left_out``: ``[sriov] devices`` says that it is not for ports.
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
    """What a NIC counted for one virtual function: ``rx`` is what the function receives."""

    rx_packets: int = 0
    tx_packets: int = 0
    rx_bytes: int = 0
    tx_bytes: int = 0
    rx_dropped: int = 0
    tx_dropped: int = 0


class Qos(Value):
    """Rates in kbit/s (1000 bit/s), seen from the VM: ingress is what it receives."""

    ingress_kbps: Kbps | None = None
    egress_kbps: Kbps | None = None
    min_egress_kbps: Kbps | None = None

    @model_validator(mode="after")
    def _least_within_most(self) -> Self:
        if self.egress_kbps and self.min_egress_kbps and self.min_egress_kbps > self.egress_kbps:
            raise ValueError("min_egress_kbps is above egress_kbps")
        return self


class AllowedAddress(Value):
    """An address (or prefix) the VM may send from; ``mac`` is the port's own where it is null."""

    ip: IpAddress
    mac: Mac | None = None


#: What a VM may be for its network beyond a host: it then sends what is else dropped.
Role = Literal["router", "dhcp_server"]


def _in_order(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    return tuple(sorted(set(roles)))


class PortSecurity(Value):
    """Anti-spoofing. Enabled without addresses: the VM may send from its own MAC only.

    ``roles``: a ``router`` may send IPv6 router advertisements and redirects (RFC 4861, 6105), a
    ``dhcp_server`` answers of DHCP servers (RFC 2131, 8415). Any other VM's are dropped.
    """

    enabled: Flag = True
    roles: Annotated[tuple[Role, ...], Field(max_length=2), AfterValidator(_in_order)] = ()
    allowed_addresses: Annotated[
        tuple[AllowedAddress, ...], Field(max_length=64), _at_most(64)
    ] = ()


class PortSpec(Value):
    """What a platform asks for: this VM's NIC, on this network, with this backend."""

    vm_id: Name
    mac: Mac
    backend: Name
    network: Network
    queues: Annotated[int, Field(ge=1, le=128, strict=True)] = 1
    rx_queue_size: RingSize = 1024
    tx_queue_size: RingSize = 1024
    numa_node: Annotated[int, Field(ge=0, le=1023, strict=True)] | None = None
    #: The user (by number) that the VM's QEMU runs as, if it has one of its own: no other QEMU can
    #: then reach the vhost-user socket. For backends that have one.
    qemu_user: Annotated[int, Field(ge=1, lt=2**32 - 1, strict=True)] | None = None
    vf: VfOptions = VfOptions()
    qos: Qos = Qos()
    port_security: PortSecurity = PortSecurity()

    @property
    def overlay_id(self) -> str | None:
        """The VXLAN network the port is on; None for any other type."""
        return self.network.network_id if self.network.type == "vxlan" else None


class PortState(StrEnum):
    """Where a port stands between what was asked and what the host has."""

    PENDING = "pending"  # asked for, not yet verified for the first time
    ACTIVE = "active"  # the host was read and is as asked
    DEGRADED = "degraded"  # as asked, but the host says it does not work (``error`` says what)
    REMOVING = "removing"  # being taken off the host
    FAILED = "failed"  # was active; the host could not be put right (``error`` says why)


class DomainRequirements(Value):
    """What a libvirt domain must have for this NIC to work."""

    shared_memory: bool = False
    hugepages: bool = False
    numa_node: int | None = None
    vfio: bool = False
    #: The user that QEMU runs as, who alone can reach the NIC's vhost-user socket; None: any of QEMU's.
    qemu_user: int | None = None


class Binding(BaseModel):
    """How the VM gets the NIC; beyond these fields a backend adds its own details."""

    model_config = ConfigDict(frozen=True, extra="allow")

    vif_type: str
    interface_xml: str
    domain_requirements: DomainRequirements = DomainRequirements()


class Port(BaseModel):
    """One port as the agent knows it; ``observed`` is what the host had at the last look."""

    port_id: PortId
    state: PortState
    spec: PortSpec
    binding: Binding | None = None
    observed: dict[str, Any] | None = None
    error: Problem | None = None
    timings_ms: dict[str, float] = {}
    #: The port whose VF this one stands beside (``vf.teaming``); it is that port's to change.
    standby_of: PortId | None = None


class PortFilter(Value):
    """Which ports to list: those that fit all that is given."""

    vm_id: Name | None = None
    state: PortState | None = None
    backend: Name | None = None


class BatchPut(Value):
    port_id: PortId
    spec: PortSpec


class Batch(Value):
    """Several ports in one call; each is answered on its own."""

    put: Annotated[tuple[BatchPut, ...], Field(max_length=4096), _at_most(4096)] = ()
    delete: Annotated[tuple[PortId, ...], Field(max_length=4096), _at_most(4096)] = ()

    @model_validator(mode="after")
    def _once_each(self) -> Self:
        ids = [entry.port_id for entry in self.put] + list(self.delete)
        if len(ids) != len(set(ids)):
            raise ValueError("a port_id may stand in a batch once")
        return self


class BatchResult(BaseModel):
    port_id: PortId
    status: int
    port: Port | None = None
    error: Problem | None = None


class BatchResults(BaseModel):
    results: list[BatchResult]


class Features(Value):
    """What a backend can do."""

    networks: tuple[Literal["flat", "vlan", "vxlan"], ...] = ()
    live_migration: bool = False
    #: Most rates each way; ``min_rate``: a least rate too.
    qos: bool = False
    min_rate: bool = False
    port_security: tuple[Literal["mac", "ip"], ...] = ()
    max_queues: int = 1
    needs_shared_memory: bool = False
    virtual_functions: bool = False
    #: Whether a virtio NIC may stand beside the VF (``vf.teaming``).
    teaming: bool = False


class BackendInfo(Value):
    """One backend of this host: usable, or the reason why not and the fix."""

    name: str
    usable: bool
    reason: str | None = None
    fix: str | None = None
    features: Features = Features()
    #: What the backend stands on here, such as versions and switches that change what it can do.
    facts: dict[str, str | int | bool] = {}


class Finding(Value):
    """Something about the host that an operator should know, with what would be right instead."""

    id: str
    status: Literal["ok", "warn", "fail"]
    found: str
    expected: str
    fix: str | None = None


class HostState(Value):
    """What the host is, as ``netplugin host facts`` has it: what cannot be read is an object with the
    reason (``unknown``) and the file (``path``)."""

    facts: dict[str, Any]
    #: What running daemons say: OVS, libvirt.
    live: dict[str, Any]


# -- PMD threads of OVS and their receive queues --------------------------------------------------

Cpu = Annotated[int, Field(ge=0, le=8191, strict=True)]
Percent = Annotated[int, Field(ge=0, le=100, strict=True)]
#: The name of an OVS interface: whatever OVS takes, as long as it can be printed and has no spaces.
OvsPortName = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$", strict=True)]
QueueId = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,3})$", strict=True)]
#: CPUs by queue by port; null is no pinning.
Affinity = dict[OvsPortName, dict[QueueId, Cpu | None]]
CpuList = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$", max_length=1024),
]


class RxQueue(Value):
    """One receive queue and the share of its PMD thread's CPU it takes (percent; null: not measured yet)."""

    port: str
    queue: int
    enabled: bool
    usage_percent: int | None
    #: The CPU it is pinned to by ``pmd-rxq-affinity``, whether a PMD thread runs there or not.
    pinned_to: int | None = None
    #: Of the port's device or of the VM's memory; null where OVS does not say.
    port_numa_node: int | None = None
    numa_mismatch: bool = False


class PmdCore(Value):
    """One PMD thread. ``isolated``: it polls pinned queues and no others.

    Counts and what is made of them are since the thread started or its statistics were cleared, or
    of the interval that was asked for. Null: not measured, or nothing to divide by.
    """

    cpu: int
    numa_node: int
    isolated: bool
    busy_percent: float | None
    queues: tuple[RxQueue, ...]
    #: What it takes to poll queues and is no queue's own, of ``usage_seconds``.
    overhead_percent: int | None = None
    packets: int | None = None
    #: Of the time stamp counter: all of them, and those of polls that had packets.
    cycles_per_packet: float | None = None
    processing_cycles_per_packet: float | None = None
    #: Packets without a flow in the datapath, and those of them that were lost.
    upcalls: int | None = None
    lost_upcalls: int | None = None


class AutoLoadBalance(Value):
    """OVS's own: queues move if a thread is above the load, and the variance improves by as much."""

    enabled: bool = False
    load_threshold: int = 95
    improvement_threshold: int = 25
    interval_minutes: int = 1


class PmdSettings(Value):
    """``other_config`` of Open_vSwitch for PMD threads, as OVS takes it; null: not set.

    ``rxq_isolate``: pinning a queue takes its thread from all queues that are not pinned.
    """

    mask: str | None = None
    rxq_assign: str = "cycles"
    rxq_isolate: bool = True
    auto_load_balance: AutoLoadBalance = AutoLoadBalance()
    sleep_max: str | None = None


class UnpolledQueue(Value):
    """A receive queue that no PMD thread polls."""

    port: str
    queue: int


class PmdChoice(Value):
    """One physical core that was chosen for PMD threads: its CPUs that have one, and why."""

    cpus: str
    numa_node: int
    reason: str


class PmdState(Value):
    """The CPUs for PMD threads (``cpus``, a list like ``2-5,8``) and the threads that run (``cores``).

    A CPU is a hardware thread, a core a physical core. ``chosen`` is in the answer to a ``count`` alone.
    """

    cpus: str
    cores: tuple[PmdCore, ...]
    settings: PmdSettings = PmdSettings()
    #: Of how many seconds the usage of queues is; OVS counts in steps of 5.
    usage_seconds: int | None = None
    #: The interval that was measured, in seconds; null: all since the threads started.
    interval_s: float | None = None
    unpolled: tuple[UnpolledQueue, ...] = ()
    chosen: tuple[PmdChoice, ...] = ()


class PmdInterval(Value):
    """Measure anew, for so many seconds."""

    interval: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] | None = None


class ProposedQueue(Value):
    """Where a receive queue is and should be; ``proposed_cpu`` null: it idles, and OVS may choose."""

    port: str
    queue: int
    load_percent: int
    port_numa_node: int | None
    cpu: int
    proposed_cpu: int | None


class PmdLoads(Value):
    """What queues take of the PMD threads: of the fullest, the variance, and queues on wrong nodes."""

    largest_percent: int
    variance: int
    numa_mismatches: int


class AutoLoadBalanceView(Value):
    """What OVS's own assignment would bring. ``acts``: it would move queues by itself, if enabled.

    ``preferred``: it does as well as the proposal, and goes on doing so when the traffic changes.
    """

    enabled: bool
    possible: bool
    #: Why it is not possible, or would not act.
    reason: str | None
    expected: PmdLoads
    improvement_percent: int
    acts: bool
    preferred: bool


class PmdAdvice(Value):
    """What no assignment can mend, or what would do better than pinning."""

    id: Literal["not-measured", "auto-load-balance", "more-queues", "more-cores", "fewer-queues"]
    text: str


class PmdProposal(Value):
    """An assignment of queues to PMD threads that makes the fullest less full; empty: none is better.

    ``affinity`` and ``settings`` are what ``PUT /v1/pmd`` with ``proposed`` writes.
    """

    moves: int
    now: PmdLoads
    proposed: PmdLoads
    improvement_percent: int
    queues: tuple[ProposedQueue, ...]
    affinity: dict[str, dict[str, int | None]]
    settings: dict[str, str]
    auto_load_balance: AutoLoadBalanceView
    advice: tuple[PmdAdvice, ...]


class AutoLoadBalanceRequest(Value):
    """What to change of OVS's own balancing; what is not given stays."""

    enabled: Flag | None = None
    load_threshold: Percent | None = None
    improvement_threshold: Percent | None = None
    interval_minutes: Annotated[int, Field(ge=1, le=20_000, strict=True)] | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not any(value is not None for value in dict(self).values()):
            raise ValueError("nothing to change")
        return self


class PmdRequest(Value):
    """Set where PMD threads run (``cpus``, or ``count`` of them), pin queues to them, balance them.

    ``count`` is the number of threads, one on each physical core; with ``siblings`` both CPUs of a core
    have one. The agent chooses: on the nodes of NICs and VMs, and no core that a VM has.

    ``clear_affinity`` takes away the pinnings of these ports before those of ``affinity`` are set;
    ``proposed`` sets what ``GET /v1/pmd/proposal`` says.
    """

    cpus: CpuList | None = None
    count: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    siblings: Flag = False
    affinity: Annotated[Affinity, Field(max_length=1024)] | None = None
    clear_affinity: Annotated[tuple[OvsPortName, ...], Field(max_length=1024), _at_most(1024)] = ()
    clear_all_affinity: Flag = False
    auto_load_balance: AutoLoadBalanceRequest | None = None
    proposed: Flag = False

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        cores = self.cpus is not None or self.count is not None
        if self.cpus is not None and self.count is not None:
            raise ValueError("give either cpus or count")
        if self.siblings and self.count is None:
            raise ValueError("siblings goes with count")
        pins = bool(self.affinity or self.clear_affinity or self.clear_all_affinity)
        if self.proposed and (cores or pins):
            raise ValueError("proposed goes with neither cpus nor count nor affinity")
        if not (cores or pins or self.proposed or self.auto_load_balance is not None):
            raise ValueError("nothing to set")
        return self


class ReconcileRequest(Value):
    """``remove_orphans`` allows marked objects without an intent to be removed after a lost store."""

    dry_run: Flag = False
    remove_orphans: Flag = False


class PlannedChange(Value):
    """One change of a plan: what it is, whose it is, and in a sentence what it does."""

    backend: str
    change: str
    ports: tuple[str, ...]
    detail: str


class ReconcileReport(BaseModel):
    """What a reconcile found and, without ``dry_run``, did."""

    dry_run: bool
    ports: int
    changes: list[PlannedChange]
    orphans_kept: list[str] = []
    errors: list[Problem] = []


class DomainPolicy(Value):
    """How a domain is placed. ``pin``: each vCPU on a CPU of its own, by the host's plan; ``realtime``: that,
    and what real time needs beside; ``numa_node``: where it is to be."""

    pin: Flag = False
    realtime: Flag = False
    numa_node: Annotated[int, Field(ge=0, le=1023, strict=True)] | None = None


class RenderRequest(Value):
    """A libvirt domain to complete with the VM's interfaces and what they need."""

    xml: Annotated[str, StringConstraints(max_length=1_000_000)]
    policy: DomainPolicy = DomainPolicy()


class CheckRequest(Value):
    """A libvirt domain as it is, to be looked at."""

    xml: Annotated[str, StringConstraints(max_length=1_000_000)]


class RenderedDomain(Value):
    xml: str


class TaskState(StrEnum):
    ACCEPTED = "accepted"  # journalled, not yet carried out
    DONE = "done"  # carried out, the result not yet delivered
    DELIVERED = "delivered"
    EXPIRED = "expired"  # the callback could not be reached within the time the operator set


class Task(BaseModel):
    """A journalled asynchronous call and its result."""

    taskuuid: str
    state: TaskState
    attempts: int
    result: dict[str, Any] | None
