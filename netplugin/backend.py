"""The contract of a backend: the same small set of members for all, pure thinking apart from doing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from netplugin.errors import (
    BackendUnavailable,
    FieldError,
    InvalidRequest,
    NetpluginError,
    Unsupported,
)
from netplugin.models import (
    Binding,
    Features,
    Finding,
    NetworkSpec,
    PortSpec,
    Qos,
    VfCounters,
    VfInfo,
    VfOptions,
)

#: What a frame has beyond its layer-3 payload: addresses, type and one VLAN tag (IEEE 802.3, 802.1Q).
_ETHERNET_BYTES = 18


#: Holds a claim that no port has and none may take.
NOBODY = ""


@dataclass(frozen=True)
class Claim:
    """A scarce thing a port takes, for example kind ``vf``, key ``0000:03:10.1``.

    ``memory`` (values as in JSON) is what must be known later to give the thing back as it was. It
    is committed with the claim, which is before the host is touched; it is no part of its identity.
    """

    kind: str
    key: str
    memory: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True)
class Overlay:
    """A VXLAN network: what the platform said of it, and its number within this host.

    ``local_vlan`` (1 to 4094) is claimed in the store for as long as the network is there.
    """

    network_id: str
    spec: NetworkSpec
    local_vlan: int


@dataclass(frozen=True)
class Intent:
    """What is wanted of one port: its spec and claims, or (``spec`` None) that it be gone.

    ``overlay`` is the network of a ``vxlan`` port, and None for any other. ``stamp`` is the mark of
    the store for this port, to be written with the port's own mark; empty: there is none to write.
    """

    port_id: str
    spec: PortSpec | None
    claims: tuple[Claim, ...] = ()
    overlay: Overlay | None = None
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class ObservedPort:
    """What the host has of one port. ``fault`` is the host's own word that it does not work.

    ``stamp`` is the mark of the store that made it, empty if it carries none. ``impaired`` says what
    does not work beyond the port (a cable): the port is ``degraded``, and plugging it succeeds.
    ``passes``: the fault is likely to end in a moment, so that a call waits for that.
    """

    fault: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    stamp: str = ""
    impaired: str | None = None
    passes: bool = False


@dataclass(frozen=True)
class Observation:
    """What a backend saw of the host: one entry for each port that is there and carries our mark.

    A backend subclasses it with whatever else its ``plan`` needs.
    """

    ports: Mapping[str, ObservedPort]
    #: Milliseconds spent waiting for parts of the host, by part.
    timings_ms: Mapping[str, float] = field(default_factory=dict, kw_only=True, compare=False)
    #: Of a look at the whole host: the mark of the store that changed it last (``Host.mark``), empty
    #: if it carries none.
    store_mark: str = field(default="", kw_only=True, compare=False)


@dataclass(frozen=True)
class Change:
    """One step towards the intent, as data: it can be shown, tested and applied.

    ``ports`` are those it is made for: if it fails, it has failed for each of them.
    """

    ports: tuple[str, ...]

    @property
    def thing(self) -> Claim | None:
        """What is not fit for use if the change was made and is not there when it is read back."""
        return None

    def describe(self) -> str:
        """One sentence without the port: ``create bridge br-phys1``."""
        values = (f"{k}={v}" for k, v in vars(self).items() if k != "ports" and v is not None)
        return f"{type(self).__name__} {' '.join(values)}".rstrip()


@dataclass(frozen=True)
class Plan:
    """Changes in the order to apply them, and the ports that cannot be had, each with the reason."""

    changes: tuple[Change, ...] = ()
    refused: Mapping[str, NetpluginError] = field(default_factory=dict)
    #: Live ports that keep what they have though the configuration says otherwise, each with why.
    #: What does not depend on it (the filter, the rates) is seen to; the port is ``degraded``.
    kept: Mapping[str, NetpluginError] = field(default_factory=dict)

    def touches(self, port_id: str) -> bool:
        return any(port_id in change.ports for change in self.changes)


@dataclass(frozen=True)
class Applied:
    """What became of the changes: the ports that failed, and the milliseconds spent in each part.

    ``unfit`` are claimed things that did not take what others of their kind take, each with the
    words for it: they are quarantined, which means that no port gets them any more.
    """

    failed: Mapping[str, NetpluginError] = field(default_factory=dict)
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    unfit: Mapping[Claim, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Usability:
    """Whether a backend can be used on this host now; if not, the reason and the fix."""

    usable: bool
    reason: str | None = None
    fix: str | None = None
    step: str = "probe"

    @staticmethod
    def without(missing: NetpluginError) -> Usability:
        """Not usable, for the reason that the error has."""
        return Usability(False, missing.detail, missing.fix, missing.step)

    def problem(self) -> BackendUnavailable | None:
        """The error for what cannot be used; None if it can."""
        if self.usable:
            return None
        return BackendUnavailable(str(self.reason), step=self.step, fix=self.fix)

    def require(self) -> None:
        """Raises: BackendUnavailable unless it can be used."""
        if problem := self.problem():
            raise problem


@dataclass(frozen=True)
class Wake:
    """Why a backend asks for a reconcile: of these ports, or (``ports`` None) of all of its own."""

    reason: str
    ports: frozenset[str] | None = None


ObservationT = TypeVar("ObservationT", bound=Observation)


class Backend(ABC, Generic[ObservationT]):
    """A way to give a VM its NIC. Found by its entry point in the group ``netplugin.backends``.

    An instance is made with the options (``oslo.config``) and is used from one thread at a time,
    but for ``probe``, ``validate`` and ``binding``, which any thread may call.
    """

    name: ClassVar[str]
    features: ClassVar[Features]
    #: Fields of PortSpec that cannot change on a live port: a PUT that does is a ``conflict``.
    fixed_fields: ClassVar[frozenset[str]] = frozenset({"vm_id", "mac", "backend"})

    def hold(self) -> Usability:
        """Take what only one agent at a time may work at (an OVSDB, a network namespace, NICs), or say
        who has it. Quick, never raises, and from any thread.

        The agent calls it before it looks at the host and before it answers for it: unless it is
        usable, nothing is observed for a plan and nothing is applied. What was taken is kept until
        ``close``. A backend that has a part of it is usable and leaves the rest as it is.
        """
        return Usability(True)

    @abstractmethod
    def probe(self) -> Usability:
        """Whether the backend can be used now, from what is known: quick, and never raises."""

    def validate(self, spec: PortSpec) -> None:
        """Refuse what cannot be honoured, before anything is stored.

        Here: what ``features`` rules out. A backend calls this and adds what else it knows.

        Raises: Unsupported, InvalidRequest, BackendUnavailable.
        """
        refusals = {
            f"network.type {spec.network.type}": spec.network.type not in self.features.networks,
            f"queues above {self.features.max_queues}": spec.queues > self.features.max_queues,
            "qos": spec.qos != Qos() and not self.features.qos,
            "qos.min_egress_kbps": spec.qos.min_egress_kbps is not None
            and not self.features.min_rate,
            "vf.teaming": spec.vf.teaming
            and self.features.virtual_functions
            and not self.features.teaming,
            "qemu_user (it is for vhost-user sockets)": spec.qemu_user is not None
            and not (self.features.needs_shared_memory or spec.vf.teaming),
            "vf (it is for the backends sriov and vdpa)": spec.vf != VfOptions()
            and not self.features.virtual_functions,
        }
        asked = [what for what, refused in refusals.items() if refused]
        if asked:
            raise Unsupported(
                f"backend {self.name} has no {', no '.join(asked)}", step="validate",
                fix="see the backend's features: GET /v1/backends",
            )  # fmt: skip
        _refuse_useless_rates(spec)

    @abstractmethod
    def observe(self, ports: Collection[str] | None, deadline: float) -> ObservationT:
        """Read what the host has of these ports, or (None) of all ports that carry our mark.

        ``deadline`` is of ``time.monotonic``.

        Raises: BackendUnavailable if the host cannot be read, HostError, OperationTimeout.
        """

    def read_back(
        self,
        seen: ObservationT,
        changes: Sequence[Change],
        ports: Collection[str] | None,
        deadline: float,
    ) -> ObservationT:
        """Observe again after ``apply``: all that the changes touched must be read anew.

        What they did not touch may be as it was ``seen`` before them.

        Raises: as ``observe``.
        """
        return self.observe(ports, deadline)

    def claims(
        self, intent: Intent, observed: ObservationT, taken: Mapping[Claim, str]
    ) -> tuple[Claim, ...]:
        """Choose the scarce things the intent takes (pure); ``taken`` tells who has which.

        The agent stores them in the transaction that stores the intent. A claim is given back when
        the intent that no longer needs it is committed, which is before the host has let go: choose
        only what ``observed`` (which must hold the whole pool) shows free too, and first what the
        host already has for this port. What is in ``taken`` as ``NOBODY``'s is quarantined, or has
        changed hands since it was observed.

        Raises: CapacityExhausted.
        """
        return ()

    @abstractmethod
    def plan(self, intents: Sequence[Intent], observed: ObservationT) -> Plan:
        """The changes that lead from what was observed to what is wanted (pure).

        Planning after applying gives no changes; the order of the intents does not matter; no
        change touches what does not carry our mark.
        """

    @abstractmethod
    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        """Make the changes, before ``deadline`` (``time.monotonic``). Never raises for one port.

        What could not be done for a port is in ``failed``; its neighbours go through.
        """

    @abstractmethod
    def binding(self, intent: Intent) -> Binding:
        """The interface XML and what the domain must have (pure)."""

    def observed_ports(
        self, intents: Sequence[Intent], observed: ObservationT
    ) -> Mapping[str, ObservedPort]:
        """What the host has of these ports (pure).

        For ports whose things on the host can carry no mark, and are known by their claims alone.
        """
        return observed.ports

    def vfs(
        self, observed: ObservationT, taken: Mapping[Claim, str], unfit: Mapping[Claim, str]
    ) -> Sequence[VfInfo]:
        """Every virtual function of the pool, and where it stands (pure).

        ``unfit`` are those in quarantine, with the reasons. Backends that share a pool say the same.
        """
        return ()

    def out_of_order(self, observed: ObservationT) -> Collection[str]:
        """The virtual functions that no port can be served with now because their NIC is out of
        order, by PCI address (pure): a quarantine ends when that is over."""
        return ()

    def findings(self, observed: ObservationT) -> Sequence[Finding]:
        """What an operator should know of the host beside the ports (pure).

        For example that one link of a bond carries everything. ``observed`` is of the whole host.
        """
        return ()

    def port_findings(self, intents: Sequence[Intent], observed: ObservationT) -> Sequence[Finding]:
        """What an operator should know of what was asked for, as this host is (pure).

        For example that a NIC does not hold some ports to what they should be held to. No fault of
        a single port: that is in ``observed_ports``. ``intents`` are all ports of the backend.
        """
        return ()

    def counters(self, claims: Sequence[Claim]) -> Mapping[Claim, VfCounters]:
        """What the NICs counted for the virtual functions among these (any thread).

        Those that cannot be read now, or of NICs that do not count, are left out.
        """
        return {}

    def offered(self) -> Features:
        """The features as the devices of this host have them, for ``GET /v1/backends``: quick, and never
        raises. Here: those of every host."""
        return self.features

    def facts(self) -> Mapping[str, str | int | bool]:
        """What the backend stands on, for ``GET /v1/backends``: quick, and never raises."""
        return {}

    def held_vlans(self) -> Mapping[int, str]:
        """The networks that the host has now, by their local VLANs, whatever the store knows.

        A network that comes anew (after a lost store) keeps its number and takes none of another's.
        Quick, and from any thread.

        Raises: BackendUnavailable while it is not known what the host has.
        """
        return {}

    def watch(self, wake: Callable[[Wake], None]) -> None:
        """Start to tell, by calling ``wake`` from any thread, when the host moved by itself.

        The first call says that the host can be looked at; here it always can.
        """
        wake(Wake("the agent starts"))

    def close(self) -> None:
        """Give back connections and threads; the host stays as it is."""


def _refuse_useless_rates(spec: PortSpec) -> None:
    """A rate below one full frame a second lets no connection live: it is a mistake (bytes, Mbit?)."""
    least = -(-(spec.network.mtu + _ETHERNET_BYTES) * 8 // 1000)
    for name in ("ingress_kbps", "egress_kbps"):
        rate = getattr(spec.qos, name)
        if rate is not None and rate < least:
            message = f"{rate} kbit/s is not one frame of MTU {spec.network.mtu} a second, which is {least}"
            raise InvalidRequest(
                f"qos.{name}: {message}", step="validate",
                errors=[FieldError(field=f"qos.{name}", message=message)],
            )  # fmt: skip


def unknown_network(name: str | None, option: str, known: Collection[str]) -> InvalidRequest:
    """The error for a physical network that the operator has not put into ``option``."""
    message = f"{name!r} is not in {option} (known: {', '.join(sorted(known)) or 'none'})"
    return InvalidRequest(
        f"network.physical_network: {message}", step="validate",
        errors=[FieldError(field="network.physical_network", message=message)],
    )  # fmt: skip
