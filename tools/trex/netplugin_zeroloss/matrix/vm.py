"""Runs the VM of a cell: a user-supplied libvirt domain, to which the agent adds NICs."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from lxml import etree

from netplugin.api.errors import NetpluginError
from netplugin.host.processes import run
from netplugin_zeroloss.matrix.bench import CellError
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.values import UnusableInput

#: Timeout of one virsh call, in seconds.
_CALL_S = 60.0
#: Interval between attempts to reach a booting VM, in seconds.
_LOOK_S = 0.5


class DomainRunner:
    """Starts and destroys a domain; its fixed name identifies the leftover of a killed run."""

    def __init__(self, template: Path, uri: str, name: str) -> None:
        """Read the template. Raises: UnusableInput if it is not a libvirt domain."""
        self._uri, self._name = uri, name
        self._xml = _named(read_text(template), name, str(template))

    @property
    def template(self) -> str:
        """The domain XML without NICs, with the name replaced."""
        return self._xml

    def check(self) -> None:
        """Check that libvirt responds. Raises: UnusableInput."""
        try:
            self._running()
        except NetpluginError as error:
            raise UnusableInput("vm", str(error)) from error

    def start(self, xml: str) -> None:
        """Create a transient domain, which disappears when it stops.

        Raises: NetpluginError with the error text of libvirt.
        """
        self._virsh("create", "/dev/stdin", stdin=xml)

    def destroy(self) -> None:
        """Destroy the domain if it exists. Raises: NetpluginError."""
        if self._name in self._running():
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
