"""The contract of a backend.

Pure methods decide (``plan``, ``binding``); others read (``observe``) or change (``apply``) the
host. ``netplugin.optional`` has what only some backends need, such as claims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from netplugin.api.errors import Conflict, InvalidRequest, NetpluginError, Unsupported
from netplugin.api.models import (
    Binding,
    Features,
    NetworkSpec,
    PortSpec,
)
from netplugin.data_path import DataPath
from netplugin.host.usability import Usability, Wake

#: Frame size minus the layer-3 payload: addresses, type and one VLAN tag (IEEE 802.3, 802.1Q).
_ETHERNET_BYTES = 18


#: The owner of claims that belong to no port and must not be assigned.
NOBODY = ""


@dataclass(frozen=True)
class Claim:
    """A limited resource assigned to a port, for example kind ``vf``, key ``0000:03:10.1``.

    ``memory`` (JSON values) is what is needed later to restore the original state of the resource.
    It is committed with the claim, before the host is changed, and is not part of the claim's
    identity.
    """

    kind: str
    key: str
    memory: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True)
class Overlay:
    """A VXLAN network: the spec from the platform, and its local VLAN on this host.

    ``local_vlan`` (1 to 4094) is claimed in the store as long as the network exists.
    """

    network_id: str
    spec: NetworkSpec
    local_vlan: int


class TeamVf(Enum):
    """The VF of a VM that has a port as its standby: a virtio NIC with the same MAC.

    ``IN_USE``: the VM has the VF, or is about to get it, so frames for the MAC are to be left to the VF.
    ``UNKNOWN``: not seen yet, so what the host does with them stays.
    """

    NONE = "none"
    UNKNOWN = "unknown"
    IN_USE = "in use"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Intent:
    """The desired state of a port: its spec and claims, or (``spec`` None) its removal.

    What a backend gets may have more fields, which are the agent's own.
    ``overlay`` is the network of a ``vxlan`` port, None for other types. ``stamp`` identifies the
    store and the commit of the port's record; it is written to the host with the mark of the port.
    If empty, nothing is written. ``closed``: everything of the port is there, and nothing is forwarded
    from or to it (its VM runs on another host). ``follows_guest``: it is closed until its VM runs here,
    which the backend reports (``ObservedPort.guest``).
    ``team_vf``: of the VM, if this port is a standby.
    """

    port_id: str
    spec: PortSpec | None
    claims: tuple[Claim, ...] = ()
    overlay: Overlay | None = None
    stamp: str = ""
    closed: bool = False
    follows_guest: bool = False
    team_vf: TeamVf = TeamVf.NONE


@dataclass(frozen=True, slots=True)
class ObservedPort:
    """The state of one port on the host. ``fault`` is the error that the host reports for it.

    ``stamp`` identifies the store and the record that made it, empty if it has none. ``impaired`` is a
    fault outside the port (such as no link): plugging succeeds, and the port is ``degraded``.
    ``passes``: the fault is likely to be temporary, so a call waits for it to clear. ``guest``:
    whether a guest runs behind the port, as far as the host shows it; None: it does not.
    """

    fault: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    stamp: str = ""
    impaired: str | None = None
    passes: bool = False
    guest: bool | None = None


@dataclass(frozen=True)
class Observation:
    """The state of the host as a backend read it: one entry per port with our mark.

    A backend subclasses it to add whatever else its ``plan`` needs.
    """

    ports: Mapping[str, ObservedPort]
    #: Milliseconds spent waiting, by component of the host.
    timings_ms: Mapping[str, float] = field(default_factory=dict, kw_only=True, compare=False)
    #: For an observation of the whole host: the mark of the store that changed it last
    #: (``Host.mark``), empty if there is none.
    store_mark: str = field(default="", kw_only=True, compare=False)


@dataclass(frozen=True)
class Change:
    """One step towards the intent, as data: it can be printed, tested and applied.

    ``ports`` are the ports that the step is made for; if it fails, it fails for each of them. A step
    for no port names in ``physical_network`` the one that it is for, if any: its failure is that one's.
    """

    #: Whether the host takes any number of such steps at once without holding up its other work.
    is_light: ClassVar[bool] = False
    #: Whether the step keeps frames from where they must not go: such steps come first in a repair, and a
    #: port gets them whatever else fails.
    closes: ClassVar[bool] = False
    #: Whether the step follows from what a guest did, such as taking its VF: the host has not drifted.
    follows_guest: ClassVar[bool] = False
    #: What ``describe`` says: a format string for ``self``. Empty: all fields.
    described_as: ClassVar[str] = ""

    ports: tuple[str, ...]
    physical_network: str = field(default="", kw_only=True, compare=False)

    @property
    def claimed(self) -> Claim | None:
        """The resource to quarantine if the change was applied but is missing when the host is read back."""
        return None

    def describe(self) -> str:
        """Describe the change in one sentence without the port: ``create bridge br-phys1``."""
        if self.described_as:
            return self.described_as.format(self=self)
        own = {key: value for key, value in vars(self).items() if key not in ("ports", "physical_network")}
        values = (f"{key}={value}" for key, value in own.items() if value is not None)
        return f"{type(self).__name__} {' '.join(values)}".rstrip()


@dataclass(frozen=True)
class Plan:
    """The changes in the order to apply them, and the ports that cannot be configured, with the errors."""

    changes: tuple[Change, ...] = ()
    refused: Mapping[str, NetpluginError] = field(default_factory=dict)
    #: Live ports that keep their current configuration although the options say otherwise, with the
    #: error. Everything else (filter, rates) is still updated; the port is ``degraded``.
    kept: Mapping[str, NetpluginError] = field(default_factory=dict)


@dataclass(frozen=True)
class Applied:
    """The result of ``apply``: the ports that failed, and the milliseconds spent by step.

    ``unfit`` are claimed resources on which a setting failed that others of their kind accept, with
    the reason. They are quarantined: no port gets them any more.
    """

    failed: Mapping[str, NetpluginError] = field(default_factory=dict)
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    unfit: Mapping[Claim, str] = field(default_factory=dict)
    #: The first error of the changes that are for no port, by their ``physical_network``.
    of_networks: Mapping[str, NetpluginError] = field(default_factory=dict)


ObservationT = TypeVar("ObservationT", bound=Observation)


class Backend(ABC, Generic[ObservationT]):
    """A way to connect a VM's NIC, loaded from the entry point group ``netplugin.backends``.

    An instance is created with the options (``oslo.config``) and is used by one thread at a time,
    except ``probe``, ``validate`` and ``binding``, which any thread may call.
    """

    name: ClassVar[str]
    features: ClassVar[Features]
    #: For netplugin-zeroloss, of each port, or by the ``vif_type`` of its binding; None: it cannot measure
    #: this backend.
    data_path: ClassVar[DataPath | Mapping[str, DataPath] | None] = None

    @classmethod
    def check_options(cls, conf: Any) -> None:
        """Check values of the backend's options that their types do not, without touching the host.

        For ``netplugin-agent --check``; the options are registered. Raises: ValueError naming the option.
        """
        return

    def hold(self) -> Usability:
        """Lock what only one agent may manage at a time (an OVSDB, a network namespace, NICs).

        The result names the owner if another agent holds the lock. Quick, never raises, callable
        from any thread.

        The agent calls it before it observes the host. While the result is not usable, nothing is
        observed for a plan and nothing is applied. Locks are held until the agent ends, which
        releases them. A backend that could lock only a part is usable and does not touch the rest.
        """
        return Usability(True)

    @abstractmethod
    def probe(self) -> Usability:
        """Whether the backend can be used now, from what is already known. Quick, never raises."""

    def validate(self, spec: PortSpec) -> None:
        """Refuse what the backend cannot do, before anything is stored.

        The base class checks ``features`` and the ``FieldRule`` of each field. A backend calls it
        and adds its own checks.

        Raises: Unsupported, InvalidRequest, BackendUnavailable.
        """
        refusals = {
            f"network.type {spec.network.type}": spec.network.type not in self.features.networks,
            f"queues above {self.features.max_queues}": spec.queues > self.features.max_queues,
            "qos.min_egress_kbps": spec.qos.min_egress_kbps is not None and not self.features.min_rate,
            "vf.teaming": spec.vf.teaming and self.features.virtual_functions and not self.features.teaming,
        }
        asked = [what for what, refused in refusals.items() if refused]
        rules = type(spec).rules()
        asked += [
            f"{name} ({rules[name].purpose})" if rules[name].purpose else name
            for name in sorted(spec.differing())
            if not rules[name].supported(spec, self.features)
        ]
        if asked:
            raise Unsupported(
                f"backend {self.name} has no {', no '.join(asked)}",
                step="validate",
                fix="see the backend's features: GET /v1/backends",
            )
        _refuse_useless_rates(spec)

    @abstractmethod
    def observe(self, ports: Collection[str] | None, deadline: float) -> ObservationT:
        """Read the state of these ports, or (None) of all ports with our mark.

        ``deadline`` is a time of ``time.monotonic``.

        Raises: BackendUnavailable if the host cannot be read, HostError, OperationTimeout.
        """

    def read_back(
        self,
        seen: ObservationT,
        changes: Sequence[Change],
        ports: Collection[str] | None,
        deadline: float,
    ) -> ObservationT:
        """Observe again after ``apply``.

        Everything that the changes touched must be read from the host. The rest may be taken from
        ``seen``, the observation before the changes.

        Raises: as ``observe``.
        """
        return self.observe(ports, deadline)

    @abstractmethod
    def plan(self, intents: Sequence[Intent], observed: ObservationT) -> Plan:
        """Compute the changes from the observed to the desired state (pure).

        Planning after a successful apply gives no changes. The order of the intents does not
        matter. No change touches an object without our mark.
        """

    @abstractmethod
    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        """Apply the changes before ``deadline`` (``time.monotonic``).

        The errors of single ports are in ``failed`` and are not raised; the changes for other ports
        are applied.
        """

    @abstractmethod
    def binding(self, intent: Intent) -> Binding:
        """The interface XML and the requirements on the domain (pure)."""

    def watch(self, wake: Callable[[Wake], None]) -> None:
        """Start to call ``wake``, from any thread, when the host changes by itself.

        The first call means that the host can be observed; in the base class that is immediately.
        """
        wake(Wake("the agent starts"))

    def close(self) -> None:
        """Close connections and stop threads; the host is not changed."""


def _refuse_useless_rates(spec: PortSpec) -> None:
    """Refuse a rate below one full frame per second: it is a mistake in the unit (bytes, Mbit)."""
    least = -(-(spec.network.mtu + _ETHERNET_BYTES) * 8 // 1000)
    for name in ("ingress_kbps", "egress_kbps"):
        rate = getattr(spec.qos, name)
        if rate is not None and rate < least:
            message = f"{rate} kbit/s is not one frame of MTU {spec.network.mtu} a second, which is {least}"
            raise InvalidRequest.of_field(f"qos.{name}", message)


#: The kind of claim that holds the name of a device, which a caller has chosen: that of a port, or of a
#: device of the host that serves one. It is that of one port, whatever the backend.
NAME_CLAIM = "device"


def chosen_name(spec: PortSpec) -> str | None:
    """The name of the device, if the caller has chosen it."""
    return spec.device or spec.port_name


def claim_name(intent: Intent, taken: Mapping[Claim, str]) -> tuple[Claim, ...]:
    """Claim the name of the device, if the caller has chosen it. Raises: Conflict if another port has it."""
    spec = intent.spec
    name = chosen_name(spec) if spec else None
    if spec is None or name is None:
        return ()
    claim = Claim(NAME_CLAIM, name)
    holder = taken.get(claim, NOBODY)  # NOBODY: released a moment ago
    if holder not in (NOBODY, intent.port_id):
        raise Conflict(
            f"{'device' if spec.device else 'port_name'} {name} is that of port {holder}",
            step="claim",
            fix="choose another name; or remove that port first",
        )
    return (claim,)


def unknown_network(name: str | None, option: str, known: Collection[str]) -> InvalidRequest:
    """The error for a physical network that is not configured in ``option``."""
    message = f"{name!r} is not in {option} (known: {', '.join(sorted(known)) or 'none'})"
    fix = f"PUT /v1/physical-networks/{name}, or add it to the option and restart the agent"
    return InvalidRequest.of_field("network.physical_network", message, fix=fix)
