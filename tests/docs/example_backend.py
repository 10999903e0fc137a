"""An example: each port is a small file in one of a few numbered slots of a directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from oslo_config import cfg

from netplugin.api.errors import CapacityExhausted, Conflict, HostError, NetpluginError, Unsupported
from netplugin.api.models import Binding, Features, PortSpec
from netplugin.backend import (
    Applied,
    Backend,
    Change,
    Claim,
    Intent,
    Observation,
    ObservedPort,
    Plan,
)
from netplugin.host.shared import Host
from netplugin.host.usability import Usability
from netplugin.libvirt.interfaces import tap_interface
from netplugin.optional import NeedsClaims

GROUP = "slots"
OPTIONS = [
    cfg.StrOpt("directory", default="/var/lib/slots", help="Directory of the ports' files."),
    cfg.IntOpt("count", default=4, min=1, help="How many slots there are."),
]
MARK = "netplugin-port="  # what begins with it is ours, and nothing else is


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]


@dataclass(frozen=True)
class Seen(Observation):
    texts: Mapping[str, str] = field(default_factory=dict)  # what is in each slot that is taken


@dataclass(frozen=True)
class WriteSlot(Change):
    slot: str
    text: str


@dataclass(frozen=True)
class ClearSlot(Change):
    slot: str


class Slots(Backend[Seen], NeedsClaims[Seen]):
    name: ClassVar[str] = "slots"
    features: ClassVar[Features] = Features(networks=("flat",))

    def __init__(self, conf: Any, host: Host) -> None:
        conf.register_opts(OPTIONS, group=GROUP)
        self._directory = Path(conf[GROUP].directory)
        self._slots = [str(number) for number in range(conf[GROUP].count)]

    def probe(self) -> Usability:
        if self._directory.is_dir():
            return Usability(True)
        reason = f"{self._directory} is not a directory"
        return Usability(False, reason, f"mkdir {self._directory}", step="slots")

    def validate(self, spec: PortSpec) -> None:
        if spec.network.type != "flat" or spec.port_security.enabled:
            raise Unsupported("a slot is flat and has no filter", step="validate")

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        try:
            files = [file for file in self._directory.iterdir() if file.is_file()]
            texts = {file.name: file.read_text(errors="replace") for file in files}
        except OSError as refused:
            raise HostError(str(refused), step="slots") from refused
        owners = {slot: owner for slot, text in texts.items() if (owner := _owner(text))}
        found = {
            port_id: ObservedPort(details={"slot": slot})
            for slot, port_id in owners.items()
            if ports is None or port_id in ports
        }
        return Seen(found, texts=texts)

    def claims(self, intent: Intent, observed: Seen, taken: Mapping[Claim, str]) -> tuple[Claim, ...]:
        if intent.claims:
            return intent.claims  # what a port has it keeps
        mine = (intent.port_id, None)
        # The slot it is in comes first: after a lost store a port stays where it is.
        for slot in sorted(self._slots, key=lambda s: _owner_in(observed, s) != intent.port_id):
            claim = Claim("slot", slot)
            if taken.get(claim) in mine and _owner_in(observed, slot) in mine:
                return (claim,)
        raise CapacityExhausted(f"all {len(self._slots)} slots are taken", step="claim")

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        changes: list[Change] = []
        refused: dict[str, NetpluginError] = {}
        for intent in sorted(intents, key=lambda i: i.port_id):
            ports = (intent.port_id,)
            slot = _slot(intent) if intent.spec else None
            for other, text in sorted(observed.texts.items()):
                if _owner(text) == intent.port_id and other != slot:
                    changes.append(ClearSlot(ports, other))
            if slot is None:
                continue
            if _owner_in(observed, slot) not in (None, intent.port_id):
                refused[intent.port_id] = Conflict(f"slot {slot} is not free", step="plan")
            elif observed.texts.get(slot) != _text(intent):
                changes.append(WriteSlot(ports, slot, _text(intent)))
        return Plan(tuple(changes), refused)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        failed: dict[str, NetpluginError] = {}
        for change in changes:
            try:
                match change:
                    case WriteSlot():
                        (self._directory / change.slot).write_text(change.text)
                    case ClearSlot():
                        (self._directory / change.slot).unlink(missing_ok=True)
            except OSError as refused:
                error = HostError(str(refused), step="slots")
                failed.update({port_id: error.for_port(port_id) for port_id in change.ports})
        return Applied(failed)

    def binding(self, intent: Intent) -> Binding:
        assert intent.spec is not None
        xml = tap_interface(intent.spec, f"slot{_slot(intent)}")
        return Binding.model_validate({"vif_type": "tap", "interface_xml": xml, "slot": _slot(intent)})


def _slot(intent: Intent) -> str:
    (claim,) = intent.claims
    return claim.key


def _text(intent: Intent) -> str:
    assert intent.spec is not None
    return f"{MARK}{intent.port_id}\nmac={intent.spec.mac} mtu={intent.spec.network.mtu}\n"


def _owner(text: str) -> str | None:
    first = text.partition("\n")[0]
    return first.removeprefix(MARK) if first.startswith(MARK) else None


def _owner_in(observed: Seen, slot: str) -> str | None:
    """Whose the slot is: a port's id, None if it is free, empty if it is a stranger's."""
    text = observed.texts.get(slot)
    return None if text is None else _owner(text) or ""
