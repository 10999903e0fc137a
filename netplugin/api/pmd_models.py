"""The values of the API that are about PMD threads of OVS and their receive queues."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from netplugin.api.fields import Flag, Value, at_most, worded

Cpu = Annotated[int, Field(ge=0, le=8191, strict=True)]
Percent = Annotated[int, Field(ge=0, le=100, strict=True)]
#: An OVS interface name: any printable characters that OVS accepts, no spaces.
_PORT_NAME = worded(r"^[!-~]{1,128}$", "must be the name of an interface of OVS")
OvsPortName = Annotated[str, StringConstraints(pattern=_PORT_NAME, strict=True)]
_QUEUE = worded(r"^(0|[1-9][0-9]{0,3})$", "must be the number of a queue")
QueueId = Annotated[str, StringConstraints(pattern=_QUEUE, strict=True)]
#: port -> queue -> CPU; null removes the pinning.
Affinity = dict[OvsPortName, dict[QueueId, Cpu | None]]
CpuList = Annotated[
    str,
    StringConstraints(
        pattern=worded(r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$", "must be a list of CPUs such as 2-5,8"),
        max_length=1024,
    ),
]


class RxQueue(Value):
    """A receive queue of ``port``, an interface of OVS: that of the port ``port_id`` and its VM, or a NIC.

    ``usage_percent`` is its share of the PMD thread's CPU time; null: not measured yet.
    ``pinned_to`` is its CPU in ``pmd-rxq-affinity``. ``port_numa_node`` is the node of the NIC or
    of the VM's memory; null if OVS does not report it.
    """

    port: str
    queue: int
    enabled: bool
    usage_percent: int | None
    #: Its CPU in ``pmd-rxq-affinity``; a PMD thread need not run there.
    pinned_to: int | None = None
    #: The node of the NIC or of the VM's memory; null if OVS does not report it.
    port_numa_node: int | None = None
    numa_mismatch: bool = False
    port_id: str | None = None
    vm_id: str | None = None


class PmdCore(Value):
    """A PMD thread. ``isolated``: it polls pinned queues only.

    Counters and the values computed from them cover the time since the thread started or its
    statistics were cleared, or the requested interval. Null: not measured, or a division by zero.
    """

    cpu: int
    numa_node: int
    isolated: bool
    busy_percent: float | None
    queues: tuple[RxQueue, ...]
    #: CPU time spent on polling that belongs to no queue, over ``usage_seconds``.
    overhead_percent: int | None = None
    packets: int | None = None
    #: TSC cycles: all of them, and only those of polls that returned packets.
    cycles_per_packet: float | None = None
    processing_cycles_per_packet: float | None = None
    #: Packets that missed the datapath flow table, and those of them that were lost.
    upcalls: int | None = None
    lost_upcalls: int | None = None


class AutoLoadBalance(Value):
    """The PMD auto load balancing of OVS.

    OVS reassigns the queues if the load of a thread exceeds ``load_threshold`` (percent) and the
    variance improves by at least ``improvement_threshold`` (percent).
    """

    enabled: bool = False
    load_threshold: int = 95
    improvement_threshold: int = 25
    interval_minutes: int = 1


class PmdSettings(Value):
    """The PMD settings in ``other_config`` of the Open_vSwitch table, with the names of OVS; null:
    not set.

    ``rxq_isolate``: a thread with a pinned queue polls no queues that are not pinned.
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
    port_id: str | None = None
    vm_id: str | None = None


class PmdChoice(Value):
    """A physical core chosen for PMD threads: its CPUs that run one, and the reason."""

    cpus: str
    numa_node: int
    reason: str


class PmdState(Value):
    """The CPUs for PMD threads and the running threads.

    ``cpus`` is a list such as ``2-5,8``. A CPU is a hardware thread; each entry of ``cores`` is the
    PMD thread of one CPU. ``chosen`` is set only in the response to a request with ``count``.
    """

    cpus: str
    cores: tuple[PmdCore, ...]
    settings: PmdSettings = PmdSettings()
    #: The period of ``usage_percent`` in seconds; OVS measures in steps of 5 s.
    usage_seconds: int | None = None
    #: The measured interval in seconds; null: since the threads started.
    interval_s: float | None = None
    unpolled: tuple[UnpolledQueue, ...] = ()
    chosen: tuple[PmdChoice, ...] = ()


class PmdInterval(Value):
    """Measure over this interval, in seconds."""

    interval: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] | None = None


class ProposedQueue(Value):
    """The current and the proposed CPU of a receive queue; ``proposed_cpu`` null: idle, OVS may assign it."""

    port: str
    queue: int
    load_percent: int
    port_numa_node: int | None
    cpu: int
    proposed_cpu: int | None
    port_id: str | None = None
    vm_id: str | None = None


class PmdLoads(Value):
    """The load of the PMD threads: the busiest thread, the variance, and the queues on a remote NUMA node."""

    largest_percent: int
    variance: int
    numa_mismatches: int


class AutoLoadBalanceView(Value):
    """The expected effect of OVS's own queue assignment.

    ``acts``: auto load balancing would move queues if enabled. ``preferred``: it is as good as the
    proposal and adapts when the traffic changes.
    """

    enabled: bool
    possible: bool
    #: Why it is not possible, or would not move queues.
    reason: str | None
    expected: PmdLoads
    improvement_percent: int
    acts: bool
    preferred: bool


class PmdAdvice(Value):
    """A problem that no assignment solves, or a better solution than pinning."""

    id: Literal[
        "not-measured", "auto-load-balance", "more-queues", "more-cores", "fewer-queues", "spread-flows"
    ]
    text: str


class PmdProposal(Value):
    """A better assignment of queues to PMD threads; empty if there is none.

    It lowers the load of the busiest thread. ``affinity`` and ``settings`` are the values that
    ``PUT /v1/pmd`` with ``proposed`` writes.
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
    """Changes to the PMD auto load balancing of OVS; fields that are not given keep their values."""

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
    """Set the CPUs of PMD threads (``cpus`` or ``count``), pin queues to them, or balance the load.

    ``count`` is the number of threads, one per physical core; with ``siblings`` both CPUs of a core
    run one. The agent chooses the cores: on the NUMA nodes of NICs and VMs, and none that a VM
    uses.

    ``clear_affinity`` removes the pinnings of these ports before ``affinity`` is applied.
    ``proposed`` applies the result of ``GET /v1/pmd/proposal``.
    """

    cpus: CpuList | None = None
    count: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    siblings: Flag = False
    affinity: Annotated[Affinity, Field(max_length=1024)] | None = None
    clear_affinity: Annotated[tuple[OvsPortName, ...], Field(max_length=1024), at_most(1024)] = ()
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
