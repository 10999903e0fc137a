"""A host in memory and a backend over it, for tests of everything that is not a backend itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from netplugin.api.errors import NetpluginError, Unsupported
from netplugin.api.models import Binding, DomainRequirements, Features, PortSpec
from netplugin.backend import (
    Applied,
    Backend,
    Change,
    Intent,
    Observation,
    ObservedPort,
    Overlay,
    Plan,
)
from netplugin.host.usability import Usability, Wake
from netplugin.libvirt.interfaces import tap_interface


@dataclass(frozen=True)
class Write(Change):
    """A port becomes ``spec``, or (None) goes."""

    spec: PortSpec | None
    stamp: str = field(default="", compare=False)
    shut: bool = False


@dataclass(frozen=True)
class WriteNetwork(Change):
    """A VXLAN network becomes ``overlay``, or (None) goes; the ports stay."""

    network_id: str
    overlay: Overlay | None


@dataclass(frozen=True)
class Seen(Observation):
    specs: dict[str, PortSpec]
    networks: dict[str, Overlay]
    #: The VXLAN network of every port that is there.
    on: dict[str, str | None]


def _nothing(*_: Any) -> None:
    """The hook that does nothing."""


@dataclass
class FakeHost:
    """What the host has. Tests may change ``ports`` at any time, as another program with root would.

    ``on_observe(ports)`` and ``on_apply(change)`` are called before each read and each change; what
    they raise is what the host refuses with. A change may also be made to vanish: see ``forgetful``.
    """

    ports: dict[str, PortSpec] = field(default_factory=dict)
    networks: dict[str, Overlay] = field(default_factory=dict)
    #: The mark of the store that changed it last.
    store_mark: str = ""
    #: The mark of the store on each port that carries one.
    stamps: dict[str, str] = field(default_factory=dict)
    #: The host's own word that a port does not work.
    faults: dict[str, str] = field(default_factory=dict)
    #: Ports from and to which nothing is forwarded.
    shut: set[str] = field(default_factory=set)
    #: Whether a guest runs behind a port, as far as the host shows it.
    guests: dict[str, bool] = field(default_factory=dict)
    #: The ports that were announced, oldest first; each was open then.
    announced: list[str] = field(default_factory=list)
    #: Those whose destinations were asked to announce them, before they were closed.
    handed_over: list[str] = field(default_factory=list)
    usability: Usability = field(default_factory=lambda: Usability(True))
    #: Writes to these ports are accepted and not kept.
    forgetful: set[str] = field(default_factory=set)
    #: Ports that are not migrated.
    unmovable: set[str] = field(default_factory=set)
    on_observe: Callable[[Collection[str] | None], None] = _nothing
    on_apply: Callable[[Change], None] = _nothing
    #: All changes that were made, oldest first.
    written: list[Write | WriteNetwork] = field(default_factory=list)
    #: Tells the agent that the host moved by itself; set by ``Backend.watch``.
    wake: Callable[[Wake], None] = _nothing
    closed: bool = False


class FakeBackend(Backend[Seen]):
    """See ``netplugin.backend.Backend``. Several may share one host: each has all of its ports."""

    name: ClassVar[str] = "fake"
    features: ClassVar[Features] = Features(
        networks=("flat", "vlan", "vxlan"), port_security=("mac", "ip"), max_queues=8, live_migration=True
    )
    shut_without_guest: ClassVar[bool] = False

    def __init__(self, name: str = "fake", host_state: FakeHost | None = None) -> None:
        self.name = name  # type: ignore[misc]  # one class, an instance for each name
        self.host = host_state if host_state is not None else FakeHost()

    def probe(self) -> Usability:
        return self.host.usability

    def validate(self, spec: PortSpec) -> None:
        if spec.network.type not in self.features.networks:
            raise Unsupported(f"network.type {spec.network.type}", step="validate")

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        self.host.on_observe(ports)
        specs = {i: s for i, s in self.host.ports.items() if ports is None or i in ports}
        seen = {
            port_id: ObservedPort(
                self.host.faults.get(port_id),
                {"device": f"fake-{port_id}"},
                self.host.stamps.get(port_id, ""),
                guest=self.host.guests.get(port_id),
            )
            for port_id in specs
        }
        on = {i: s.overlay_id for i, s in self.host.ports.items()}
        mark = self.host.store_mark if ports is None else ""
        return Seen(seen, specs, dict(self.host.networks), on, store_mark=mark)

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        changes = [
            Write((intent.port_id,), intent.spec, intent.stamp, intent.closed)
            for intent in intents
            if observed.specs.get(intent.port_id) != intent.spec
            or (intent.spec is not None and _stamp(observed, intent.port_id) != intent.stamp)
            or (intent.spec is not None and intent.closed != (intent.port_id in self.host.shut))
        ]
        ports = sorted(changes, key=lambda change: change.ports)
        return Plan((*ports, *self._network_changes(intents, observed)))

    def _network_changes(self, intents: Sequence[Intent], observed: Seen) -> list[WriteNetwork]:
        desired: dict[str, Overlay] = {}
        users: dict[str, list[str]] = {}
        for intent in intents:
            if intent.overlay is not None:
                desired[intent.overlay.network_id] = intent.overlay
                users.setdefault(intent.overlay.network_id, []).append(intent.port_id)
        asked = {intent.port_id for intent in intents}
        held = {network_id for i, network_id in observed.on.items() if i not in asked}
        gone = set(observed.networks) - set(desired) - held
        changes = [WriteNetwork((), network_id, None) for network_id in sorted(gone)]
        changes += [
            WriteNetwork(tuple(sorted(users[network_id])), network_id, overlay)
            for network_id, overlay in sorted(desired.items())
            if observed.networks.get(network_id) != overlay
        ]
        return changes

    def held_vlans(self) -> dict[int, str]:
        return {o.local_vlan: i for i, o in self.host.networks.items()}

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        failed: dict[str, NetpluginError] = {}
        for change in changes:
            assert isinstance(change, Write | WriteNetwork)
            try:
                self.host.on_apply(change)
            except NetpluginError as error:
                failed.update({port_id: error.for_port(port_id) for port_id in change.ports})
            else:
                self._write(change)
        return Applied(failed, {"fake": 0.0})

    def _write(self, change: Write | WriteNetwork) -> None:
        self.host.written.append(change)
        if isinstance(change, WriteNetwork):
            self.host.networks.pop(change.network_id, None)
            if change.overlay is not None:
                self.host.networks[change.network_id] = change.overlay
            return
        for port_id in set(change.ports) - self.host.forgetful:
            if change.spec is None:
                self.host.ports.pop(port_id, None)
                self.host.stamps.pop(port_id, None)
                self.host.shut.discard(port_id)
            else:
                (self.host.shut.add if change.shut else self.host.shut.discard)(port_id)
                self.host.ports[port_id] = change.spec
                self.host.stamps[port_id] = change.stamp

    def check_migration(self, intent: Intent) -> None:
        if intent.port_id in self.host.unmovable:
            raise Unsupported("this port stays", step="validate")

    def follow_guest(self, intent: Intent) -> None:
        """A test wakes the agent itself."""

    def hand_over(self, intents: Sequence[Intent], deadline: float) -> None:
        for intent in intents:
            assert intent.port_id in self.host.ports and intent.port_id not in self.host.shut
            self.host.handed_over.append(intent.port_id)

    def announce(self, intents: Sequence[Intent], deadline: float) -> None:
        for intent in intents:
            assert intent.port_id in self.host.ports and intent.port_id not in self.host.shut
            self.host.announced.append(intent.port_id)

    def binding(self, intent: Intent) -> Binding:
        assert intent.spec is not None
        xml = tap_interface(intent.spec, f"fake-{intent.port_id}")
        return Binding(
            vif_type="tap",
            interface_xml=xml,
            domain_requirements=DomainRequirements(numa_node=intent.spec.numa_node),
        )

    def watch(self, wake: Callable[[Wake], None]) -> None:
        self.host.wake = wake
        wake(Wake("the host can be looked at"))

    def close(self) -> None:
        self.host.closed = True


def _stamp(observed: Seen, port_id: str) -> str:
    port = observed.ports.get(port_id)
    return port.stamp if port else ""
