"""The VM of a cell: a libvirt domain of the operator, to which the agent adds NICs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from lxml import etree

from netplugin.api.errors import NetpluginError
from netplugin.host.processes import run
from netplugin.libvirt.needs import size_kb
from netplugin_zeroloss.matrix.bench import CellError
from netplugin_zeroloss.matrix.findings import Finding, of_error
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.values import UnusableInput

#: Timeout of one virsh call, in seconds.
_CALL_S = 60.0
#: Interval between attempts to reach a booting VM, in seconds.
_LOOK_S = 0.5


class DomainRunner:
    """Starts and destroys a domain; its fixed name identifies the leftover of a killed run."""

    def __init__(self, template: Path, uri: str, name: str) -> None:
        self._path, self._uri, self._name = template, uri, name

    @cached_property
    def template(self) -> str:
        """The domain XML without NICs, with the name replaced.

        Raises: UnusableInput if it cannot be read or is not a libvirt domain.
        """
        return _named(read_text(self._path), self._name, str(self._path))

    @property
    def is_running(self) -> bool:
        """Whether the domain runs. Raises: NetpluginError."""
        return self._name in self._running()

    def findings(self, root: Path) -> Iterator[Finding]:
        """Yield what of the template is missing on this host: the domain, its images, libvirt."""
        try:
            domain = etree.fromstring(self.template)
        except UnusableInput as error:
            yield Finding("vm", str(error), "write the domain of the VM there, without its test NICs")
            return
        for image in _images(domain):
            if not (root / image.lstrip("/")).exists():
                yield Finding(
                    "vm",
                    f"{self._path} names {image}, and there is no such file",
                    "put the VM's image there, or name the right file",
                )
        try:
            self._running()
        except NetpluginError as error:
            yield of_error("vm", error, f"virsh -c {self._uri} list; systemctl start libvirtd")

    def memory_mb(self) -> int:
        """Return the memory of the VM in MB; 0: not known. Raises: UnusableInput."""
        memory = etree.fromstring(self.template).find("memory")
        try:
            return size_kb(memory, "<memory>", "vm") // 1024 if memory is not None else 0
        except NetpluginError:
            return 0

    def start(self, xml: str) -> None:
        """Create a transient domain, which disappears when it stops.

        Raises: NetpluginError with the error text of libvirt.
        """
        self._virsh("create", "/dev/stdin", stdin=xml)

    def destroy(self) -> None:
        """Destroy the domain if it exists. Raises: NetpluginError."""
        if self.is_running:
            self._virsh("destroy", self._name)

    def _running(self) -> list[str]:
        return self._virsh("list", "--name").split()

    def _virsh(self, *words: str, stdin: str | None = None) -> str:
        deadline = time.monotonic() + _CALL_S
        return run(["virsh", "-c", self._uri, *words], step="vm", deadline=deadline, stdin=stdin)


def wait_for_ssh(host: str, port: int, seconds: float) -> None:
    """Wait for the banner of the SSH server. Raises: CellError."""
    deadline = time.monotonic() + seconds
    while True:
        # A booting VM refuses, is unreachable, or accepts the connection before sshd is ready.
        with suppress(OSError), socket.create_connection((host, port), timeout=5.0) as there:
            if there.recv(4) == b"SSH-":
                return
        if time.monotonic() > deadline:
            raise CellError(f"the VM did not answer by SSH at {host} port {port} within {seconds:g} s")
        time.sleep(_LOOK_S)


def _images(domain: etree._Element) -> Iterator[str]:
    """Yield the files of this host that the domain names: its disks, kernel and initial RAM disk."""
    for source in domain.iterfind("devices/disk/source"):
        if image := source.get("file") or source.get("dev"):
            yield image
    for name in ("kernel", "initrd", "loader"):
        if image := domain.findtext(f"os/{name}"):
            yield image.strip()


def _named(xml: str, name: str, where: str) -> str:
    """Set the name of the domain and remove its UUID, so that libvirt generates one."""
    parser = etree.XMLParser(resolve_entities=False, load_dtd=False, no_network=True)
    try:
        domain = etree.fromstring(xml.encode(), parser)
    except etree.XMLSyntaxError as error:
        raise UnusableInput(where, f"it is no XML: {error}") from error
    if domain.tag != "domain":
        raise UnusableInput(where, f"it is no libvirt domain: its element is <{domain.tag}>")
    for child in [*domain.findall("uuid"), *domain.findall("name")]:
        domain.remove(child)
    element = etree.Element("name")
    element.text = name
    domain.insert(0, element)
    return str(etree.tostring(domain, encoding="unicode"))
