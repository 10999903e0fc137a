"""What only some backends have: optional protocols in addition to ``netplugin.backend.Backend``.

A backend implements one by inheriting it or by having its methods. The agent looks once, with
``Extras.of``; each protocol says what the agent does without it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from netplugin.api.errors import NetpluginError
from netplugin.api.models import Features, Finding, VfCounters, VfInfo
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Backend, Claim, Intent, Observation, ObservedPort
from netplugin.counters import Readings

ObservationT = TypeVar("ObservationT", bound=Observation, contravariant=True)


@runtime_checkable
class NeedsClaims(Protocol[ObservationT]):
    """Its ports need scarce resources. Without it, a plug does not observe the host before the commit."""

    @abstractmethod
    def claims(self, intent: Intent, observed: ObservationT, taken: Mapping[Claim, str]) -> tuple[Claim, ...]:
        """Choose the scarce resources that the intent needs (pure, but for what only the spec names: whether
        there is a file at a path).

        ``taken`` maps claims to their owners. The agent stores the claims in the same transaction
        as the intent. A claim is released when an intent is committed that no longer needs it,
        which is before the host is cleaned up. Therefore choose only resources that are free in
        ``observed`` as well (it must hold the whole pool), and prefer those that the host already
        uses for this port. Claims of ``NOBODY`` in ``taken`` are quarantined, or changed owner
        after the observation.

        Raises: CapacityExhausted.
        """


@runtime_checkable
class FindsPortsByClaims(Protocol[ObservationT]):
    """Objects of its ports cannot carry a mark. Without it, a port's state is in ``Observation.ports``."""

    @abstractmethod
    def observed_ports(self, intents: Sequence[Intent], observed: ObservationT) -> Mapping[str, ObservedPort]:
        """The state of these ports on the host, identified by their claims (pure)."""


@runtime_checkable
class HasVfs(Protocol[ObservationT]):
    """It manages a pool of virtual functions. Without it, the backend has no part in ``GET /v1/vfs``,
    quarantines and the metrics of VFs."""

    @abstractmethod
    def vfs(
        self, observed: ObservationT, taken: Mapping[Claim, str], unfit: Mapping[Claim, str]
    ) -> Sequence[VfInfo]:
        """All virtual functions of the pool with their states (pure).

        ``unfit`` are the quarantined ones, with the reasons. Backends that share a pool return the
        same list.
        """

    @abstractmethod
    def out_of_order(self, observed: ObservationT) -> Collection[str]:
        """The PCI addresses of virtual functions whose NIC has failed (pure).

        They cannot be used for any port now; their quarantine ends when the NIC recovers.
        """

    @abstractmethod
    def counters(self, claims: Sequence[Claim]) -> Mapping[Claim, VfCounters]:
        """The NIC's counters of the virtual functions among these claims (any thread).

        Functions that cannot be read now, or whose NIC has no counters, are left out.
        """


@runtime_checkable
class HasCounters(Protocol):
    """It counts what its ports carry and lose. Without it, they have no counters."""

    @abstractmethod
    def port_counters(self, intents: Sequence[Intent], deadline: float) -> Readings:
        """What the host has counted of all these ports and of their uplinks (any thread).

        With few requests to the host, whatever the number of ports. Ports that cannot be read are left out.

        Raises: HostError, BackendUnavailable, OperationTimeout.
        """


@runtime_checkable
class HasLocalVlans(Protocol):
    """It isolates VXLAN networks by local VLANs. Without it, it uses no number on the host."""

    @abstractmethod
    def held_vlans(self) -> Mapping[int, str]:
        """The networks present on the host by local VLAN, independent of the store.

        After the store was lost, a network keeps its local VLAN and gets none that another one
        uses. Quick, callable from any thread.

        Raises: BackendUnavailable while the state of the host is unknown.
        """


@runtime_checkable
class HasFindings(Protocol[ObservationT]):
    """It checks its part of the host. Without it, ``GET /v1/host/checks`` has its ports' faults only."""

    @abstractmethod
    def findings(self, intents: Sequence[Intent], observed: ObservationT) -> Sequence[Finding]:
        """Findings that are not the fault of a single port (pure).

        For example that one link of a bond carries all traffic, or that a NIC does not enforce the
        rates of some ports. ``intents`` are all ports of the backend, and ``observed`` covers the
        whole host.
        """


@runtime_checkable
class OffersFeatures(Protocol):
    """Its features depend on the devices of the host. Without it, the agent reports ``features``."""

    @abstractmethod
    def offered(self) -> Features:
        """The features on this host, for ``GET /v1/backends``. Quick, never raises."""


@runtime_checkable
class HasFacts(Protocol):
    """Versions or switches of the host affect it. Without it, ``facts`` of ``GET /v1/backends`` is empty."""

    @abstractmethod
    def facts(self) -> Mapping[str, str | int | bool]:
        """Facts about the host that affect the backend. Quick, never raises."""


@runtime_checkable
class FollowsConnections(Protocol):
    """It knows when a VM connects to its port. Without it, there are no ``connection`` events."""

    @abstractmethod
    def follow_connections(self, tell: Callable[[str, bool], None]) -> None:
        """Call ``tell`` with the id of a port, and whether a VM is connected to it and its driver ready.

        First for all known ports, then for each change, from any thread; ``tell`` returns at once.
        """


@runtime_checkable
class UsesPhysicalNetworks(Protocol[ObservationT]):
    """Physical networks come and go while it runs. Without it, the backend has those of its own options.

    It adds those of its options to ``Host.networks``, and reads those that the API made from there. A
    plan uses the networks that there were when the host was observed.
    """

    #: The fields of a ``PhysicalNetworkSpec`` that it uses, and whether it does what ``keep`` says there.
    network_parts: ClassVar[Mapping[str, bool]]

    @abstractmethod
    def check_network(self, name: str, spec: PhysicalNetworkSpec) -> None:
        """Refuse a network that the host cannot have, before it is stored. Quick, from any thread.

        Raises: InvalidRequest naming the field, Conflict.
        """

    # The rest is for a backend that does what ``keep`` says.

    def network_faults(self, observed: ObservationT) -> Mapping[str, NetpluginError]:
        """The networks that the API made and that are not on the host as they should be (pure).

        ``observed`` covers the whole host. The faults of ports are not repeated.
        """
        return {}

    def network_remains(self, name: str, observed: ObservationT) -> Sequence[str]:
        """What ``observed``, the whole host, still has of a network that was kept and is deleted (pure)."""
        return ()

    def network_holders(self, name: str) -> Sequence[str]:
        """What else uses the bridge of this network: VXLAN networks whose tunnels leave by it, ports
        of others, and addresses of the host on it. Quick, from any thread.

        Raises: HostError, OperationTimeout.
        """
        return ()


@runtime_checkable
class Migrates(Protocol):
    """Its ports may be closed (``Intent.closed``) and announced. Without it, they are not migrated.

    Such a backend says ``features.live_migration``, and by ``OffersFeatures`` whether new ports have it.
    """

    #: Whether nothing is forwarded from or to a port while no guest runs behind it, without the agent.
    #: Otherwise the agent keeps it closed until the guest runs.
    shut_without_guest: ClassVar[bool]

    def check_migration(self, intent: Intent) -> None:
        """Refuse to migrate this port: one that is there, or (without claims) one that would be made. Quick.

        Raises: Unsupported.
        """

    def follow_guest(self, intent: Intent) -> None:
        """Wake the agent when the guest of this port starts or stops to run here, from now on; or not any
        more (``Intent.follows_guest``). A backend that wakes it in any case has nothing to do.
        """

    def hand_over(self, intents: Sequence[Intent], deadline: float) -> None:
        """Ask the hosts that wait for these VMs to announce them: their guests have stopped here, and the
        ports are not closed yet. A backend whose ports are announced in time without it does nothing.

        Raises: as ``announce``.
        """

    @abstractmethod
    def announce(self, intents: Sequence[Intent], deadline: float) -> None:
        """Tell the network that the MACs of these ports are here: by frames that the VM could have sent.

        Raises: HostError, BackendUnavailable, OperationTimeout.
        """


@dataclass(frozen=True)
class Extras:
    """The backend as each optional protocol that it implements, else None."""

    claims: NeedsClaims[Observation] | None
    by_claims: FindsPortsByClaims[Observation] | None
    vfs: HasVfs[Observation] | None
    counters: HasCounters | None
    local_vlans: HasLocalVlans | None
    findings: HasFindings[Observation] | None
    features: OffersFeatures | None
    facts: HasFacts | None
    connections: FollowsConnections | None
    networks: UsesPhysicalNetworks[Observation] | None
    migrates: Migrates | None

    @classmethod
    def of(cls, backend: Backend[Any]) -> Extras:
        """Ask once and keep the result: ``isinstance`` of a protocol inspects each of its methods."""
        return cls(
            backend if isinstance(backend, NeedsClaims) else None,
            backend if isinstance(backend, FindsPortsByClaims) else None,
            backend if isinstance(backend, HasVfs) else None,
            backend if isinstance(backend, HasCounters) else None,
            backend if isinstance(backend, HasLocalVlans) else None,
            backend if isinstance(backend, HasFindings) else None,
            backend if isinstance(backend, OffersFeatures) else None,
            backend if isinstance(backend, HasFacts) else None,
            backend if isinstance(backend, FollowsConnections) else None,
            backend if isinstance(backend, UsesPhysicalNetworks) else None,
            backend if isinstance(backend, Migrates) else None,
        )
