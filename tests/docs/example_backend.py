"""An example: each port is a small file in a directory, named by the id of the port."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from oslo_config import cfg

from netplugin.api.errors import Conflict, HostError, NetpluginError, Unsupported
from netplugin.api.models import Binding, Features, PortSpec
from netplugin.backend import Applied, Backend, Change, Intent, Observation, ObservedPort, Plan
from netplugin.host.names import device_name
from netplugin.host.shared import Host
from netplugin.host.usability import Usability
from netplugin.libvirt.interfaces import tap_interface

GROUP = "files"
OPTIONS = [cfg.StrOpt("directory", default="/var/lib/files", help="Directory of the ports' files.")]
MARK = "netplugin-port="  # a file that begins with it is ours


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]


@dataclass(frozen=True)
class FilesSeen(Observation):
    texts: Mapping[str, str] = field(default_factory=dict)  # of all files, ours or not


@dataclass(frozen=True)
class WriteFile(Change):
    file: str
    text: str


@dataclass(frozen=True)
class RemoveFile(Change):
    file: str


class Files(Backend[FilesSeen]):
    name: ClassVar[str] = "files"
    features: ClassVar[Features] = Features(networks=("flat",))

    def __init__(self, conf: Any, host: Host) -> None:
        conf.register_opts(OPTIONS, group=GROUP)
        self._directory = Path(conf[GROUP].directory)

    def probe(self) -> Usability:
        if self._directory.is_dir():
            return Usability(True)
        reason = f"{self._directory} is not a directory"
        return Usability(False, reason, f"mkdir {self._directory}", step="files")

    def validate(self, spec: PortSpec) -> None:
        super().validate(spec)
        if spec.port_security.enabled:
            raise Unsupported("a file has no filter", step="validate", fix="plug it without port_security")

    def observe(self, ports: Collection[str] | None, deadline: float) -> FilesSeen:
        try:
            files = [file for file in self._directory.iterdir() if file.is_file()]
            texts = {file.name: file.read_text(errors="replace") for file in files}
        except OSError as refused:
            raise HostError(str(refused), step="files") from refused
        owners = {file: owner for file, text in texts.items() if (owner := owner_of(text))}
        found = {
            port_id: ObservedPort(details={"file": file})
            for file, port_id in owners.items()
            if ports is None or port_id in ports
        }
        return FilesSeen(found, texts=texts)

    def plan(self, intents: Sequence[Intent], observed: FilesSeen) -> Plan:
        changes: list[Change] = []
        refused: dict[str, NetpluginError] = {}
        for intent in sorted(intents, key=lambda i: i.port_id):
            ports = (intent.port_id,)
            file = self.file_of(intent) if intent.spec else None
            for other, text in sorted(observed.texts.items()):
                if owner_of(text) == intent.port_id and other != file:
                    changes.append(RemoveFile(ports, other))
            if file is None:
                continue
            there = observed.texts.get(file)
            if there is not None and owner_of(there) != intent.port_id:
                refused[intent.port_id] = Conflict(f"file {file} is not ours", step="plan")
            elif there != (text := self.text_of(intent)):
                changes.append(WriteFile(ports, file, text))
        return Plan(tuple(changes), refused)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        failed: dict[str, NetpluginError] = {}
        for change in changes:
            try:
                match change:
                    case WriteFile():
                        (self._directory / change.file).write_text(change.text)
                    case RemoveFile():
                        (self._directory / change.file).unlink(missing_ok=True)
            except OSError as error:
                refused = HostError(str(error), step="files")
                failed.update({port_id: refused.for_port(port_id) for port_id in change.ports})
        return Applied(failed)

    def binding(self, intent: Intent) -> Binding:
        assert intent.spec is not None
        xml = tap_interface(intent.spec, device_name("tap", intent.port_id))
        file = str(self._directory / self.file_of(intent))
        return Binding.model_validate({"vif_type": "tap", "interface_xml": xml, "file": file})

    def file_of(self, intent: Intent) -> str:
        return intent.port_id  # its characters are safe in a file name

    def text_of(self, intent: Intent) -> str:
        assert intent.spec is not None
        return f"{MARK}{intent.port_id}\nmac={intent.spec.mac} mtu={intent.spec.network.mtu}\n"


def owner_of(text: str) -> str | None:
    """The port whose mark a file has; None if the file is not ours."""
    first = text.partition("\n")[0]
    return first.removeprefix(MARK) if first.startswith(MARK) else None
